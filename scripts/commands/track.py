"""`nox -s track`: does the index have releases of vLLM that kvfix has not, and do the fixes carry?

Each new release is pinned, carried and proven in a clone of this repository at HEAD, as
`nox -s lock` and `nox -s rebase` do it; this checkout is not touched. What is proven becomes a
commit, ready to be merged, on branch `carry/<release>`. The verdict goes to the terminal and, for
machines and for the text of an issue, to `dist/track.json` and `dist/track.md`.

Exit codes of `python -m scripts.commands.track`: 0, nothing to do; 32, releases were carried and
every branch is ready; 31, a release needs a person, and the verdict has the table; anything else,
the tool has failed. The session succeeds on 0 and 32.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scripts.carry.track import WORK, Fate, as_markdown, track
from scripts.project import DIST
from scripts.system.console import entry, out, parser_of
from scripts.system.errors import CARRIED, NeedsPersonError
from scripts.system.files import only_process, replace_text


def main() -> None:
    """Look for new releases, carry them, and leave with the exit code of the verdict."""
    parser_of("track", __doc__).parse_args()
    WORK.parent.mkdir(exist_ok=True)
    with only_process(WORK.parent, "works on a rebase in this checkout"):
        tracked = track()
    DIST.mkdir(exist_ok=True)
    rows = [asdict(one) | {"verdict": one.verdict.value} for one in tracked]
    replace_text(DIST / "track.json", json.dumps(rows, indent=2) + "\n")
    replace_text(DIST / "track.md", as_markdown(tracked))
    out.print(as_markdown(tracked), markup=False)
    if any(one.verdict is Fate.NEEDS_PERSON for one in tracked):
        sys.exit(NeedsPersonError.exit_code)
    if tracked:
        sys.exit(CARRIED)


if __name__ == "__main__":
    entry(main)
