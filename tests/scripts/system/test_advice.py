"""Every command that an error names is complete, and typing it leads on.

The messages are read from the source. What a message tells a user to type is typed here, in the
situation in which it is printed, or the message stands in `UNTYPED` with the reason. So a new one
fails until somebody has tried it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.patchset.registry import Unpatched
from scripts.project import ROOT, project
from tests.scripts import toys
from tests.scripts.carrying import REGISTRY, WORKER, carrying, change, release
from tests.scripts.checkouts import (
    Checkout,
    copied,
    registry_text,
    sdist_bytes,
    wheel_bytes,
    wheel_name,
)
from tests.scripts.repos import BARE, commit, git, write

if TYPE_CHECKING:
    from tests.scripts.conftest import LocalIndex

Ended = subprocess.CompletedProcess[str]
STAYS = {**toys.FILES, WORKER: '"""More."""\n' + toys.FILES[WORKER]}
COLLIDES = {
    **toys.FILES,
    WORKER: toys.changed(WORKER, ("    return x + 9\n", "    return 9 + x\n")),
}

# A command stands at the beginning, or behind a colon, a semicolon or a bracket.
COMMAND = re.compile(r"(?:^|: |; |\()((?:nox|git|rm|python|pip) [^,;)]*)")
EXPRESSIONS = {
    "PACKAGE": "vllm_overlay",
    "an_edit()": "0.20.2 K05",
    "at": "git -C folder",
    "branch": "kvfix/v0.20.2",
    "environment.release": "0.20.2",
    "name": "rebase",
    "next(iter(registry.fixes))": "40449",
    "not_carried()": "0.33.0",
    "project().default_release": "0.20.2",
    "quote(scenario)": "wire",
    "quote(str(folder))": "'a folder'",
    "quote(str(given))": "'a folder/it.whl'",
    "fix.id": "K05",
    "quote(f'patches/{name}')": "'patches/K05-a name/0.20.0.patch'",
    "quote(str(path))": "'a folder/file'",
    "quote(str(repository.path))": "'a folder'",
    "quote(str(self.path))": "'a folder/it.whl'",
    "release": "0.20.2",
    "releases[-1]": "0.33.0",
    "releases()[-1]": "0.33.0",
    "self.release": "0.20.2",
    "self.version.public": "0.20.2",
    "shlex.join(again)": "tests/overlay",
    "options.seed": "1",
    "' '.join(map(str, tests))": "tests/overlay",
    "target.release": "0.20.2",
    "version": "0.25.0",
    "words[0]": "0.25.0",
    "_fetch(repository, at, release)": "git -C folder fetch origin; ",
    "_free_name(repository, branch)": "kvfix/v0.20.2-old",
    "' '.join(failed)": "0.20.2 0.21.0",
    "','.join((fix.id for fix in sbom.fixes))": "K01",
    "','.join(without_both)": "K01,K08",
    "public": "0.20.2",
    "sbom.release": "0.20.2",
    "series.release": "0.20.2",
}
"""What a placeholder in a command may stand for."""

UNTYPED = {
    "bench/apply:measure_apply:UsageError": "measures for minutes",
    "commands/bench:main:UsageError": "measures for minutes",
    "commands/bench:main:CheckFailedError": "measures for minutes",
    "commands/fuzz:main:CheckFailedError": "a rule has to be broken first",
    "mutants/run:rows_of:CheckFailedError": "pytest has to break down first",
    "commands/parity:main:CheckFailedError": "runs in an environment of 8 GB",
    "commands/push:main:CheckFailedError": "runs in an environment of 8 GB",
    "commands/push:main:UsageError": "runs in an environment of 8 GB",
    "commands/status:main:CheckFailedError": "runs in an environment of 8 GB",
    "commands/status:main:CheckFailedError 2": "as those that name regressions",
    "commands/tests:main:CheckFailedError": "runs in an environment of 8 GB",
    "commands/upstream_tests:_release:UsageError": "runs in an environment of 8 GB",
    "prove/environment:Environment.make:UsageError": "gets uv from the network",
    "prove/parity:_run:UsageError": "runs in an environment of 8 GB",
    "upstream_tests/session:report_on:UsageError": "runs in an environment of 8 GB",
    "upstream_tests/session:_selection:UsageError": "runs in an environment of 8 GB",
    "upstream_tests/session:_selection:UsageError 2": "runs in an environment of 8 GB",
    "carry/landing:land:UsageError": "a file has to change while the proof runs",
    "carry/rebase:resume:UsageError 2": "test_rebase types it",
    "carry/state:load_state:read_json": "test_rebase types it",
    "carry/track:track:UsageError": "asks the index",
    "commits/worktree:finish:read_json": "as where it is not finished",
    "patchset/overlay:_require_member:CheckFailedError": "test_apply types it",
    "carry/track:_tool:CommandError": "asks the index",
    "commits/bundle:_check:CheckFailedError": "as the others that name lint",
    "carry/landing:_run:CheckFailedError": "as that of _check_needed in the same module",
    "carry/trial:neighbours:NotCarriedError": "as that of project, which comes before it",
    "commands/mutants:_survivors:UsageError": "runs in an environment of 8 GB",
    "patchset/pins:_wrong:RegistryError": "as the others that name edit",
    "prove/audit:_require_pinned:NotLockedError": "as that of pinned_release",
    "patchset/choice:without:UsageError 2": "test_apply types it; no fix here needs another",
    "prove/forks:run_in_forks:CommandError": "runs in an environment of 8 GB",
    "prove/starts:check_starts:CheckFailedError": "as the others that name lint",
    "patchset/registry:Registry.fix:RegistryError": "as the others that name lint",
    "patchset/series:load_series:NotCarriedError": "as that of project, which comes before it",
    "upstream/history:_pinned:NotLockedError": "as that of upstream/pin",
}
TYPED: set[str] = set()
NOWHERE = "http://127.0.0.1:9/simple"

pytestmark = pytest.mark.timeout(1200)


def _texts(node: ast.expr) -> list[str]:
    """Return what an expression may say; what is put in stands in braces, as in the source."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.BinOp):
        return [one + two for one in _texts(node.left) for two in _texts(node.right)]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return [
            "".join(
                f"{{{ast.unparse(part.value)}}}"
                if isinstance(part, ast.FormattedValue)
                else str(part.value)  # type: ignore[attr-defined]
                for part in node.values
            )
        ]
    raise TypeError(f"advice that cannot be read: {ast.unparse(node)}")


