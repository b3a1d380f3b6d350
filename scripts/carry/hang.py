"""A hook put where it belongs when the lines around it have changed: by what it hangs on.

A hook is an import, a decorator, a base class, or lines that stand for or beside some of upstream's
in one definition. What it hangs on has a name or a text. Where the other release has that, in the
definition of the same name, exactly once, that is the place, whatever stands around it; else there
is none, and a person decides. Nothing is compared by likeness.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

from scripts.carry.moved import Definition, definition_at, definitions
from scripts.patchset.patch import Hunk

_HEADER = re.compile(r"\s*(async def|def|class)\b")
_WIDTH = 88  # upstream's lines


@dataclass(frozen=True)
class _Run:
    """What a hunk exchanges in one place: the lines `old` of `base`, from line `first`, for `new`.

    Lines count from 1; an insertion stands before the line `first`. `names` has the definitions
    that have another name now.
    """

    base: tuple[str, ...]
    first: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    names: Mapping[str, str]

    @property
    def made(self) -> str:
        """The text of the base with it."""
        at = self.first - 1
        return "".join([*self.base[:at], *self.new, *self.base[at + len(self.old) :]])


def hung(base: str, hunk: Hunk, ours: str, names: Mapping[str, str] | None = None) -> str:
    """Return `ours` with what `hunk` does to `base`, or nothing where a part of it has no place.

    Args:
        base: A text to which the hunk applies exactly, at its line.
        hunk: What is to be placed.
        ours: The text to place it in.
        names: Definitions of the base that have another name in `ours`.
    """
    for run in _runs(base, hunk, names or {}):
        texts = (way(run, ours) for way in _WAYS)
        ours = next(filter(None, texts), "")
        if not ours or _parsed(ours) is None:
            return ""
    return ours


def _runs(base: str, hunk: Hunk, names: Mapping[str, str]) -> list[_Run]:
    lines = tuple(base.splitlines(keepends=True))
    changes = SequenceMatcher(None, hunk.old, hunk.new, autojunk=False).get_opcodes()
    return [
        _Run(lines, hunk.stated + i + 1, hunk.old[i:k], hunk.new[j:m], names)
        for kind, i, k, j, m in changes
        if kind != "equal"
    ]


def changed_in(base: str, hunk: Hunk) -> list[Definition | None]:
    """Return the innermost definitions of `base` that `hunk` changes something in."""
    return [definition_at(base, run.first) for run in _runs(base, hunk, {})]


def only_imports(base: str, hunk: Hunk) -> bool:
    """Whether `hunk` changes nothing but the imports of `base`."""
    return all(
        before is not None and after is not None and _rest(before) == _rest(after)
        for run in _runs(base, hunk, {})
        for before, after in [(_parsed(base), _parsed(run.made))]
    )


def with_imports(base: str, made: str, ours: str, used: str) -> str:
    """Return `ours` with the imports that `made` has, `base` has not, and the code `used` names.

    Nothing where one of them has no place.
    """
    words = {*re.findall(r"\w+", used)}
    before, after = _parsed(base), _parsed(made)
    if before is None or after is None:
        return ""
    has = {
        module: [name for name in names if name.rpartition(" ")[2] in words]
        for module, names in _imports(after).items()
    }
    return _added(_imports(before), has, ours)


def _imported(run: _Run, ours: str) -> str:
    """Add the names that the run imports at the top of the module."""
    base, made = _parsed("".join(run.base)), _parsed(run.made)
    if base is None or made is None or _rest(base) != _rest(made):
        return ""
    had, has = _imports(base), _imports(made)
    if had == has:
        return ""  # it imports below the first definition, where nobody looks
    if any(not {*names} <= {*has.get(module, ())} for module, names in had.items()):
        return ""  # it takes one away
    return _added(had, has, ours)


def _added(had: Mapping[str, list[str]], has: Mapping[str, list[str]], ours: str) -> str:
    """Return `ours` with what is in `has` and not in `had`; nothing where that has no place."""
    tree = _parsed(ours)
    if tree is None:
        return ""
    for module, names in has.items():
        there = _imports(tree)
        known = {*had.get(module, ()), *there.get(module, ())}
        new = [name for name in names if name not in known]
        if new:
            before = [one for one in [*has][: [*has].index(module)] if one in there]
            ours = _with_names(ours, tree, module, new, before)
            tree = _parsed(ours)
            if tree is None:
                return ""
    return ours


_Import = ast.Import | ast.ImportFrom
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def _top(tree: ast.Module) -> list[_Import]:
    """Return the imports above the first definition."""
    above = takewhile(lambda node: not isinstance(node, ast.ClassDef | _FUNCTION), tree.body)
    return [node for node in above if isinstance(node, _Import)]


def _rest(tree: ast.Module) -> list[str]:
    return [ast.dump(node) for node in tree.body if not isinstance(node, _Import)]


def _module(node: _Import) -> str:
    """Return what is named before the names: `import`, or `from x import`."""
    if isinstance(node, ast.Import):
        return "import"
    return f"from {'.' * node.level}{node.module or ''} import"


def _imports(tree: ast.Module) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in _top(tree):
        found.setdefault(_module(node), []).extend(ast.unparse(one) for one in node.names)
    return found


def _with_names(
    ours: str, tree: ast.Module, module: str, names: Sequence[str], before: Sequence[str]
) -> str:
    """Return `ours` with an import; nothing where the module's own import of that has no place."""
    lines, there = ours.splitlines(keepends=True), _top(tree)
    own = [node for node in there if _module(node) == module and module != "import"]
    if own:
        first, last = own[0].lineno - 1, own[0].end_lineno or own[0].lineno
        if lines[last - 1] == ")\n":
            lines[last - 1 : last - 1] = [f"    {name},\n" for name in names]
            return "".join(lines)
        if last - first > 1 or "#" in lines[first]:
            return ""
        names = [*(ast.unparse(one) for one in own[0].names), *names]
        return "".join([*lines[:first], _statement(module, names), *lines[last:]])
    beside = [node for node in there if _module(node) in before[-1:]] or there
    last = max((node.end_lineno or node.lineno for node in beside), default=0)
    return "".join([*lines[:last], _statement(module, names), *lines[last:]]) if last else ""


