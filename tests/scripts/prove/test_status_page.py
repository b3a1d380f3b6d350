"""The pages of `nox -s status`: read by a program, and in a browser as wide as a phone."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripts.patchset.pins import Pin
from scripts.patchset.registry import Registry
from scripts.prove.status_page import COLOURS, SYMBOLS, as_html, as_markdown
from tests.scripts import toys

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
PINS = {
    "0.18.1": [
        Pin("A & B 1", "0.18.1", "https://example.org/1?a&b"),
        Pin("C", "0.18.1", "https://example.org/2"),
    ]
}
RELEASES = [f"0.{minor}.{micro}" for minor in range(18, 34) for micro in (0, 1)]
# How the three kinds of dichromats see linear RGB (Machado, Oliveira and Fernandes 2009).
EYES = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def registry() -> Registry:
    return toys.registry(*(toys.fix(f"K{number:02d}") for number in range(18)))


def rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Return cells of all kinds."""
    kinds = itertools.cycle((state, proven) for state in SYMBOLS for proven in (True, False))
    return {
        release: {
            fix_id: {
                "state": state,
                "proven": proven,
                "why": ["On the stock release 1 of 2 tests fail: assert <a> & 'b' == 2 " * 3],
                "command": "nox -s status",
                "runs": proven,
                "inputs": "0" * 64,
            }
            for fix_id, (state, proven) in zip(registry().fixes, kinds, strict=False)
        }
        for release in RELEASES
    }


class Reader(HTMLParser):
    """Collects the tags of a page and checks that they close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_cell_leads_to_what_was_seen() -> None:
    found = Reader(as_html(rows(), registry(), PINS)).found
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len({*ids})
    links = [str(attributes["href"]) for tag, attributes in found if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= {*ids}
    assert {"https://example.org/1?a&b", "https://example.org/2"} <= {*links}
    for release, fix_id in itertools.product(RELEASES, registry().fixes):
        assert f"#{release}-{fix_id}" in links


def test_the_page_needs_no_other_file_and_no_script() -> None:
    found = Reader(as_html(rows(), registry(), PINS)).found
    assert not {tag for tag, _ in found} & {"script", "img", "link", "iframe"}
    assert not [attributes for _, attributes in found if "src" in attributes]
    assert "url(" not in as_html(rows(), registry(), PINS)
    assert "@import" not in as_html(rows(), registry(), PINS)


def test_what_tests_said_is_text_and_not_markup() -> None:
    assert "assert &lt;a&gt; &amp; &#x27;b&#x27; == 2" in as_html(rows(), registry(), PINS)


def test_markdown_has_a_row_for_each_release_and_marks_hints() -> None:
    lines = as_markdown(rows(), registry(), PINS).splitlines()
    table = [line for line in lines if re.match(r"\| \d", line)]
    assert [line.split()[1] for line in table] == RELEASES[::-1]
    assert table[-1].startswith("| 0.18.0 | ✓ | (✓) | ● | (●) | ↑ | (↑) | - | (-) | ? | ? |")
    assert table[-2].endswith(
        " | [A & B 1](https://example.org/1?a&b), [C](https://example.org/2) |"
    )
    assert table[-1].endswith(" |  |")
    assert "(push.md)" in lines[-1]


def linear(colour: str) -> list[float]:
    values = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def product(rows: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in rows]


def lab(rgb: list[float]) -> list[float]:
    """Return Oklab of linear RGB: distances in it are about as large as people see them."""
    into = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
    lms = [max(value, 0) ** (1 / 3) for value in product(into, rgb)]
    out = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    return product(out, lms)


@pytest.mark.parametrize("eye", [None, *EYES])
def test_any_two_states_differ_for_every_eye(eye: str | None) -> None:
    seen = {}
    for state, (colour, _) in COLOURS.items():
        seen[state] = lab(product(EYES[eye], linear(colour)) if eye else linear(colour))
    for one, other in itertools.combinations(seen, 2):
        assert math.dist(seen[one], seen[other]) > 0.1, (one, other)
    assert len({*SYMBOLS.values()}) == len(SYMBOLS)  # nor is colour the only difference


def test_text_on_a_state_can_be_read() -> None:
    for colours in COLOURS.values():
        (light,), (dark,) = sorted(
            (product([(0.2126, 0.7152, 0.0722)], linear(colour)) for colour in colours),
            reverse=True,
        )
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, 1.4.3


MEASURE = """
<script>
const of = (query) => [...document.querySelectorAll(query)];
const cells = of("td a"), boxes = cells.map((a) => a.getBoundingClientRect());
const rows = of("tbody tr").map((row) => row.getBoundingClientRect().height);
const small = of("body *").filter((e) => e.textContent.trim() &&
  parseFloat(getComputedStyle(e).fontSize) < 12);
location.hash = new URL(cells.at(-1).href).hash;
const target = document.querySelector(":target");
document.body.innerHTML = "";
document.title = JSON.stringify({
  width: innerWidth, sideways: window.sideways, cells: cells.length,
  narrowest: Math.min(...boxes.map((b) => b.width)),
  lowest: Math.min(...boxes.map((b) => b.height)),
  tallest: Math.max(...rows), small: small.length,
  target: target && target.id, backgrounds: window.backgrounds,
});
</script>
"""
BEFORE = """
<script>
window.sideways = document.documentElement.scrollWidth > innerWidth;
window.backgrounds = new Set([...document.querySelectorAll("td a:not(.hint)")].map(
  (a) => getComputedStyle(a).backgroundColor)).size;
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on the PATH")
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it_on_a_phone_and_on_a_desk(tmp_path: Path, width: int) -> None:
    page = tmp_path / "status.html"
    text = as_html(rows(), registry(), PINS)
    page.write_text(text.replace("</body>", f"{BEFORE}{MEASURE}</body>"), encoding="utf-8")
    # A window cannot be as narrow as a phone, but a frame in it can.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="status.html" width="{width}" height="800" style="border:0" onload="'
        'document.title = this.contentDocument.title"></iframe>'
    )
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,900", "--virtual-time-budget=5000", frame.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stdout + done.stderr
    found = json.loads(title[1])
    assert found["width"] == width
    assert found["sideways"] is False  # only the table scrolls, within its own frame
    assert found["cells"] == len(RELEASES) * 18
    assert found["narrowest"] >= 24  # WCAG 2.2, 2.5.8
    assert found["lowest"] >= 24
    assert found["tallest"] <= 40  # no label is broken
    assert found["small"] == 0
    assert found["target"] == f"{RELEASES[0]}-K17"
    assert found["backgrounds"] == len(SYMBOLS)