def _advice_of(node: ast.AST, where: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield each `next_step` with the function and the error that it stands in."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from _advice_of(child, f"{where}.{child.name}" if named else where)  # type: ignore[attr-defined]
        if isinstance(child, ast.Call):
            kind = ast.unparse(child.func)
            for keyword in child.keywords:
                if keyword.arg == "next_step":
                    yield f"{where.removeprefix('.')}:{kind}", keyword.value


def advised() -> dict[str, list[str]]:
    """Return what each message advises, by its module, function and error."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        module = path.relative_to(ROOT / "scripts").with_suffix("").as_posix()
        for place, node in _advice_of(ast.parse(path.read_text(encoding="utf-8")), ""):
            if isinstance(node, ast.Name):  # handed through
                continue
            key, number = f"{module}:{place}", 2
            while key in found:
                key, number = f"{module}:{place} {number}", number + 1
            found[key] = _texts(node)
    return found


ADVISED = advised()
_PLACE = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")


def commands(text: str) -> list[str]:
    """Return the commands that a message names, with examples in the place of expressions."""
    return COMMAND.findall(_PLACE.sub(lambda one: EXPRESSIONS.get(one[1], one[0]), text))


WITH_COMMANDS = {key: texts for key, texts in ADVISED.items() if any(map(commands, texts))}


class _ParsedError(Exception):
    pass


def accepted(session: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the command of a session takes these words."""
    if session == "tests":
        return True  # they are pytest's
    if session in ("lint", "matrix"):
        return not words
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise _ParsedError

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patched.setattr(sys, "argv", [session, *words])
        try:
            importlib.import_module(f"scripts.commands.{session}").main()
        except _ParsedError:
            return True
        except SystemExit:
            return False
    raise AssertionError(f"{session} did not read its arguments")


@pytest.mark.parametrize("key", WITH_COMMANDS)
def test_each_command_can_be_typed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = re.findall(
        r"^@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE
    )
    assert sessions
    for command in [one for text in WITH_COMMANDS[key] for one in commands(text)]:
        assert "{" not in command, f"say in EXPRESSIONS what stands there: {command}"
        words = shlex.split(command)
        if words[0] != "nox":
            continue
        assert words[1] == "-s"
        assert words[2] in sessions
        assert words[3:4] in ([], ["--"]), command
        assert accepted(words[2], words[4:], monkeypatch), command


def test_nothing_is_left_for_the_reader_but_files_and_folders() -> None:
    texts = [text for one in ADVISED.values() for text in one]
    assert len(ADVISED) > 90
    assert not [text for text in texts if re.search(r"<[a-z ]+>", text)]
    assert not [text for text in texts if re.search(r"\b(RELEASE|NAME|FIX|ID|LINE)\b", text)]
    # Nothing that looks like a command escapes `COMMAND`.
    assert not [t for t in texts if t.count("nox -s") != sum("nox -s" in c for c in commands(t))]


def test_each_command_is_typed_here_or_it_is_said_why_not() -> None:
    assert not UNTYPED.keys() & TYPED
    assert {*WITH_COMMANDS} == UNTYPED.keys() | TYPED


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return carrying(tmp_path_factory.mktemp("made"))


@pytest.fixture
def checkout(made: Checkout, tmp_path: Path) -> Checkout:
    return copied(made, tmp_path)


def shows(*keys: str) -> None:
    """Note, when the module is read, that the test below types what these messages advise."""
    assert not {*keys} & TYPED
    TYPED.update(keys)


def refused(checkout: Checkout, key: str, tool: str, *words: str | Path) -> list[str]:
    """Run a command that fails with the message `key`, and return what it says to type."""
    return named(checkout.run(tool, *words, timeout=600), key)


def followed(checkout: Checkout, key: str, tool: str, *words: str | Path) -> Ended:
    """Type the only command that the message `key` names."""
    (command,) = refused(checkout, key, tool, *words)
    return typed(checkout, command)


def named(result: Ended, key: str) -> list[str]:
    """Return what a failed command says to type; it has to be the message `key`."""
    assert result.returncode, result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    said = result.stderr.rpartition("next: ")[2].strip()
    patterns = [
        "".join(
            re.escape(part) if number % 2 == 0 else ".*"
            for number, part in enumerate(_PLACE.split(text))
        )
        for text in ADVISED[key]
    ]
    assert any(re.fullmatch(pattern, said) for pattern in patterns), result.stderr
    assert COMMAND.findall(said)
    return COMMAND.findall(said)


def typed(checkout: Checkout, command: str, code: int = 0, *, index: str = NOWHERE) -> Ended:
    """Type a command as it was printed, and expect its exit code."""
    words = shlex.split(command)
    if words[:2] == ["nox", "-s"]:
        result = checkout.run(words[2], *words[4:], timeout=600, PIP_INDEX_URL=index)
    else:
        environment = {**checkout.environment(), **BARE}
        result = subprocess.run(
            words, cwd=checkout.folder, env=environment, capture_output=True, text=True, check=False
        )
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    return result


shows("carry/rebase:_stop:NeedsPersonError", "carry/rebase:start:UsageError")
shows("carry/rebase:_commit_resolution:UsageError")


def test_a_rebase_that_stopped(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    start = ("rebase", "0.21.0")
    stopped = refused(checkout, "carry/rebase:_stop:NeedsPersonError", *start)
    go_on, abort = refused(checkout, "carry/rebase:start:UsageError", *start)
    typed(checkout, abort)
    assert refused(checkout, "carry/rebase:_stop:NeedsPersonError", *start) == stopped
    assert stopped[0] == go_on
    again, skip = named(typed(checkout, go_on, 2), "carry/rebase:_commit_resolution:UsageError")
    assert (again, skip) == (go_on, stopped[1])
    worker = checkout.folder / ".work" / "rebase" / "tree" / WORKER
    conflict = re.compile(r"<<<<<<< .*>>>>>>> [^\n]*", re.DOTALL)
    worker.write_text(conflict.sub("    return work1(x)", worker.read_text()))
    assert "1 by hand" in typed(checkout, again).stdout


shows("carry/landing:_check_needed:CheckFailedError", "carry/rebase:resume:UsageError")
shows("carry/state:load_state:UsageError", "commands/rebase:main:UsageError")
shows("commands/rebase:_release:UsageError")


def test_a_rebase_that_leaves_a_fix_out_or_is_given_up(checkout: Checkout) -> None:
    release(checkout, "0.21.0", COLLIDES)
    _, skip, _ = refused(checkout, "carry/rebase:_stop:NeedsPersonError", "rebase", "0.21.0")
    (go_on,) = named(typed(checkout, skip, 30), "carry/landing:_check_needed:CheckFailedError")
    assert refused(checkout, "carry/rebase:resume:UsageError", "rebase", "--skip") == [go_on]
    why = Unpatched("==0.21.0", "nobody runs it")
    fixes = REGISTRY.fixes | {"2": replace(REGISTRY.fixes["2"], unpatched=(why,))}
    text = registry_text(toys.registry(*fixes.values()))
    (checkout.patches / "fixes.toml").write_text(text, encoding="utf-8")
    assert checkout.run("edit", "--restamp").returncode == 0
    assert "1 left out" in typed(checkout, go_on).stdout

    release(checkout, "0.22.0", COLLIDES)
    for key, words in (
        ("carry/state:load_state:UsageError", ["--continue"]),
        ("commands/rebase:main:UsageError", []),
        ("commands/rebase:_release:UsageError", ["newest"]),
    ):
        (trial,) = refused(checkout, key, "rebase", *words)
        assert "0.22.0" in typed(checkout, trial).stdout


shows("commands/edit:main:UsageError", "commits/worktree:_start:UsageError")
shows("commits/worktree:finish:UsageError", "commits/worktree:finish:UsageError 2")


def test_an_edit(checkout: Checkout) -> None:
    (example,) = refused(checkout, "commands/edit:main:UsageError", "edit")
    assert refused(checkout, "commits/worktree:finish:UsageError", "edit", "--continue") == [
        example
    ]
    typed(checkout, example)
    go_on, abort = named(typed(checkout, example, 2), "commits/worktree:_start:UsageError")
    typed(checkout, abort)
    typed(checkout, example)
    typed(checkout, go_on)
    typed(checkout, example)
    git(checkout.folder / ".work" / "edit", "reset", "--hard", "--quiet")
    empty = named(typed(checkout, go_on, 2), "commits/worktree:finish:UsageError 2")
    assert empty == [go_on, abort]
    typed(checkout, empty[1])
    typed(checkout, example)


shows("commands/export:_selected:UsageError", "commits/bundle:write_export:UsageError 3")


def test_an_export(checkout: Checkout, tmp_path: Path) -> None:
    (whole,) = refused(checkout, "commands/export:_selected:UsageError", "export", "--fix", "7")
    typed(checkout, whole)
    folder = tmp_path / "with a space"
    again = ("export", "--out", folder)
    assert checkout.run(*again).returncode == 0
    write(folder, {"README.md": "mine\n"})
    (remove,) = refused(checkout, "commits/bundle:write_export:UsageError 3", *again)
    typed(checkout, remove)
    assert checkout.run(*again).returncode == 0


shows("commits/clone:_check_state:DirtyTreeError", "commits/clone:_check_state:DirtyTreeError 2")
shows("commits/clone:_check_state:AlreadyPatchedError")
shows("commits/clone:_check_state:WrongReleaseError")


def test_a_clone(checkout: Checkout, tmp_path: Path) -> None:
    clone = toys.clone_of_vllm(tmp_path / "with a space")
    again = ("apply", "--tree", clone)
    at = "commits/clone:_check_state"
    write(clone, {WORKER: "changed\n"})
    followed(checkout, f"{at}:DirtyTreeError", *again)
    assert checkout.run(*again).returncode == 0
    for _ in range(2):  # the name that it gives way to is free
        followed(checkout, f"{at}:DirtyTreeError 2", *again)
        assert checkout.run(*again).returncode == 0
    git(clone, "switch", "--quiet", "kvfix/0.20.2")
    git(clone, "branch", "-m", "theirs")
    followed(checkout, f"{at}:AlreadyPatchedError", *again)
    assert checkout.run(*again).returncode == 0
    git(clone, "branch", "-D", "kvfix/0.20.2")
    git(clone, "switch", "--quiet", "--detach", "v0.20.1")
    followed(checkout, f"{at}:WrongReleaseError", *again)
    assert checkout.run(*again).returncode == 0
    git(clone, "branch", "-D", "kvfix/0.20.2")
    git(clone, "switch", "--quiet", "--orphan", "imported")
    commit(clone, toys.FILES, "imported")
    git(clone, "tag", "--delete", "v0.20.2")
    assert checkout.run(*again).returncode == 0  # nothing says that it is another release


shows("patchset/registry:_parsed:RegistryError")
shows("commands/lint:main:CheckFailedError", "commands/regressions:main:UsageError")


def test_a_registry_that_is_wrong(checkout: Checkout) -> None:
    path = checkout.patches / "fixes.toml"
    good = path.read_text()
    for key, old, new, words in (
        ("patchset/registry:_parsed:RegistryError", '"Backport"', '"Merged"', ["lint"]),
        ("commands/lint:main:CheckFailedError", "A cause:", "A clause:", ["lint"]),
    ):
        change(path, old, new)
        (lint,) = refused(checkout, key, *words)
        path.write_text(good)
        typed(checkout, lint)
    (example,) = refused(
        checkout, "commands/regressions:main:UsageError", "regressions", "--fix", "7"
    )
    typed(checkout, example)


shows("patchset/series:patch_files:RegistryError", "patchset/series:patch_for:RegistryError")


def test_a_patch_that_is_not_where_it_should_be(checkout: Checkout) -> None:
    path = next(checkout.patches.glob("2-*/*.patch"))
    path.rename(path.with_stem("it"))
    (lint,) = refused(checkout, "patchset/series:patch_files:RegistryError", "apply")
    path.with_stem("it").rename(path)
    typed(checkout, lint)
    path.unlink()
    followed(checkout, "patchset/series:patch_for:RegistryError", "apply")
    write(checkout.folder / ".work" / "edit", {WORKER: toys.TWO[WORKER]})
    assert checkout.run("edit", "--continue").returncode == 0
    assert checkout.run("apply").returncode == 0


shows("patchset/patch:_malformed:RegistryError", "upstream/lock:_wrong:RegistryError")


def test_a_file_that_was_changed_by_hand(checkout: Checkout) -> None:
    commit(checkout.folder, {}, "all")
    for key, path in (
        ("patchset/patch:_malformed:RegistryError", next(checkout.patches.rglob("*.patch"))),
        ("upstream/lock:_wrong:RegistryError", checkout.patches / "upstream.lock"),
    ):
        path.write_text("nothing\n")
        followed(checkout, key, "apply")
        assert checkout.run("apply").returncode == 0


def offer(index: LocalIndex, name: str, texts: dict[str, str]) -> str:
    """Have the index offer a release; return its address."""
    index.files[f"vllm-{name}.tar.gz"] = sdist_bytes(texts, name)
    index.files[wheel_name(name)] = wheel_bytes(texts, version=name)
    return index.url


shows(
    "project:supported_release:UnknownReleaseError",
    "wheel/build:own_wheel:WrongReleaseError",
)


def test_a_release_that_is_not_supported(
    checkout: Checkout, tmp_path: Path, local_index: LocalIndex
) -> None:
    asking = offer(local_index, "0.20.3", STAYS)
    key = "project:supported_release:UnknownReleaseError"
    for command in refused(checkout, key, "apply", "0.20.3"):
        typed(checkout, command, index=asking)
    assert checkout.run("apply", "0.20.3").returncode == 0
    wheel = tmp_path / "with a space" / wheel_name("0.20.3")
    write(tmp_path, {f"with a space/{wheel.name}": local_index.files[wheel.name]})
    key = "wheel/build:own_wheel:WrongReleaseError"
    other = wheel_bytes(STAYS, version="0.20.3", native=50_000)  # a build of somebody's own
    wheel.write_bytes(other)
    followed(checkout, key, "apply", "0.20.2", "--wheel", wheel)


shows(
    "upstream/lock:locked_release:NotLockedError",
    "upstream/lock:pinned_release:UnknownReleaseError",
)
shows(
    "upstream/lock:LockedRelease.wheel_for:NotLockedError", "upstream/pin:_release_name:UsageError"
)


def test_a_release_that_is_not_pinned(checkout: Checkout, local_index: LocalIndex) -> None:
    asking = offer(local_index, "0.20.3", STAYS)
    asked = ("rebase", "0.20.3", "--dry-run")
    pinned = (checkout.patches / "upstream.lock").read_text()
    (lock,) = refused(checkout, "upstream/lock:locked_release:NotLockedError", *asked)
    typed(checkout, lock, index=asking)
    assert checkout.run(*asked, PIP_INDEX_URL=asking).returncode == 0
    assert checkout.run("rebase", "0.20.3.0", "--dry-run", PIP_INDEX_URL=asking).returncode == 0
    (checkout.patches / "upstream.lock").write_text(pinned)
    key = "upstream/lock:pinned_release:UnknownReleaseError"
    assert refused(checkout, key, "status", "--prove", "0.20.3") == [lock]

    pinned_files = (checkout.cache / "files").glob("*/vllm-0.20.2*")
    local_index.files.update((path.name, path.read_bytes()) for path in pinned_files)
    key = "upstream/lock:LockedRelease.wheel_for:NotLockedError"
    (lock,) = refused(checkout, key, "apply", "--arch", "riscv64")
    name = "vllm-0.20.2-cp38-abi3-manylinux_2_35_riscv64.whl"
    local_index.files[name] = wheel_bytes(toys.FILES)
    typed(checkout, lock, index=asking)
    assert checkout.run("apply", "--arch", "riscv64", PIP_INDEX_URL=asking).returncode == 0

    declaration = checkout.folder / "pyproject.toml"
    assert 'releases = ["0.20.2"]' in declaration.read_text()
    (lock,) = refused(checkout, "upstream/pin:_release_name:UsageError", "lock", "newest")
    assert "same" in typed(checkout, lock, index=asking).stdout


shows("upstream/history:_clone:GitError", "carry/replay:replay_all:UnknownReleaseError")


def test_a_tag_that_was_moved(checkout: Checkout, tmp_path: Path) -> None:
    release(checkout, "0.21.0", COLLIDES)
    clone = toys.clone_of_vllm(tmp_path / "vllm")
    cache = Checkout(checkout.folder, checkout.cache.rename(tmp_path / "with a space"))
    asked = ("rebase", "0.21.0", "--dry-run", "--upstream", clone)
    assert cache.run(*asked).returncode == 0
    git(clone, "tag", "--force", "v0.21.0", "v0.20.1")
    followed(cache, "upstream/history:_clone:GitError", *asked)
    assert cache.run(*asked).returncode == 0


def test_a_release_that_nothing_is_carried_to(checkout: Checkout) -> None:
    release(checkout, "0.20.3", STAYS)
    key = "carry/replay:replay_all:UnknownReleaseError"
    followed(checkout, key, "replay", "--prove", "9.9")


shows("wheel/verify:verify:CheckFailedError", "wheel/verify:verify:UsageError")
shows("wheel/build:own_wheel:TouchedFileDiffersError")
shows("patchset/choice:_require_known:UsageError")


def test_a_wheel(checkout: Checkout, tmp_path: Path) -> None:
    stock = tmp_path / "with a space" / wheel_name()
    stock.parent.mkdir()
    stock.write_bytes(wheel_bytes(toys.FILES, native=50_000))
    followed(checkout, "wheel/verify:verify:UsageError", "verify", stock)
    for options, build in (
        ((), ("apply",)),
        (("--stock", stock), ("apply", "--wheel", stock)),
    ):
        assert checkout.run(*build).returncode == 0
        (wheel,) = checkout.dist.glob("*.whl")
        data = bytearray(wheel.read_bytes())
        place = data.index(b"return work1(x)") if b"return work1(x)" in data else 30_000
        data[place] ^= 1
        wheel.write_bytes(data)
        result = checkout.run("verify", wheel, *options)
        (build_again,) = named(result, "wheel/verify:verify:CheckFailedError")
        typed(checkout, build_again)
        assert checkout.run("verify", wheel, *options).returncode == 0

    changed = {**toys.FILES, WORKER: toys.FILES[WORKER] + "# ours\n"}
    stock.write_bytes(wheel_bytes(changed))
    key = "wheel/build:own_wheel:TouchedFileDiffersError"
    (tree,) = refused(checkout, key, "apply", "--wheel", stock)
    commit(tmp_path / "sources", changed)
    typed(checkout, tree.replace("DIR", str(tmp_path / "sources")))


def test_a_choice_of_fixes(checkout: Checkout) -> None:
    followed(checkout, "patchset/choice:_require_known:UsageError", "apply", "--only", "K99")


def test_the_releases_of_the_examples_are_there() -> None:
    assert project().default_release in project().releases