def _statement(module: str, names: Sequence[str]) -> str:
    line = f"{module} {', '.join(names)}\n"
    if len(line) <= _WIDTH:
        return line
    return f"{module} (\n{''.join(f'    {name},{chr(10)}' for name in names)})\n"


def _decorated(run: _Run, ours: str) -> str:
    """Put a decorator above the definition of the same name, in the same order as others of it."""
    own = definition_at("".join(run.base), run.first)
    if run.old or own is None or not all(line.lstrip().startswith("@") for line in run.new):
        return ""
    target, lines = _same(own, run, ours), ours.splitlines(keepends=True)
    above = _decorators(run.base, own)
    if target is None or run.first - own.first > len(above):
        return ""
    there = _decorators(lines, target)
    if there != [one for one in above if one in there]:
        return ""  # upstream has others now
    below = [there.index(one) for one in above[run.first - own.first :] if one in there]
    at = target.first - 1 + min(below, default=len(there))
    return "".join([*lines[:at], *_moved(run.new, run.new[0], lines[at]), *lines[at:]])


def _decorators(lines: Sequence[str], one: Definition) -> list[str]:
    rows = []
    for line in lines[one.first - 1 : one.last]:
        if _HEADER.match(line):
            break
        rows.append(line.strip())
    return rows


def _inherited(run: _Run, ours: str) -> str:
    """Give a class further bases."""
    own = definition_at("".join(run.base), run.first)
    if own is None or len(run.old) != 1 or len(run.new) != 1:
        return ""
    old, new = _bases(run.old[0]), _bases(run.new[0])
    target, lines = _same(own, run, ours), ours.splitlines(keepends=True)
    if old is None or new is None or target is None:
        return ""
    at = target.first - 1 + len(_decorators(lines, target))
    there = _bases(lines[at])
    if there is None or there != [one for one in old if one in there]:
        return ""  # upstream has others now
    if old != [one for one in new if one in old]:
        return ""
    bases = [one for one in new if one in there or one not in old]
    head = lines[at].partition("class")[0] + f"class {target.name.rpartition('.')[2]}"
    return "".join([*lines[:at], f"{head}({', '.join(bases)}):\n", *lines[at + 1 :]])


