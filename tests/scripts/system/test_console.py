from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from rich.table import Table

from scripts.project import ROOT
from scripts.system import console
from scripts.system.console import entry, progress, storage_error
from scripts.system.errors import UNREAD, KvfixError, PatchDoesNotApplyError, StorageError


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
    long = "a path [bold]/x/:bug:/[0-9]*.whl " + "and more " * 40
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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ENAMETOOLONG", "the name is longer than this system takes"),
        ("ENOENT", "no such file or folder"),
        ("ELOOP", "links that lead in a circle"),
        ("ETXTBSY", "Text file busy"),
    ],
)
def test_a_path_that_fails_is_no_traceback(
    code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "dist/x.whl")
    assert ended(raising(error)) == StorageError.exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"error: cannot use dist/x.whl: {words}\nexpected: ")
    assert "name another one" in said


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "it").mkdir()
    monkeypatch.chdir(tmp_path / "it")
    (tmp_path / "it").rmdir()
    for name in (None, "dist"):
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        found = storage_error(error)
        assert found is not None
        assert "the working directory is not there any more" in found.found
    other = storage_error(FileNotFoundError(errno.ENOENT, "no", str(tmp_path / "other")))
    assert other is not None
    assert f"cannot use {tmp_path / 'other'}" in other.found


_SAYS = {
    "print": "print('words')",
    "table": "console.out.print('words')",
    "help": "console.parser_of('it', None).parse_args(['--help'])",
    "error": "console.err.print('words')",
    "refusal": "(_ for _ in ()).throw(KvfixError('f', expected='e', next_step='n'))",
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("says", _SAYS)
def test_it_ends_quietly_where_nobody_reads(says: str, unbuffered: str) -> None:
    code = (
        "from scripts.system import console\nfrom scripts.system.errors import KvfixError\n"
        f"console.entry(lambda: {_SAYS[says]})"
    )
    read, unread = os.pipe()
    os.close(read)
    both = says in ("error", "refusal")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=unread,
        stderr=unread if both else subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(unread)
    # argparse lets go of what it cannot write itself.
    assert result.returncode in ((0, UNREAD) if says == "help" else (UNREAD,))
    assert both or result.stderr == ""


def test_another_pipe_that_breaks_is_shown_whole() -> None:
    with pytest.raises(BrokenPipeError):
        entry(raising(BrokenPipeError(errno.EPIPE, "of a child")))


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


def test_a_name_of_an_emoji_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.out.print("[bold]wrote[/] /x/:bug:/y")
    assert capsys.readouterr().out == "wrote /x/:bug:/y\n"


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


def test_a_copy_that_fails_says_of_which_file(tmp_path: Path) -> None:
    error = shutil.Error([(tmp_path / "a", tmp_path / "b", "[Errno 28] No space left on device")])
    said = storage_error(error)
    assert said is not None
    assert said.found == f"cannot write {tmp_path / 'b'}: [Errno 28] No space left on device"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_does_not_have_is_written_as_an_escape(encoding: str) -> None:
    code = "from scripts.system.console import entry, out; entry(lambda: out.print('K01 → ✓'))"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, rb"K01 \u2192 \u2713" + b"\n", b"")


def test_an_output_that_is_closed_is_no_traceback() -> None:
    code = "from scripts.system.console import entry, out; entry(lambda: out.print('K01'))"
    command = f'exec {sys.executable} -c "{code}" >&-'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=False)  # noqa: S602
    assert (done.returncode, done.stderr) == (0, b"")
