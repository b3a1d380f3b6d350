from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from scripts.wheel.reader import RecordRow, WheelReader
from scripts.wheel.record import record_row, record_text, verify_record
from tests.scripts.wheels import TAGS, WORKER, stock_files, with_metadata, zip_bytes

FOLDER = "vllm-0.20.2.dist-info"
RECORD = f"{FOLDER}/RECORD"


def faults_of(folder: Path, files: dict[str, bytes], *hashed: str) -> list[str]:
    path = folder / f"vllm-0.20.2-{TAGS}.whl"
    path.write_bytes(zip_bytes(files))
    with WheelReader(path) as wheel:
        return verify_record(wheel, hashed)


def with_hash(stated: str) -> dict[str, bytes]:
    """Return the files of a wheel whose RECORD states this hash of one of them."""
    files = with_metadata(stock_files())
    right = record_row(files[WORKER]).hash
    assert files[RECORD].count(right.encode()) == 1
    files[RECORD] = files[RECORD].replace(right.encode(), stated.encode())
    return files


def test_a_row_holds_the_hash_in_the_alphabet_of_addresses_and_unpadded() -> None:
    digest = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    assert record_row(b"") == RecordRow(digest, "0")


def test_the_text_has_the_rows_in_their_order_and_itself_at_the_end() -> None:
    rows = {"b/größe.py": RecordRow("sha256=x", "12"), 'a, "quoted"': RecordRow("sha256=y", "3")}
    assert record_text(rows, "d/RECORD").decode() == (
        'b/größe.py,sha256=x,12\n"a, ""quoted""",sha256=y,3\nd/RECORD,,\n'
    )


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512"])
def test_the_hashes_that_every_installer_knows_are_compared(tmp_path: Path, algorithm: str) -> None:
    def stated(data: bytes) -> str:
        digest = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest())
        return f"{algorithm}={digest.rstrip(b'=').decode()}"

    right, wrong = with_hash(stated(stock_files()[WORKER])), with_hash(stated(b"other"))
    assert faults_of(tmp_path, right, WORKER) == []
    assert faults_of(tmp_path, wrong) == []  # it was not asked for
    assert faults_of(tmp_path, wrong, WORKER) == [
        f"{WORKER}: its content does not have the hash that RECORD states"
    ]


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha3_256", ""])
def test_any_other_hash_is_a_fault(tmp_path: Path, algorithm: str) -> None:
    found = faults_of(tmp_path, with_hash(f"{algorithm}=x"), WORKER)
    assert found == [f"{WORKER}: RECORD has a hash of the kind {algorithm!r}"]


def test_content_that_cannot_be_read_is_one_fault_of_many(tmp_path: Path) -> None:
    path = tmp_path / f"vllm-0.20.2-{TAGS}.whl"
    content = zip_bytes(with_metadata(stock_files()), stored=True)
    path.write_bytes(content.replace(b"return 1", b"return 3", 1))
    with WheelReader(path) as wheel:
        broken, absent = verify_record(wheel, [WORKER, RECORD, "vllm/nowhere.py"])
    assert f"holds a {WORKER} that cannot be read: Bad CRC" in broken
    assert absent == "vllm/nowhere.py: RECORD does not list it"


@pytest.mark.parametrize(("size", "right"), [("", True), ("6", True), ("7", False), ("06", False)])
def test_the_size_of_a_signature_is_compared_where_it_is_stated(
    tmp_path: Path, size: str, right: bool
) -> None:
    """Of all other files the reader has compared it."""
    name = f"{FOLDER}/RECORD.jws"
    files = with_metadata(stock_files())
    own = files.pop(RECORD)
    files |= {name: b"signed", RECORD: f"{name},,{size}\n".encode() + own}
    fault = f"{name}: RECORD says {size} bytes, it has 6"
    assert faults_of(tmp_path, files) == ([] if right else [fault])


@pytest.mark.parametrize("place", [0, 1, -2])
def test_record_has_to_be_the_last_file(tmp_path: Path, place: int) -> None:
    files = [*with_metadata(stock_files()).items()]
    files.insert(place, files.pop())
    assert faults_of(tmp_path, dict(files)) == [f"{RECORD}: is not the last file"]
