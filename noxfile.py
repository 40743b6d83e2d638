"""The gate: `nox` builds the wheel once and tests what a user would install. `nox -s core` is the quick loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "core", "oldest"]

PROJECT = nox.project.load_toml("pyproject.toml")
SOURCES = ["src", "tests", "noxfile.py"]
DIST = Path(".nox") / "dist"
built: list[str] = []


def wheel(session: nox.Session) -> str:
    """The wheel of this tree, built by the first session that asks."""
    if not built:
        shutil.rmtree(DIST, ignore_errors=True)
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(DIST), ".")
        built.append(str(next(DIST.glob("gradclip-*.whl")).resolve()))
    return built[0]


def group(name: str) -> list[str]:
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def lint(session: nox.Session) -> None:
    session.install(*group("lint"))
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("ruff", "check", *SOURCES)


@nox.session
def types(session: nox.Session) -> None:
    session.install("nox", f"{wheel(session)}[cli]", *group("lint"))
    session.run("mypy")


@nox.session
def core(session: nox.Session) -> None:
    session.install(f"{wheel(session)}[cli]", *group("test"))
    session.run("pytest", "--numprocesses=2", *session.posargs)
    session.run("pytest", "--doctest-modules", "--pyargs", "gradclip", "--doctest-glob=README.md", "README.md")


@nox.session
def oldest(session: nox.Session) -> None:
    """The oldest NumPy that is promised."""
    session.install(f"{wheel(session)}[cli]", *group("test"), "numpy==1.26.*")
    session.run("pytest", "--numprocesses=2", *session.posargs)
