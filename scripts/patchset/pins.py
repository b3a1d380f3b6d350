"""Which products ship which release: `patches/pins.toml`, each with the page that says so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from scripts.project import PATCHES, read_toml
from scripts.system.errors import RegistryError
from scripts.upstream.lock import load_lock

PINS = PATCHES / "pins.toml"


@dataclass(frozen=True)
class Pin:
    """A product, the release that it ships, and the page of its makers or packagers."""

    product: str
    release: str
    source: str

    @property
    def link(self) -> str:
        """The product's name in Markdown, leading to the source."""
        return f"[{self.product}]({self.source})"


def load_pins(path: Path = PINS, known: Collection[str] | None = None) -> dict[str, list[Pin]]:
    """Return the products by the release that they ship, oldest release first.

    Args:
        path: The file.
        known: The releases that there are; those of `patches/upstream.lock` unless given.

    Raises:
        RegistryError: A row lacks a value, has an unknown one, or names no pinned release.
    """
    known = load_lock().keys() if known is None else known
    found: dict[str, list[Pin]] = {}
    for row in read_toml(path).get("pin", []):
        try:
            pin = Pin(**row)
        except TypeError as error:
            raise _wrong(row, str(error)) from error
        if not all(isinstance(value, str) and value for value in vars(pin).values()):
            raise _wrong(row, "a value is empty or no text")
        if pin.release not in known:
            raise _wrong(row, f"patches/upstream.lock has no {pin.release}")
        if not pin.source.startswith("https://"):
            raise _wrong(row, "the source is no https address")
        found.setdefault(pin.release, []).append(pin)
    return {release: found[release] for release in sorted(found, key=Version)}


def _wrong(row: object, why: str) -> RegistryError:
    return RegistryError(
        f"patches/pins.toml: {row!r}: {why}",
        expected="[[pin]] with product, release (a pinned one) and source (a page that says so)",
        next_step="correct the row, then: nox -s edit -- --restamp",
    )
