from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from scripts.commands import verify as command
from scripts.commands.verify import main
from scripts.system.errors import (
    BrokenWheelError,
    CheckFailedError,
    HashMismatchError,
    NotLockedError,
    UsageError,
)
from scripts.upstream.lock import LockedFile, LockedRelease
from scripts.wheel import verify as verify_module
from scripts.wheel.reader import WheelReader
from scripts.wheel.record import verify_record
from scripts.wheel.sbom import SBOM_PATH, Sbom, SbomFix, build_sbom
from scripts.wheel.verify import stock_wheel, verify, verify_against
from tests.scripts.wheels import (
    NATIVE,
    SCRIPT,
    WORKER,
    opened,
    record,
    stock_files,
    stock_wheel_file,
    write,
    zip_bytes,
)

FIX = SbomFix("40449", "A skipped rank is told", "https://host.example/40449", "backport")


class Built:
    """A stock wheel, the patched one, and what lies between them."""

    def __init__(self, folder: Path, fixes: tuple[SbomFix, ...] = (FIX,)) -> None:
        self.stock = stock_wheel_file(folder)
        with opened(self.stock) as (stock, changes):
            self.changes = changes
            changes.added[f"{changes.dist_info}/{SBOM_PATH}"] = build_sbom(
                name="vllm",
                version="0.20.2+kvfix.0.1.0",
                patch_set="0.1.0",
                release="0.20.2",
                ancestor_name="vllm",
                ancestor_version="0.20.2",
                ancestor_sha256=hashlib.sha256(self.stock.read_bytes()).hexdigest(),
                fixes=fixes,
            )
            (folder / "dist").mkdir()
            self.patched = write(stock, changes, folder / "dist")

    def expected(
        self, stock: WheelReader, sbom: Sbom
    ) -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
        assert (str(stock.version), sbom.fixes) == ("0.20.2", (FIX,))
        return self.changes.replaced, self.changes.added

    def faults(self) -> list[str]:
        with WheelReader(self.stock) as stock, WheelReader(self.patched) as patched:
            against = verify_against(
                stock, patched, changed=self.changes.replaced, added=self.changes.added
            )
            return against + verify_record(patched, patched.names)

    def content(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.patched) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def rewrite(self, content: dict[str, bytes], *, with_record: bool = True) -> None:
        """Zip the patched wheel anew, as somebody who tampers with it would."""
        own = f"{self.changes.dist_info}/RECORD"
        if with_record:
            content[own] = record(content, own)
        self.patched.write_bytes(zip_bytes(content))


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path)


def test_a_wheel_as_apply_writes_it_has_no_fault(built: Built) -> None:
    assert built.faults() == []


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda c: c.update({NATIVE: c[NATIVE] + b"\0"}), f"{NATIVE}: differs from the stock"),
        (lambda c: c.pop(NATIVE), f"{NATIVE}: is missing"),
        (lambda c: c.update({"vllm/new.py": b""}), "vllm/new.py: should not be there"),
        (lambda c: c.update({WORKER: stock_files()[WORKER]}), f"{WORKER}: its content is not what"),
        (
            lambda c: c.update({"vllm_overlay/worker.py": b"FIXED = False\n"}),
            "vllm_overlay/worker.py: its content is not what",
        ),
        (lambda c: c.pop("vllm_overlay/worker.py"), "vllm_overlay/worker.py: is missing"),
    ],
)
def test_a_wheel_with_other_content_is_found_out_though_its_record_agrees(
    built: Built, tamper: Callable[[dict[str, bytes]], object], expected: str
) -> None:
    content = built.content()
    tamper(content)
    built.rewrite(content)
    assert any(fault.startswith(expected) for fault in built.faults())


def test_all_faults_are_listed_at_once(built: Built) -> None:
    content = built.content()
    content[NATIVE] = b"other"
    content["vllm/new.py"] = b""
    del content["vllm/empty.py"]
    built.rewrite(content)
    faults = built.faults()
    for name in (NATIVE, "vllm/new.py", "vllm/empty.py"):
        assert any(fault.startswith(f"{name}:") for fault in faults)


