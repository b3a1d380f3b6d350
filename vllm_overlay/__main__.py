# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_overlay`: which fixes this vLLM carries, as a table or, with --json, as JSON."""

from __future__ import annotations

import argparse
import json
import sys

import vllm_overlay


def main() -> None:
    """Print the fixes inside."""
    parser = argparse.ArgumentParser(prog="python -m vllm_overlay", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    build, fixes = vllm_overlay.build(), vllm_overlay.fixes()
    if not fixes:
        # The folder that Python is started in comes before what is installed.
        sys.exit(
            f"{vllm_overlay.__file__} is the source of the patch set, not a patched vLLM; "
            "ask from another folder"
        )
    if as_json:
        print(json.dumps({"build": build, "fixes": fixes}, indent=2))
        return
    for key, value in build.items():
        print(f"{key}: {value}")
    rows = [("fix", "upstream", "what is true with it")]
    rows += [(fix["id"], fix["upstream_pr"] or "-", fix["title"]) for fix in fixes]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for fix_id, upstream, title in rows:
        print(f"{fix_id:<{widths[0]}}  {upstream:<{widths[1]}}  {title}")


main()
