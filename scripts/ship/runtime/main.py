"""Put the fixes of kvfix into an installed vLLM: the files that change, and no others.

Before anything is written every file that a fix changes is compared with the release's own. All
files change or none; --undo puts the stock ones back, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from zipfile import BadZipFile

from .bundle import Bundle, read_bundle
from .console import PYTHON, say, show_all
from .install import check, install, take_out
from .installed import find_site
from .refusal import HASH_MISMATCH, STORAGE, RefusalError
from .signals import end_once


def main(archive: Path) -> int:
    """Do what the command line asks for, with what `archive` holds; return the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C; nothing is half done.
    """
    end_once()
    show_all()
    code, said = _done(archive)
    say(said, failed=code != 0)
    return code


def _done(archive: Path) -> tuple[int, str]:
    """Do it; return the exit code, and what is to be said."""
    try:
        bundle = read_bundle(archive)
    except (BadZipFile, KeyError, ValueError, EOFError) as error:
        return HASH_MISMATCH, str(_damaged(archive, error))
    options = _options(archive, bundle)
    os.umask(0o022)  # what is installed is for all to read, whoever installs it
    try:
        site = find_site(options.target)
        if options.check:
            return 0, check(site, bundle)
        if options.undo:
            return 0, take_out(site)
        said = install(site, bundle)
    except RefusalError as refusal:
        return refusal.code, str(refusal)
    except OSError as error:
        return STORAGE, str(_storage(error, archive, options.target))
    if options.target is None:
        whole = f"cd / && {shlex.join([PYTHON, '-m', 'vllm_overlay', '--check'])}"
    else:  # which this Python does not import
        whole = _check_command(archive, options.target)
    return 0, f"{said}\nlook whether it is whole: {whole}"


def _options(archive: Path, bundle: Bundle) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python {archive.name}",
        description=__doc__,
        epilog=f"This one holds {len(bundle.fixes)} fixes for vLLM {bundle.release} "
        f"(+{bundle.local}): {', '.join(bundle.fixes)}.",
    )
    parser.add_argument("--target", metavar="DIR", help="the folder that vllm/ is installed in")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say what there is, and write nothing")
    what.add_argument("--undo", action="store_true", help="put the stock files back")
    return parser.parse_args()


def _check_command(archive: Path, target: str | None) -> str:
    """Return what a shell runs, in whatever folder, to say what is there."""
    named = [] if target is None else ["--target", str(Path(target).resolve())]
    return shlex.join([PYTHON, str(archive.resolve()), *named, "--check"])


def _damaged(archive: Path, error: Exception) -> RefusalError:
    return RefusalError(
        HASH_MISMATCH,
        f"{archive} is damaged: {error}",
        "the file that apply wrote",
        "copy it again from there",
    )


def _storage(error: OSError, archive: Path, target: str | None) -> RefusalError:
    # A write that finds the disk full does not say where.
    place = error.filename2 or error.filename or target or "a file of the installed vLLM"
    return RefusalError(
        STORAGE,
        f"cannot read or write {place}: {error.strerror or error}",
        "folders that may be written, with 10 MB free",
        f"run this as their owner; what there is now says: {_check_command(archive, target)}",
    )