def _bases(line: str) -> list[str] | None:
    tree = _parsed(f"{line.strip()} pass\n")
    if tree is None or not (tree.body and isinstance(one := tree.body[0], ast.ClassDef)):
        return None
    return None if one.keywords else [ast.unparse(base) for base in one.bases]


def _exchanged(run: _Run, ours: str) -> str:
    """Exchange the same lines of the definition of the same name."""
    found = _scopes(run, ours, run.first, run.first + len(run.old) - 1)
    if found is None or not any(line.strip() for line in run.old):
        return ""
    lines, scope, base = found
    places, twins = _places(lines, scope, run.old), _places(run.base, base, run.old)
    if len(places) != 1 or len(twins) != 1:
        return ""
    at = places[0]
    moved = _moved(run.new, run.old[0], lines[at])
    return "".join([*lines[:at], *moved, *lines[at + len(run.old) :]])


def _beside(run: _Run, ours: str) -> str:
    """Put lines beside the line that they stood by, in the definition of the same name.

    Where both of the lines around them are there, with others between them, either may be meant.
    """
    above, below = run.first - 1, run.first  # as numbers from 1
    found = _scopes(run, ours, above, below)
    if run.old or found is None:
        return ""
    lines, scope, base = found
    pair = tuple(run.base[n - 1] for n in (above, below))
    if not all(line.strip() for line in pair):
        return ""
    places = [_places(lines, scope, [line]) for line in pair]
    twins = [_places(run.base, base, [line]) for line in pair]
    if [len(one) for one in twins] != [1, 1] or sorted(map(len, places)) != [0, 1]:
        return ""
    at = places[0][0] + 1 if places[0] else places[1][0]
    line, there = (pair[0], lines[at - 1]) if places[0] else (pair[1], lines[at])
    return "".join([*lines[:at], *_moved(run.new, line, there), *lines[at:]])


def _scopes(
    run: _Run, ours: str, first: int, last: int
) -> tuple[list[str], Definition, Definition] | None:
    """Return our lines, the definition there, and that of the base which holds both lines."""
    base = "".join(run.base)
    own = definition_at(base, first)
    if own is None or own != definition_at(base, last):
        return None
    target = _same(own, run, ours)
    return (ours.splitlines(keepends=True), target, own) if target else None


def _same(own: Definition, run: _Run, ours: str) -> Definition | None:
    """Return the one definition of `ours` that has the name of `own`."""
    if sum(one.name == own.name for one in definitions("".join(run.base))) != 1:
        return None
    name = run.names.get(own.name, own.name)
    found = [one for one in definitions(ours) if one.name == name]
    return found[0] if len(found) == 1 else None


def _places(lines: Sequence[str], scope: Definition, wanted: Sequence[str]) -> list[int]:
    """Return at which indices of `lines`, within `scope`, `wanted` stands, however far indented."""
    plain, size = _plain(wanted), len(wanted)
    starts = range(scope.first - 1, scope.last - size + 1)
    return [at for at in starts if _plain(lines[at : at + size]) == plain]


def _plain(lines: Sequence[str]) -> list[str]:
    margin = min((_indent(line) for line in lines if line.strip()), default=0)
    return [line[margin:] if line.strip() else "\n" for line in lines]


def _moved(lines: Sequence[str], stood_by: str, stands_by: str) -> list[str]:
    """Indent `lines` as much more, or less, as the line that they stood by is now."""
    more = _indent(stands_by) - _indent(stood_by)
    return [_indented(line, more) if line.strip() else line for line in lines]


def _indented(line: str, more: int) -> str:
    return " " * more + line if more > 0 else line[min(-more, _indent(line)) :]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


_WAYS: tuple[Callable[[_Run, str], str], ...] = (
    _imported,
    _decorated,
    _inherited,
    _exchanged,
    _beside,
)
