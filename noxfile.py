"""The gate: `nox` builds the wheel once and tests what a user would install. `nox -s core` is the quick loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "core", "oldest", "pure", "sanitize", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
SOURCES = ["src", "tests", "examples", "noxfile.py"]
DIST = Path(".nox") / "dist"
NO_COMPILER = {"CC": "/nonexistent", "CXX": "/nonexistent"}
FRAMEWORKS = {  # the versions that are promised, each in an environment of its own
    "mlx": ["mlx[cpu]==0.32.*"],
    "torch": ["torch==2.13.0"],
}
OTHERS = ("jax", "jaxlib", "mindspore", "mlx", "paddle", "tensorflow", "torch")  # modules that import a framework
FACES = {"torch": ["torch"]}
PAGES = {"torch": "pytorch"}  # where the page is not named after the package
PRELOADED = ["libasan.so", "libstdc++.so.6"]
built: dict[str, str] = {}


def wheel(session: nox.Session, name: str = "native", env: dict[str, str] | None = None) -> str:
    """The wheel of this tree, built by the first session that asks."""
    if name not in built:
        folder = DIST / name
        shutil.rmtree(folder, ignore_errors=True)
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), ".", env=env)
        built[name] = str(next(folder.glob("gradclip-*.whl")).resolve())
    return built[name]


def native_tests(session: nox.Session) -> list[str]:
    """Nothing where there is a compiler: then the core has to be there, and to pass."""
    if any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return []
    session.warn("no C++ compiler here: the native core is NOT tested")
    return ["--ignore=tests/test_native.py"]


def group(name: str) -> tuple[str, ...]:
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
    session.run("pytest", "--numprocesses=2", *native_tests(session), *session.posargs)
    of_frameworks = [f"--ignore-glob=*/{name}" for name in ("integrations", *(f"{each}.py" for each in OTHERS))]
    session.run("pytest", "--doctest-modules", "--pyargs", "gradclip", "--doctest-glob=README.md", "README.md", *of_frameworks)


@nox.session
@nox.parametrize("framework", [nox.param(name, id=name) for name in FRAMEWORKS])
def tests(session: nox.Session, framework: str) -> None:
    """One framework: every rule in every mode that it has, its faces, its page of the documentation, its examples."""
    session.install(f"{wheel(session)}[cli]", *FRAMEWORKS[framework], *group("test"))
    session.run("pytest", "--numprocesses=2", "tests/frameworks", f"--framework={framework}", *session.posargs)
    faces = [f"gradclip.integrations.{face}" for face in FACES.get(framework, ())]
    page = f"docs/{PAGES.get(framework, framework)}.md"
    session.run("pytest", "--doctest-modules", f"--doctest-glob={page}", page, "--pyargs", *faces)


@nox.session
def oldest(session: nox.Session) -> None:
    """The oldest NumPy that is promised."""
    session.install(f"{wheel(session)}[cli]", *group("test"), "numpy==1.26.*")
    session.run("pytest", "--numprocesses=2", *native_tests(session), *session.posargs)


@nox.session
def pure(session: nox.Session) -> None:
    """An install that finds no compiler works, on NumPy alone."""
    session.install(f"{wheel(session, 'pure', NO_COMPILER)}[cli]", *group("test"))
    session.run("python", "-c", "from gradclip import native; assert not native.available")
    session.run("pytest", "--numprocesses=2", "--ignore=tests/test_native.py", *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """The core's own tests under AddressSanitizer and UBSan."""
    compiler = shutil.which("g++")
    if compiler is None:
        session.skip("the sanitizers need g++, and there is none")
    session.install(".", "--config-settings=cmake.define.GRADCLIP_SANITIZE=ON", *group("test"), env={"CXX": compiler})
    libraries = (session.run(compiler, f"-print-file-name={name}", external=True, silent=True) for name in PRELOADED)
    environment = {
        "LD_PRELOAD": " ".join(str(library).strip() for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    session.run("pytest", "--numprocesses=2", "tests/test_native.py", env=environment)
