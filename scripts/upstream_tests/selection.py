"""Which of upstream's tests are worth running for a KV-transfer fix, on a machine without a GPU.

By default: `_RECOMMENDED`, found by file name, since upstream moves files between folders more
often than it renames them. By impact: the test files that import a file which the series changes.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

UNIT = "tests/v1/kv_connector/unit"
_RECOMMENDED = {
    UNIT: (
        "cache_pollution_prevention config error_propagation invalid_blocks_correctness "
        "kv_cache_layout kv_connector_lifecycle kv_load_failure_recovery multi_connector "
        "nixl_connector nixl_connector_hma output_aggregator remote_decode_lifecycle "
        "remote_prefill_lifecycle scheduler_kv_connector_override"
    ),
    "tests/entrypoints": "chat_error completion_error errors generate_stream serving_responses",
    "tests/v1/core": "async_scheduler",
    "tests/v1/engine": "kv_transfer_rejection",
    "tests/v1/metrics": "stats",
}
_BATCH = 200_000  # bytes of test files for one process
LEFT_OUT = {
    "test_abort_timeout_on_prefiller": "starts a real engine",
    "test_fewer_blocks_with_hma": "starts a real engine",
    "test_multi_example_connector_consistency": "starts a real engine",
    "test_register_kv_caches": "wants a GPU's memory",
}
"""Tests of the recommended files that cannot pass without a GPU, and why. They are run where a
file, `-k` or `--affected` asks for them."""


def recommended(root: Path) -> list[str]:
    """Return the recommended test files that the release below `root` has, relative to it."""
    found = []
    for folder, stems in _RECOMMENDED.items():
        for stem in stems.split():
            found += sorted((root / folder).rglob(f"test_{stem}.py"))
    return [path.relative_to(root).as_posix() for path in found]


def affected(root: Path, changed: Collection[str], steps: int = 1) -> list[str]:
    """Return the test files that import one of the `changed` files, relative to `root`.

    Args:
        root: A release's source tree.
        changed: Files of vLLM, relative to `root`.
        steps: How many imports lie between test and changed file at most. Those from one file
            below tests/ to another count nothing: a helper's import is its users' import.
    """
    modules = _Modules(root)
    hit = {root / path for path in changed}
    found = []
    for test in sorted((root / "tests").rglob("test_*.py")):
        if _reaches(modules, test, hit, steps):
            found.append(test.relative_to(root).as_posix())
    return found


def batches(root: Path, files: Iterable[str]) -> list[tuple[str, ...]]:
    """Return `files`, relative to `root`, in batches for one process each, the longest first.

    A process spends ten seconds and more on importing vLLM, more than most files take to run. What
    a file costs is guessed by its length.
    """
    found: list[tuple[str, ...]] = []
    batch: tuple[str, ...] = ()
    size = 0
    for file in sorted(files, key=lambda file: -(root / file).stat().st_size):
        length = (root / file).stat().st_size
        if batch and size + length > _BATCH:
            found.append(batch)
            batch, size = (), 0
        batch += (file,)
        size += length
    return [*found, batch] if batch else found


def _reaches(modules: _Modules, test: Path, hit: set[Path], steps: int) -> bool:
    """Whether `test` leads to a file of `hit`: a breadth-first search, cheap imports first."""
    distance = {test: 0}
    queue = deque([test])
    while queue:
        path = queue.popleft()
        for target in modules.imports(path):
            cost = 0 if modules.is_test(path) and modules.is_test(target) else 1
            far = distance[path] + cost
            if far > steps or distance.get(target, steps + 1) <= far:
                continue
            if target in hit:
                return True
            distance[target] = far
            (queue.append if cost else queue.appendleft)(target)
    return False


class _Modules:
    """The files of a source tree and what each imports of the others; each is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._imports: dict[Path, set[Path]] = {}
        self._files: dict[str, Path | None] = {}

    def is_test(self, path: Path) -> bool:
        return path.relative_to(self._root).parts[0] == "tests"

    def imports(self, path: Path) -> set[Path]:
        if path not in self._imports:
            tree = ast.parse(path.read_bytes(), str(path))
            package = path.relative_to(self._root).parent.parts
            files = (self._file(name) for name in _imported(tree, package))
            self._imports[path] = {file for file in files if file is not None} - {path}
        return self._imports[path]

    def _file(self, module: str) -> Path | None:
        if module not in self._files:
            base = self._root.joinpath(*module.split("."))
            choices = (base.with_suffix(".py"), base / "__init__.py")
            self._files[module] = next((file for file in choices if file.is_file()), None)
        return self._files[module]


def _imported(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that code imports when it runs, in functions as well.

    `from a import b` gives both a and a.b, as b may be a module. What only type checkers read does
    not count.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package[: len(package) - child.level + 1] if child.level else ()
            base = ".".join([*above, *([child.module] if child.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and _is_for_type_checkers(child.test):
            for other in child.orelse:
                yield from _imported(ast.Module([other], []), package)
        else:
            yield from _imported(child, package)


def _is_for_type_checkers(test: ast.expr) -> bool:
    name = getattr(test, "id", getattr(test, "attr", ""))  # TYPE_CHECKING, or typing's
    return bool(name == "TYPE_CHECKING")