def test_other_modes_and_recompressed_members_are_found(built: Built) -> None:
    before = {}
    with zipfile.ZipFile(built.patched) as old:
        for info in old.infolist():
            before[info.filename] = (info, old.read(info))
    with zipfile.ZipFile(built.patched, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for info, content in before.values():
            if info.filename in (SCRIPT, "vllm/tool.py"):
                info.external_attr = 0o100644 << 16
            level = 1 if info.filename == NATIVE else None
            new.writestr(info, content, compresslevel=level)
    faults = built.faults()
    assert f"{SCRIPT}: has the mode 100644, in the stock wheel it is 100755" in faults
    assert any(re.match(f"{re.escape(NATIVE)}: (its compressed|differs)", f) for f in faults)


def test_compressed_bytes_are_compared_and_not_only_what_the_directory_says(built: Built) -> None:
    with WheelReader(built.patched) as patched:
        middle = patched.members[NATIVE].data + 50_000
    content = bytearray(built.patched.read_bytes())
    content[middle] ^= 1
    built.patched.write_bytes(content)
    faults = built.faults()
    assert f"{NATIVE}: its compressed bytes are not those of the stock wheel" in faults
    assert any("that cannot be read" in fault for fault in faults)  # its RECORD row, read in full


@pytest.mark.parametrize("header", ["central", "local"])
def test_each_field_of_a_header_is_compared_with_what_apply_writes(
    built: Built, header: str
) -> None:
    sound = built.patched.read_bytes()
    assert verify(built.patched, built.stock, built.expected).fixes == (FIX,)
    signature, length = (b"PK\1\2", 46) if header == "central" else (b"PK\3\4", 30)
    start = sound.index(signature)
    for at in range(start, start + length):
        content = bytearray(sound)
        content[at] ^= 1
        built.patched.write_bytes(content)
        with pytest.raises((CheckFailedError, BrokenWheelError)):
            verify(built.patched, built.stock, built.expected)


def test_bytes_behind_the_wheel_are_found(built: Built) -> None:
    content = built.patched.read_bytes()
    comment = b"of the file"  # which stock has
    assert content.endswith(comment)
    built.patched.write_bytes(content[: -len(comment)] + b"of another!")
    with pytest.raises(CheckFailedError, match="1 fault"):
        verify(built.patched, built.stock, built.expected)


def test_what_should_be_small_is_not_inflated(
    built: Built, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = built.content()
    content[NATIVE] = bytes(20_000_000)
    built.rewrite(content)
    read: list[str] = []
    pieces = WheelReader.pieces

    def noted(wheel: WheelReader, name: str) -> Iterator[bytes]:
        read.append(name)
        return pieces(wheel, name)

    monkeypatch.setattr(WheelReader, "pieces", noted)
    with pytest.raises(CheckFailedError):
        verify(built.patched, built.stock, built.expected)
    assert NATIVE not in read
    assert NATIVE in capsys.readouterr().err


def test_a_file_under_another_name_is_found(built: Built) -> None:
    other = built.patched.with_name("vllm-0.20.2+kvfix.0.1.0-py3-none-any.whl")
    built.patched = built.patched.rename(other)
    assert any("the file should be called vllm-0.20.2+kvfix" in fault for fault in built.faults())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"/worker.py,sha256=", b"/worker.py,sha256=x", "does not have the hash"),
        (b"/worker.py,sha256=", b"/worker.py,md5=", "a hash of the kind 'md5'"),
    ],
)
def test_a_wrong_row_in_record_is_found(
    built: Built, old: bytes, new: bytes, expected: str
) -> None:
    content = built.content()
    own = f"{built.changes.dist_info}/RECORD"
    assert old in content[own]
    content[own] = content[own].replace(old, new)
    built.rewrite(content, with_record=False)
    with WheelReader(built.patched) as patched:
        faults = verify_record(patched, patched.names)
    assert any(expected in fault for fault in faults)


def test_a_wrong_size_in_record_is_refused(built: Built) -> None:
    content = built.content()
    own = f"{built.changes.dist_info}/RECORD"
    assert content[own].count(b",13\n") == 1
    content[own] = content[own].replace(b",13\n", b",14\n")
    built.rewrite(content, with_record=False)
    with pytest.raises(BrokenWheelError, match=r"worker\.py in RECORD with 14 bytes"):
        verify(built.patched, built.stock, built.expected)


def test_the_cheap_part_hashes_only_what_it_is_told_to(built: Built) -> None:
    content = built.content()
    own = f"{built.changes.dist_info}/RECORD"
    content[own] = content[own].replace(f"{NATIVE},sha256=".encode(), f"{NATIVE},sha256=x".encode())
    built.rewrite(content, with_record=False)
    with WheelReader(built.patched) as patched:
        assert verify_record(patched, [WORKER, own]) == []
        assert verify_record(patched, [NATIVE]) != []
        assert verify_record(patched, ["vllm/nowhere.py"]) == [
            "vllm/nowhere.py: RECORD does not list it"
        ]


