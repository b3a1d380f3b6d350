"""The sessions: what there is to type. Each runs the module of its name in `scripts/commands/`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
DEFAULT_RELEASE: str = PYPROJECT["tool"]["kvfix"]["default-release"]


def install(session: nox.Session, group: str) -> None:
    """Install one dependency group, unless this environment already has it as it stands."""
    requirements = nox.project.dependency_groups(PYPROJECT, group)
    stamp = Path(session.virtualenv.location) / f"kvfix-{group}.txt"
    wanted = "\n".join(requirements)
    if not stamp.is_file() or stamp.read_text() != wanted:
        session.install(*requirements)
        stamp.write_text(wanted)


def command(
    session: nox.Session, group: str = "tools", success_codes: Sequence[int] = (0,)
) -> None:
    """Run the command of the session's name with what stands behind `--` on the command line."""
    install(session, group)
    words = ("python", "-m", f"scripts.commands.{session.name}", *session.posargs)
    session.run(*words, success_codes=success_codes)


@nox.session
def apply(session: nox.Session) -> None:
    """Build the patched wheel: nox -s apply -- [RELEASE] [--wheel FILE | --tree DIR] [--layer]."""
    command(session)


@nox.session
def export(session: nox.Session) -> None:
    """Give the fixes to a fork, as mboxes, a git bundle, or a branch in its clone (--into DIR)."""
    command(session)


@nox.session
def verify(session: nox.Session) -> None:
    """Check a patched wheel to the last byte: nox -s verify -- WHEEL."""
    command(session)


@nox.session
def lock(session: nox.Session) -> None:
    """Pin a release, or check its pins: nox -s lock -- [RELEASE...]."""
    command(session)


@nox.session
def edit(session: nox.Session) -> None:
    """Change one fix: nox -s edit -- RELEASE FIX, then --continue or --abort."""
    command(session)


@nox.session
def rebase(session: nox.Session) -> None:
    """Carry the fixes to another release: nox -s rebase -- RELEASE, then --continue or --skip."""
    command(session, group="lint")


@nox.session
def track(session: nox.Session) -> None:
    """Carry the fixes to releases that are new on the index; fails where a person is needed."""
    # 32: carried, the branch is ready. nox itself only knows 0 and 1; dist/track.json tells.
    command(session, group="lint", success_codes=(0, 32))


@nox.session
def replay(session: nox.Session) -> None:
    """Carry the fixes to each release as if it were new, and count what comes out."""
    command(session, group="lint")


@nox.session
def lint(session: nox.Session) -> None:
    """Check code, patches, registry, and that every release has what the overlay uses."""
    command(session, group="lint")


def quick_folder() -> str:
    """Return where tests make their 100,000s of files: in memory, if there is room for it.

    Of a folder on a disk half of their time goes into its journal.
    """
    memory = Path("/dev/shm")  # noqa: S108 - pytest makes a folder of the user's own in it
    if memory.is_dir():
        found = os.statvfs(memory)
        # Tests also start what they write, which some containers forbid there.
        if found.f_bavail * found.f_frsize > 4 << 30 and not found.f_flag & os.ST_NOEXEC:
            return str(memory)
    return tempfile.gettempdir()


@nox.session
def tests(session: nox.Session) -> None:
    """Test the tools, then the overlay on a patched vLLM: nox -s tests -- [--release RELEASE]."""
    install(session, "tests")
    if not session.posargs:
        side_by_side = ("-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
        # A wheel of a release is large, and hundreds of tests make one.
        tidy = ("-o", "tmp_path_retention_policy=failed")
        words = ("python", "-m", "pytest", *side_by_side, *tidy, "tests/scripts")
        session.run(*words, env={"TMPDIR": quick_folder()})
    command(session, group="tests")


@nox.session
def regressions(session: nox.Session) -> None:
    """Show each defect on the stock release and its absence on the patched one."""
    command(session)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare patched with stock where stock is right: nox -s parity -- [RELEASE...] [-k NAME]."""
    command(session)


@nox.session
def push(session: nox.Session) -> None:
    """Say which defects a release has where P pushes: nox -s push -- [RELEASE...]."""
    command(session)


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the code a little, and see whether a test notices: nox -s mutants -- RELEASE."""
    command(session, group="tests")


@nox.session
def status(session: nox.Session) -> None:
    """Say where each fix stands on each release: nox -s status -- [--prove [RELEASE...]]."""
    command(session)


@nox.session
def audit(session: nox.Session) -> None:
    """Say which defects a build has: nox -s audit -- RELEASE|WHEEL."""
    command(session)


@nox.session
def matrix(session: nox.Session) -> None:
    """Print what CI runs the regressions on, as JSON."""
    command(session)


@nox.session
def upstream_tests(session: nox.Session) -> None:
    """Run upstream's own tests, stock against patched: nox -s upstream_tests -- [RELEASE]."""
    command(session)


@nox.session
def soak(session: nox.Session) -> None:
    """Send hostile clients and peers by the thousand: nox -s soak -- [RELEASE] [--part PART]."""
    command(session)


@nox.session
def simulate(session: nox.Session) -> None:
    """Play P and D with time and faults under control: nox -s simulate -- [RELEASE...]."""
    command(session)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Give the tools hostile wheels, patches and registries, and kill them: nox -s fuzz."""
    command(session, group="tests")


@nox.session
def pd(session: nox.Session) -> None:
    """Show each defect in a real P/D deployment: nox -s pd -- [RELEASE] [-k EXPR] [--side SIDE]."""
    command(session, group="pd")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what `apply` costs, and what the patched worker costs where nothing fails."""
    command(session, group="bench")
