"""`nox -s replay`: how well does carrying work? Each release is carried to as if it were new.

For each pinned release from 0.20.0 on, the nearest carried releases below and above it are the
sources, as `nox -s rebase` takes them. Of the registry only what it says of those counts, for it
knows the answer: what a stock release has already is what the tests on record say. Nothing
lands. The table goes to `docs/replay.md` and `records/proofs/replay.json`.

    nox -s replay                      every transition, by text and by what is on record
    nox -s replay -- --prove 0.21.0    and run the tests of what was carried there
"""

from __future__ import annotations

from scripts.carry.replay import as_markdown, replay_all, write
from scripts.system.console import entry, out, parser_of


def main() -> None:
    """Replay all transitions and write what came out."""
    parser = parser_of("replay", __doc__)
    parser.add_argument("--prove", metavar="RELEASE", nargs="+", default=[])
    options = parser.parse_args()
    transitions = replay_all(options.prove)
    write(transitions)
    out.print(as_markdown(transitions), markup=False)


if __name__ == "__main__":
    entry(main)
