"""`nox -s export -- --prove`: how two wheels are compared; the runs themselves need vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scripts.prove.export import compare
from scripts.wheel.names import VERSION_MODULE
from tests.scripts import toys
from tests.scripts.checkouts import wheel_name
from tests.scripts.wheels import with_metadata, zip_bytes

OVERLAY = "vllm_overlay/one.py"


def wheel(folder: Path, texts: Mapping[str, str]) -> Path:
    folder.mkdir()
    path = folder / wheel_name()
    files = {name: text.encode() for name, text in texts.items() if name.startswith("vllm")}
    path.write_bytes(zip_bytes(with_metadata({**files, VERSION_MODULE: b""}, "0.20.2", "vllm")))
    return path


def test_what_a_build_writes_about_itself_may_differ(tmp_path: Path) -> None:
    files = {**toys.FILES, OVERLAY: "one = 1\n"}
    ours = {**files, "vllm_overlay/provenance/build.py": "BUILD = {}\n"}
    one, other = wheel(tmp_path / "one", ours), wheel(tmp_path / "other", files)
    differing, same = compare(one, other)
    assert differing == []
    expected = {name for name in files if name.endswith(".py")} - {VERSION_MODULE}
    assert same == len(expected)


def test_every_other_difference_is_named(tmp_path: Path) -> None:
    ours = {**toys.FILES, OVERLAY: "one = 1\n"}
    theirs = {**toys.FILES, toys.WORKER: "nothing\n", "vllm/more.py": "more = 1\n"}
    differing, same = compare(wheel(tmp_path / "one", ours), wheel(tmp_path / "other", theirs))
    assert differing == [
        f"{OVERLAY} is in `apply`'s wheel only",
        "vllm/more.py is in the fork's wheel only",
        f"{toys.WORKER} has other bytes",
    ]
    assert same == sum(name.endswith(".py") for name in toys.FILES) - 1