def test_record_must_be_the_last_file(built: Built) -> None:
    content = built.content()
    own = f"{built.changes.dist_info}/RECORD"
    built.rewrite({own: content.pop(own), **content}, with_record=False)
    with WheelReader(built.patched) as patched:
        assert verify_record(patched, []) == [f"{own}: is not the last file"]


@pytest.fixture
def locked(built: Built, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, LockedRelease]]:
    """A lock that pins the stock wheel, and a cache that holds it."""
    digest = hashlib.sha256(built.stock.read_bytes()).hexdigest()
    wheel = LockedFile(built.stock.name, digest)
    sdist = LockedFile("vllm-0.20.2.tar.gz", "0" * 64)
    lock = {"0.20.2": LockedRelease("0.20.2", sdist, (wheel,))}
    cache = built.stock.parent / "cache"
    (cache / "files" / digest).mkdir(parents=True)
    (cache / "files" / digest / wheel.name).write_bytes(built.stock.read_bytes())
    monkeypatch.setenv("KVFIX_CACHE", str(cache))
    monkeypatch.setattr(verify_module, "load_lock", lambda: lock)
    yield lock


@pytest.mark.usefixtures("locked")
def test_the_stock_wheel_is_found_by_the_hash_in_the_sbom(built: Built) -> None:
    assert verify(built.patched, None, built.expected).fixes == (FIX,)


def test_a_stock_wheel_that_is_not_pinned_must_be_given(
    built: Built, locked: dict[str, LockedRelease]
) -> None:
    locked.clear()
    with pytest.raises(NotLockedError, match="no pinned wheel has the sha256"):
        verify(built.patched, None, built.expected)
    assert verify(built.patched, built.stock, built.expected).fixes == (FIX,)


def test_another_stock_wheel_than_the_ancestor_is_refused(built: Built, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(built.stock.read_bytes() + b"\0")
    with pytest.raises(HashMismatchError, match="has the sha256"):
        verify(built.patched, other, built.expected)


def test_a_stock_wheel_is_no_patched_one(built: Built) -> None:
    with pytest.raises(UsageError, match="is no patched wheel"):
        verify(built.stock, built.stock, built.expected)


def test_a_patched_wheel_without_its_sbom_is_refused(built: Built) -> None:
    content = built.content()
    del content[f"{built.changes.dist_info}/{SBOM_PATH}"]
    built.rewrite(content)
    with pytest.raises(BrokenWheelError, match=r"has no .*kvfix\.cdx\.json"):
        verify(built.patched, built.stock, built.expected)


def test_a_missing_stock_file_is_the_users_mistake(built: Built, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        verify(built.patched, tmp_path / "nowhere.whl", built.expected)


def test_faults_are_printed_and_end_in_an_error(
    built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    content = built.content()
    content[NATIVE] = b"other"
    built.rewrite(content)
    with pytest.raises(CheckFailedError, match="has 1 fault"):
        verify(built.patched, built.stock, built.expected)
    assert NATIVE in capsys.readouterr().err


@pytest.mark.usefixtures("locked")
def test_the_command_prints_the_fixes_inside(
    built: Built, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", str(built.patched)])
    monkeypatch.setattr(command, "made_by_series", built.expected)
    main()
    printed = capsys.readouterr().out
    for words in (FIX.id, FIX.title, "backport", "https://host.example/40449", "vllm 0.20.2"):
        assert words in printed


def test_the_lock_is_asked_only_where_no_file_is_given(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "load_lock", lambda: pytest.fail("asked"))
    digest = hashlib.sha256(built.stock.read_bytes()).hexdigest()
    sbom = Sbom("vllm", "0.20.2+kvfix.0.1.0", "0.20.2", "vllm", "0.20.2", digest, ())
    assert stock_wheel(sbom, built.stock) == built.stock


def test_a_wheel_of_another_patch_set_needs_its_own_checkout(built: Built) -> None:
    sbom = Sbom("vllm", "0.20.2+kvfix.0.0.7", "0.20.2", "vllm", "0.20.2", "00" * 32, ())
    with (
        WheelReader(built.stock) as stock,
        pytest.raises(UsageError, match=r"the wheel is 0\.20\.2\+kvfix\.0\.0\.7, this checkout"),
    ):
        verify_module.made_by_series(stock, sbom)
