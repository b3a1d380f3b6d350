"""The matrix of `nox -s status` as pages: Markdown for a forge, one HTML file for a phone.

Both show a symbol for each state, and a different one where it is only a hint; colour is never
the only difference. Every cell of the HTML page leads to what was seen, on the same page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from scripts.patchset.pins import Pin
from scripts.patchset.registry import Registry

Rows = dict[str, dict[str, dict[str, Any]]]
Pins = Mapping[str, Sequence[Pin]]

SYMBOLS = {
    "patched": "✓",
    "open": "●",
    "upstream since": "↑",
    "not affected": "-",
    "unproven": "?",
}
_MEANINGS = {
    "patched": "affected; kvfix has a patch for it",
    "open": "affected, and no patch",
    "upstream since": "fixed by upstream: an earlier release is affected, this one is not",
    "not affected": "this release does not have the defect, nor did one before it",
    "unproven": "nothing has shown it, or what was seen contradicts itself",
}
# Background and text. After Okabe and Ito; under each kind of colour blindness any two differ.
COLOURS = {
    "patched": ("#00664b", "#ffffff"),
    "open": ("#e69f00", "#000000"),
    "upstream since": ("#56b4e9", "#000000"),
    "not affected": ("#e6e6e6", "#000000"),
    "unproven": ("#000000", "#ffffff"),
}
_PUSH = (
    "From 0.24.0 on a cell speaks of connectors that pull; [push.md](push.md) has what was seen "
    "where P pushes."
)
_HINT = "not proven: from the texts, or from a run before something changed"


def as_markdown(rows: Rows, registry: Registry, pins: Pins) -> str:
    """Return the matrix as Markdown.

    Args:
        rows: Release → fix → the cell's fields.
        registry: The fixes.
        pins: Release → the products that ship it.
    """
    fixes = list(registry.fixes)
    head = " | ".join(f"[{fix_id}](fixes.md#{fix_id.lower()})" for fix_id in fixes)
    lines = [
        "# Where each fix stands",
        "<!-- made by `nox -s status` -->",
        "",
        *(f"- {SYMBOLS[state]} {state}: {meaning}" for state, meaning in _MEANINGS.items()),
        f"- ( ) {_HINT}",
        "",
        _summary(rows) + " What was seen is in `records/proofs/`; `nox -s status` shows it behind "
        "each cell of `reports/status.html`.",
        "",
        f"| release | {head} | shipped by |",
        f"|---|{'---|' * len(fixes)}---|",
    ]
    for release, row in reversed(rows.items()):
        cells = " | ".join(_marked(row[fix_id]) for fix_id in fixes)
        names = ", ".join(pin.link for pin in pins.get(release, []))
        lines.append(f"| {release} | {cells} | {names} |")
    lines += ["", _PUSH]
    return "\n".join(lines) + "\n"


def _marked(cell: Mapping[str, Any]) -> str:
    symbol = SYMBOLS[cell["state"]]
    return symbol if cell["proven"] or cell["state"] == "unproven" else f"({symbol})"


def _summary(rows: Rows) -> str:
    cells = [cell for row in rows.values() for cell in row.values()]
    return f"{sum(cell['proven'] for cell in cells)} of {len(cells)} cells are proven by tests."


def as_html(rows: Rows, registry: Registry, pins: Pins) -> str:
    """Return the matrix as one page that needs no other file; arguments as for `as_markdown`."""
    fixes = list(registry.fixes)
    heads = "".join(f'<th scope="col"><a href="#fix-{i}"><span>{i}</span></a></th>' for i in fixes)
    body = "".join(
        f'<tr><th scope="row"><a href="#{release}">{release}</a></th>'
        + "".join(f"<td>{_link(release, fix_id, row[fix_id])}</td>" for fix_id in fixes)
        + f"<td>{_products(pins.get(release, []))}</td></tr>\n"
        for release, row in reversed(rows.items())
    )
    legend = "".join(
        f'<li><b class="{_class(state)}">{SYMBOLS[state]}</b> {state}: {meaning}</li>\n'
        for state, meaning in _MEANINGS.items()
    )
    names = "".join(
        f'<dt id="fix-{fix.id}"><a href="fixes.md#{fix.id.lower()}">{fix.id}</a></dt>'
        f"<dd>{escape(fix.title)}</dd>\n"
        for fix in registry.fixes.values()
    )
    evidence = "".join(
        f'<section id="{release}"><h2>vLLM {release}</h2>\n'
        + "".join(_evidence(release, fix_id, row[fix_id]) for fix_id in fixes)
        + "</section>\n"
        for release, row in reversed(rows.items())
    )
    return f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvfix: where each fix stands</title>
<style>{_STYLE}{_colours()}</style></head>
<body>
<h1 id="top">Where each fix stands</h1>
<p>{_summary(rows)} Touch a cell to see what was seen.</p>
<div class="matrix" tabindex="0"><table>
<thead><tr><th scope="col">vLLM</th>{heads}<th scope="col">shipped by</th></tr></thead>
<tbody>
{body}</tbody></table></div>
<ul>
{legend}<li><b class="open hint">{SYMBOLS["open"]}</b> {_HINT}</li>
</ul>
<h2>The fixes</h2>
<dl>
{names}</dl>
{evidence}</body></html>
"""


