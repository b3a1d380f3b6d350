"""`nox -s verify -- WHEEL`: whether a patched wheel is the stock one with the series in it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from scripts.system.console import entry, out
from scripts.system.files import sha256
from scripts.wheel.verify import made_by_series, verify


def main() -> None:
    """Read the command line, verify that wheel, and print the fixes inside."""
    parser = argparse.ArgumentParser(prog="nox -s verify --", description="Check a patched wheel.")
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="a wheel that apply made")
    parser.add_argument(
        "--stock", type=Path, metavar="FILE", help="the wheel it was made from, if not pinned"
    )
    arguments = parser.parse_args()
    sbom = verify(arguments.wheel, arguments.stock, made_by_series)
    table = Table("fix", "kind", "what is true with it", Column("upstream", overflow="fold"))
    for fix in sbom.fixes:
        table.add_row(fix.id, fix.kind, escape(fix.title), fix.upstream_pr or "")
    out.print(table)
    out.print(
        f"{arguments.wheel.name} is {sbom.ancestor_name} {sbom.ancestor_version} with these "
        f"fixes and nothing else; sha256 {sha256(arguments.wheel)}",
        markup=False,
    )


if __name__ == "__main__":
    entry(main)
