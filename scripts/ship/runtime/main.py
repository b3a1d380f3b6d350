"""Put the fixes of kvfix into an installed vLLM: the files that change, and no others.

Before anything is written every file that a fix changes is compared with the release's own. All
files change or none; --undo puts the stock ones back, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from zipfile import BadZipFile

from .bundle import read_bundle
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
    try:
        bundle = read_bundle(archive)
    except (BadZipFile, KeyError, ValueError, EOFError) as error:
        print(_damaged(archive, error), file=sys.stderr)
        return HASH_MISMATCH
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
    options = parser.parse_args()
    os.umask(0o022)  # what is installed is for all to read, whoever installs it
    try:
        site = find_site(options.target)
        if options.check:
            print(check(site, bundle))
        elif options.undo:
            print(take_out(site))
        else:
            print(install(site, bundle))
            print("look whether it is whole: cd / && python -m vllm_overlay --check")
    except RefusalError as refusal:
        print(refusal, file=sys.stderr)
        return refusal.code
    except OSError as error:
        print(_storage(error, archive), file=sys.stderr)
        return STORAGE
    return 0


def _damaged(archive: Path, error: Exception) -> RefusalError:
    return RefusalError(
        HASH_MISMATCH,
        f"{archive} is damaged: {error}",
        "the file that apply wrote",
        "copy it again from there",
    )


def _storage(error: OSError, archive: Path) -> RefusalError:
    return RefusalError(
        STORAGE,
        f"cannot read or write {error.filename2 or error.filename}: {error.strerror}",
        "folders that may be written, with 10 MB free",
        f"run this as their owner; what there is now says: python {archive.name} --check",
    )
