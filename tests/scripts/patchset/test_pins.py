"""The products: each with the release that it ships and a page that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.patchset.pins import load_pins
from scripts.system.errors import RegistryError

ROW = '[[pin]]\nproduct = "{}"\nrelease = "{}"\nsource = "{}"\n'
PAGE = "https://example.org/"


def pins(folder: Path, *rows: tuple[str, str, str]) -> list[tuple[str, list[str]]]:
    path = folder / "pins.toml"
    path.write_text("\n".join(ROW.format(*row) for row in rows))
    found = load_pins(path, {"0.9.0", "0.10.0"})
    return [(release, [pin.product for pin in each]) for release, each in found.items()]


def test_products_stand_under_their_release_and_releases_by_age(tmp_path: Path) -> None:
    rows = [("B", "0.10.0", PAGE), ("C", "0.9.0", PAGE), ("A", "0.10.0", PAGE)]
    assert pins(tmp_path, *rows) == [("0.9.0", ["C"]), ("0.10.0", ["B", "A"])]


def test_none(tmp_path: Path) -> None:
    assert pins(tmp_path) == []


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (("A", "0.11.0", PAGE), "patches/upstream.lock has no 0.11.0"),
        (("", "0.10.0", PAGE), "a value is empty"),
        (("A", "0.10.0", "somewhere"), "no https address"),
        (("A", "0.10.0", f'{PAGE}"\nsince = "2026'), "unexpected keyword argument 'since'"),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path: Path, row: tuple[str, str, str], found: str) -> None:
    with pytest.raises(RegistryError, match=found):
        pins(tmp_path, row)


def test_the_pins_of_this_repository() -> None:
    assert {"0.23.0", "0.26.0", "0.28.0"} <= load_pins().keys()
