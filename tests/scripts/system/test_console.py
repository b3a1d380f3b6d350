from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from rich.console import Console
from rich.table import Table

from scripts.system import console
from scripts.system.console import entry, progress, storage_error
from scripts.system.errors import KvfixError, PatchDoesNotApplyError, StorageError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ended(main: Callable[[], None]) -> object:
    """Run `main` as a command and return the exit code."""
    with pytest.raises(SystemExit) as caught:
        entry(main)
    return caught.value.code


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> NoReturn:
        raise error

    return main


def test_a_command_that_ends_well_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: None) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KvfixError.__subclasses__())
def test_an_error_is_three_lines_and_its_own_code(
    kind: type[KvfixError], capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a path [bold]/x/[0-9]*.whl " + "and more " * 40
    assert (
        ended(raising(kind(long, expected="[/]this", next_step="type [red]that"))) == kind.exit_code
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: {long}\nexpected: [/]this\nnext: type [red]that\n"


@pytest.mark.parametrize(
    "code",
    ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "ENOTDIR", "EEXIST", "EISDIR", "EIO"],
)
def test_a_folder_that_takes_nothing_is_no_traceback(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "dist/x.whl")
    assert ended(raising(error)) == StorageError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: cannot write dist/x.whl: ")
    assert "--out" in said
    assert ("free space" in said) == (code in ("ENOSPC", "EDQUOT", "EFBIG"))
    assert "wheel" not in said
    assert "KVFIX_CACHE" in said


def test_a_full_disk_that_does_not_say_where() -> None:
    found = storage_error(OSError(errno.ENOSPC, "No space left on device"))
    assert found is not None
    assert "cannot write the target folder: no space left" in found.found


def test_what_a_user_cannot_mend_is_shown_whole() -> None:
    for error in (OSError(errno.EBADF, "bad"), ValueError("a defect"), OSError("without number")):
        with pytest.raises(type(error)):
            entry(raising(error))


def test_interruptions_have_the_codes_that_shells_give_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(raising(KeyboardInterrupt())) == 130
    assert "Nothing was left half done" in capsys.readouterr().err
    assert ended(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143


def test_words_of_a_patch_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    code = "wanted: 'x[1] = {\"a\": [/]}'"
    ended(raising(PatchDoesNotApplyError(code, expected="e", next_step="n")))
    assert code in capsys.readouterr().err


def test_progress_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress("file.whl", 100) as advance:
        advance(50)
    assert capsys.readouterr() == ("", "")
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=screen, force_terminal=True, width=80))
    with progress("file.whl", 100) as advance:
        advance(50)
    assert "file.whl" in screen.getvalue()


def test_no_error_and_no_table_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[31m\x07b\r\u202e\udcff.py"
    error = KvfixError(f"has {name}", expected=name, next_step=name)
    assert ended(raising(error)) == 1
    table = Table("fix")
    table.add_row(name)
    console.out.print(table)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert text.replace("\n", "").isprintable()
        assert "a\\x1b[31m\\x07b\\r\\u202e\\udcff.py" in text


def test_what_can_be_shown_is_shown_as_it_is() -> None:
    assert console.visible("größe → 1\n  [bold]\t✗") == "größe → 1\n  [bold]\t✗"
