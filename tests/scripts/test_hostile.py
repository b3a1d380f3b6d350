"""What `tests.scripts.hostile` makes breaks no rule; where a check is missing, that shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.patchset.patch import apply_patches, parse_patch
from scripts.patchset.registry import load_registry
from scripts.system.errors import BrokenWheelError, KvfixError
from scripts.wheel.reader import LARGEST, WheelReader
from tests.scripts import checkouts
from tests.scripts.checkouts import Checkout
from tests.scripts.hostile import patches, registries, wheels
from tests.scripts.hostile.__main__ import pin_two, run_batch

SEEDS = st.integers(0, 1 << 32).map(Random)
PROPERTY = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return checkouts.small(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize(("kind", "count"), [("wheels", 40), ("patches", 100), ("registries", 150)])
def test_commands_keep_every_rule(
    checkout: Checkout, tmp_path: Path, kind: str, count: int
) -> None:
    batch = run_batch(checkout, kind, "tests", 0, count, tmp_path)
    assert batch.broken == []
    assert batch.cases == count == sum(batch.outcomes.values())
    assert batch.peak_mb < 500
    assert len(batch.outcomes) > 1  # some are taken, others refused


def test_a_kill_leaves_nothing_that_the_next_run_does_not_mend(tmp_path: Path) -> None:
    own = checkouts.small(tmp_path)
    pin_two(own)
    batch = run_batch(own, "kills", "tests", 0, 5, tmp_path)
    assert batch.broken == []
    assert batch.cases == 5


@pytest.mark.parametrize(
    ("kind", "first", "count", "module", "old", "rule"),
    [
        ("registries", 1000, 300, "patchset/registry.py", "not _is_shown(table)", "terminal"),
        ("patches", 110, 10, "patchset/patch.py", "not _PATH.fullmatch(file.path) or", "outside"),
        ("wheels", 0, 80, "wheel/verify.py", "at is not None and not faults", "bytes"),
    ],
)
def test_a_check_that_is_taken_out_is_missed(
    tmp_path: Path, kind: str, first: int, count: int, module: str, old: str, rule: str
) -> None:
    spoilt = checkouts.small(tmp_path)
    path = spoilt.folder / "scripts" / module
    assert path.read_text().count(old) == 1
    text = path.read_text().replace(old, "" if old.endswith(" or") else "False")
    path.write_text(text.replace('{".", "..", ".git"}', '{"."}'))
    save = tmp_path / "save"
    save.mkdir()
    batch = run_batch(spoilt, kind, "spoilt", first, count, save)
    assert rule in {one.rule for one in batch.broken}
    assert all(Path(one.saved).is_file() for one in batch.broken)


@PROPERTY
@given(rng=SEEDS)
def test_a_wheel_is_read_or_refused(tmp_path: Path, rng: Random) -> None:
    path = tmp_path / checkouts.wheel_name()
    path.write_bytes(wheels.hostile(rng))
    try:
        with WheelReader(path) as wheel:
            assert all(name.isprintable() for name in wheel.members)
            for name in wheel.names:
                if wheel.members[name].info.file_size <= LARGEST:
                    wheel.read(name)
    except BrokenWheelError as error:
        assert error.found and error.expected and error.next_step


@PROPERTY
@given(rng=SEEDS)
def test_a_patch_applies_or_is_refused(rng: Random) -> None:
    case = patches.hostile(rng)
    try:
        patch = parse_patch(patches.NAME, case.text)
        assert all(".." not in path and not path.startswith("/") for path in patch.files)
        apply_patches([patch], lambda _: case.target)
    except KvfixError as error:
        assert error.found and error.expected and error.next_step


@PROPERTY
@given(rng=SEEDS)
def test_a_registry_is_sound_or_refused(tmp_path: Path, rng: Random) -> None:
    path = tmp_path / "fixes.toml"
    path.write_bytes(registries.hostile(rng))
    try:
        registry = load_registry(path)
    except KvfixError as error:
        assert error.found and error.expected and error.next_step
        return
    for fix in registry.fixes.values():
        assert registry.message(fix).replace("\n", "").isprintable()


@pytest.mark.parametrize("mutation", dict.fromkeys(wheels.MUTATIONS), ids=lambda one: one.__name__)
def test_each_way_to_spoil_a_wheel_spoils_some(
    tmp_path: Path, mutation: Callable[[Random, list[wheels.Entry]], None]
) -> None:
    path = tmp_path / checkouts.wheel_name()
    ends = set()
    for seed in range(40):
        entries = wheels.sound()
        mutation(Random(seed), entries)  # noqa: S311
        path.write_bytes(wheels.pack([one for one in entries if "directory" not in one.lies]))
        try:
            WheelReader(path).close()
            ends.add("read")
        except BrokenWheelError:
            ends.add("refused")
        if mutation is wheels.many or len(ends) == 2:
            break
    assert "refused" in ends or mutation in (wheels.version_modules, wheels.many)
