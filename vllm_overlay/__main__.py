# SPDX-License-Identifier: Apache-2.0
"""Say which fixes this vLLM carries; with --check, whether they are still all there."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import vllm_overlay


def main() -> None:
    """Print the fixes inside, or what --check finds; ends with 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m vllm_overlay", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check", action="store_true", help="hash every file that was changed or added"
    )
    options = parser.parse_args()
    said: dict[str, Any] = {"build": vllm_overlay.build(), "fixes": vllm_overlay.fixes()}
    if not said["fixes"]:
        # The folder that Python is started in comes before what is installed.
        sys.exit(
            f"{vllm_overlay.__file__} is the source of the patch set, not a patched vLLM; "
            "ask from another folder"
        )
    if options.check:
        if not vllm_overlay.files():
            sys.exit("this vLLM was built from a patched tree: ask its git, not this package")
        said["faults"] = vllm_overlay.faults()
    if options.json:
        print(json.dumps(said, indent=2))
    else:
        _print(**said)
    sys.exit(1 if said.get("faults") else 0)


def _print(
    build: dict[str, str], fixes: list[dict[str, Any]], faults: list[str] | None = None
) -> None:
    for key, value in build.items():
        print(f"{key}: {value}")
    rows = [("fix", "upstream", "what is true with it")]
    rows += [(fix["id"], fix["upstream_pr"] or "-", fix["title"]) for fix in fixes]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for fix_id, upstream, title in rows:
        print(f"{fix_id:<{widths[0]}}  {upstream:<{widths[1]}}  {title}")
    if faults:
        print(*(f"FAULT {fault}" for fault in faults), sep="\n")
        print("the fixes above are not all in force: install the patched wheel again")
    elif faults is not None:
        print(f"{len(vllm_overlay.files())} files are as this build was made")


main()
