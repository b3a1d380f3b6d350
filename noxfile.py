"""The sessions: what there is to type. Each one runs one module of `scripts/`."""

from __future__ import annotations

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


def tool(session: nox.Session, module: str, *arguments: str, group: str = "tools") -> None:
    """Run one of the tools with what stands behind `--` on the command line."""
    install(session, group)
    session.run("python", "-m", f"scripts.{module}", *arguments, *session.posargs)


@nox.session
def apply(session: nox.Session) -> None:
    """Build the patched wheel: nox -s apply -- [RELEASE] [--wheel FILE | --tree DIR]."""
    tool(session, "apply")


@nox.session
def export(session: nox.Session) -> None:
    """Give the fixes to a fork, as mboxes, a git bundle, or a branch in its clone (--into DIR)."""
    tool(session, "fork")


@nox.session
def verify(session: nox.Session) -> None:
    """Check a patched wheel to the last byte: nox -s verify -- WHEEL."""
    tool(session, "verify")


@nox.session
def lock(session: nox.Session) -> None:
    """Pin a release, or check its pins: nox -s lock -- [RELEASE...]."""
    tool(session, "lock")


@nox.session
def edit(session: nox.Session) -> None:
    """Change one fix: nox -s edit -- RELEASE FIX, then --continue or --abort."""
    tool(session, "edit")


@nox.session
def rebase(session: nox.Session) -> None:
    """Carry the fixes to another release: nox -s rebase -- RELEASE, then --continue or --skip."""
    tool(session, "rebase", group="lint")


@nox.session
def track(session: nox.Session) -> None:
    """Carry the fixes to releases that are new on the index; fails where a person is needed."""
    install(session, "lint")
    # 32: carried, the branch is ready. nox itself only knows 0 and 1; dist/track.json tells.
    session.run("python", "-m", "scripts.track", *session.posargs, success_codes=[0, 32])


@nox.session
def replay(session: nox.Session) -> None:
    """Carry the fixes to each release as if it were new, and count what comes out."""
    tool(session, "replay", group="lint")


@nox.session
def lint(session: nox.Session) -> None:
    """Check code, patches, registry, and that every release has what the overlay uses."""
    tool(session, "lint", group="lint")


@nox.session
def tests(session: nox.Session) -> None:
    """Test the tools, then the overlay on an installed patched vLLM of the default release."""
    install(session, "tests")
    if not session.posargs:
        session.run("python", "-m", "pytest", "tests/scripts")
    session.run("python", "-m", "scripts.overlay_tests", *session.posargs)


@nox.session
def regressions(session: nox.Session) -> None:
    """Show each defect on the stock release and its absence on the patched one."""
    tool(session, "regressions")


@nox.session
def parity(session: nox.Session) -> None:
    """Compare patched with stock where stock is right: nox -s parity -- [RELEASE...] [-k NAME]."""
    tool(session, "parity")


@nox.session
def status(session: nox.Session) -> None:
    """Say where each fix stands on each release: nox -s status -- [--prove [RELEASE...]]."""
    tool(session, "status")


@nox.session
def matrix(session: nox.Session) -> None:
    """Print what CI runs the regressions on, as JSON."""
    tool(session, "ci_matrix")


@nox.session
def upstream_tests(session: nox.Session) -> None:
    """Run upstream's own tests, stock against patched: nox -s upstream_tests -- [RELEASE]."""
    tool(session, "upstream_tests")


@nox.session
def soak(session: nox.Session) -> None:
    """Drive the receive's state machine for 100,000 steps, stock and patched."""
    tool(session, "soak")


@nox.session
def pd(session: nox.Session) -> None:
    """Show each defect in a real P/D deployment: nox -s pd -- [RELEASE] [-k EXPR] [--side SIDE]."""
    tool(session, "pd", group="pd")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what `apply` costs, and what the patched worker costs where nothing fails."""
    tool(session, "bench", group="bench")
