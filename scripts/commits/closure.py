"""Can each commit of a branch be imported? Asked of its text alone, so it takes no vLLM.

Every changed file has to compile. Every import of `vllm_overlay` in it, and every import of
`vllm` in the overlay, has to name a module that the commit holds, and a name that is bound there.
What Python builds at run time is not seen: `nox -s export -- --prove` imports for real.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from scripts.patchset.overlay import PACKAGE
from scripts.system.git import Repository

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields that hold statements


class _Module:
    """One text, of which each is asked for many commits.

    Attributes:
        imports: Module and name of each import that can run.
        bound: The names that it binds; `*` where that cannot be known.
        fault: Why it cannot be compiled; empty if it can.
    """

    def __init__(self, text: str, name: str) -> None:
        self.imports: list[tuple[str, str]] = []
        self.bound: set[str] = set()
        self.fault = ""
        try:
            tree = ast.parse(text)
            compile(tree, name, "exec", dont_inherit=True)  # sees more than the parser does
        except (SyntaxError, ValueError) as error:
            self.fault = f"does not compile: {error}"
            return
        self.imports = [*_imports(tree)]
        self.bound = _bound(tree.body)


class Closure:
    """Looks into the commits of one repository; what two commits share is read once.

    Args:
        repository: Where they are.
        read: What returns the text of a blob there.
    """

    def __init__(self, repository: Repository, read: Callable[[str], str]) -> None:
        self._repository, self._read = repository, read
        self._trees: dict[str, dict[str, str]] = {}
        self._modules: dict[str, _Module] = {}  # by blob

    def faults(self, stock: str, commit: str) -> Iterator[str]:
        """Yield what keeps the files that set `commit` apart from `stock` from being imported."""
        files, changed = self._blobs(stock, commit)
        for path in changed:
            if not path.endswith(".py"):
                continue
            module = self._module(files[path])
            if module.fault:
                yield f"{path}: {module.fault}"
            # Upstream's own lines may import what is made by its build.
            checked = ("vllm", PACKAGE) if path.startswith(f"{PACKAGE}/") else (PACKAGE,)
            for name, member in module.imports:
                if name.split(".")[0] in checked and not self._has(files, name, member):
                    yield f"{path}: no {'.'.join(filter(None, (name, member)))} in this commit"

    def _has(self, files: dict[str, str], name: str, member: str) -> bool:
        path = _file(files, name)
        if path is None:
            return False
        if not member or member == "*" or _file(files, f"{name}.{member}"):
            return True
        return bool({member, "*"} & self._module(files[path]).bound)

    def _blobs(self, stock: str, commit: str) -> tuple[dict[str, str], list[str]]:
        """Return the files of `commit`, path to blob, and the paths that are not as in `stock`."""
        if stock not in self._trees:
            rows = self._repository.run("ls-tree", "-r", "-z", stock, "--", "vllm", PACKAGE)
            fields = (row.partition("\t") for row in rows.split("\0") if row)
            self._trees[stock] = {path: entry.split()[2] for entry, _, path in fields}
        files = dict(self._trees[stock])
        said = self._repository.run("diff-tree", "-r", "-z", stock, commit, "--", "vllm", PACKAGE)
        words = said.split("\0")
        changed = []
        for entry, path in zip(words[::2], words[1::2], strict=False):
            blob, status = entry.split()[3:]
            files.pop(path, None)
            if status != "D":
                files[path] = blob
                changed.append(path)
        return files, changed

    def _module(self, blob: str) -> _Module:
        if blob not in self._modules:
            self._modules[blob] = _Module(self._read(blob), blob)
        return self._modules[blob]


def _file(files: dict[str, str], module: str) -> str | None:
    base = module.replace(".", "/")
    return next((p for p in (f"{base}/__init__.py", f"{base}.py") if p in files), None)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import that can run; those for type checkers cannot."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            pending += node.orelse
            continue
        for block in _BLOCKS:  # no import lies in an expression, which most nodes are
            pending += getattr(node, block, ())
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def _bound(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind in their module; `*` where that cannot be known."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement) if not _is_scope(statement) else [statement]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add("*" if node.name == "__getattr__" else node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _is_scope(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_for_type_checkers(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
