"""`nox -s lint`: everything that can be said of the patch set without running vLLM.

All checks run, all faults are listed, and the session fails once. Beside ruff, mypy,
import-linter and zizmor (for the workflows of CI):

- every release that is carried has exactly one patch for each fix that the registry does not name
  as unaffected or unpatched there; it applies exactly, alone with what it depends on and in series,
  and adds nothing but hooks;
- making the patch files anew from what they do gives the same files and bytes, so none repeats
  another, and each head names the releases that it serves;
- every changed file says so near its top;
- every name of vLLM that the overlay and the hooks use exists in each release (type-checked);
- every forward test exists in its later release and can be cut for the earlier ones;
- every overlay module is used, says which releases it is for and has its test file, the changelog
  names each fix, and the README's matrix is the registry's;
- README.md and docs/ quote figures of runs as records/figures.toml has them.
"""

from __future__ import annotations

from scripts.checks.code import code_faults
from scripts.checks.figures import figure_faults
from scripts.checks.patch_set import patch_set_faults
from scripts.system.console import entry, err, parser_of
from scripts.system.errors import CheckFailedError


def main() -> None:
    """Run all checks."""
    parser_of("lint", __doc__).parse_args()
    faults = [*code_faults(), *patch_set_faults(), *figure_faults()]
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="none",
            next_step="correct what is listed above, then: nox -s lint",
        )


if __name__ == "__main__":
    entry(main)