def _products(pins: Sequence[Pin]) -> str:
    links = (f'<a class="product" href="{escape(p.source)}">{escape(p.product)}</a>' for p in pins)
    return ", ".join(links)


def _link(release: str, fix_id: str, cell: Mapping[str, Any]) -> str:
    label = f"{fix_id} on {release}: {cell['state']}{'' if cell['proven'] else ', not proven'}"
    kind = _class(cell["state"]) + ("" if cell["proven"] else " hint")
    return (
        f'<a class="{kind}" href="#{release}-{fix_id}" title="{label}" aria-label="{label}">'
        f"{SYMBOLS[cell['state']]}</a>"
    )


def _evidence(release: str, fix_id: str, cell: Mapping[str, Any]) -> str:
    why = "".join(f"<p>{escape(sentence)}</p>" for sentence in cell["why"])
    proven = "proven" if cell["proven"] else "not proven"
    runs = f' <a href="../records/proofs/{release}.json">runs</a>' if cell["runs"] else ""
    return (
        f'<article id="{release}-{fix_id}"><h3>{_link(release, fix_id, cell)} {fix_id}: '
        f"{cell['state']}, {proven}</h3>{why}<p><code>{escape(cell['command'])}</code> "
        f'<small>{cell["inputs"][:12]}</small>{runs} <a href="#top">matrix</a></p></article>\n'
    )


def _class(state: str) -> str:
    return state.replace(" ", "-")


def _colours() -> str:
    return "".join(
        f".{_class(state)}{{background:{background};color:{text};border-color:{background}}}"
        for state, (background, text) in COLOURS.items()
    )


_STYLE = """
html{color-scheme:light;scroll-padding-top:.5rem}
body{font:16px/1.4 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:.5rem;color:#000;
background:#fff;overflow-wrap:anywhere}
.matrix{overflow-x:auto}
table{border-collapse:collapse;font-size:15px}
th,td{padding:1px;white-space:nowrap}
tbody th,thead th:first-child{position:sticky;left:0;background:#fff;text-align:left;
padding-right:6px;font-weight:600}
thead span{writing-mode:vertical-rl;transform:rotate(180deg)}
thead a,tbody th a{color:#000;text-decoration:none}
td a,h3 a,li b{display:block;box-sizing:border-box;min-width:26px;height:28px;line-height:24px;
text-align:center;text-decoration:none;border:2px solid;border-radius:4px;font-weight:700}
td a.product{all:revert;line-height:28px}
h3 a,li b{display:inline-block}
h3{font-size:1rem;margin:1rem 0 .25rem}
article{border-top:1px solid #ccc}
article p{margin:.25rem 0}
article:target{outline:3px solid #000}
ul{list-style:none;padding:0}
li{margin:.25rem 0}
dt{font-weight:700}
dd{margin:0 0 .5rem}
a:focus-visible,.matrix:focus-visible{outline:3px solid #000}
td a.hint,h3 a.hint,li b.hint{background:#fff;color:#000;border-style:dashed;font-weight:400}
"""
