"""The gate: `nox` builds the wheel once and tests what a user would install. `nox -s core` is the quick loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nox
from nox.command import CommandFailed

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "core", "oldest", "pure", "sanitize", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
SOURCES = ["src", "tests", "examples", "noxfile.py"]
DIST = Path(".nox") / "dist"
NO_COMPILER = {"CC": "/nonexistent", "CXX": "/nonexistent"}


class Framework(NamedTuple):
    """A framework in the version that is promised, in an environment of its own."""

    packages: list[str]
    faces: tuple[str, ...] = ()  # modules of gradclip.integrations, whose examples run
    pages: tuple[str, ...] = ()  # of docs/, likewise
    keras: str | None = None  # the name by which Keras knows it, whose face runs on it too


FRAMEWORKS = {
    "jax": Framework(["jax==0.10.2", "optax==0.2.8", "flax", "orbax-checkpoint", "keras==3.15.*"], ("optax",), ("jax",), "jax"),
    "mindspore": Framework(["mindspore==2.10.*", "numpy<2"], ("mindspore",), ("mindspore",)),
    "mlx": Framework(["mlx[cpu]==0.32.*"], (), ("mlx",)),
    "paddle": Framework(["paddlepaddle==3.3.1"], ("paddle",), ("paddle",)),
    "tensorflow": Framework(["tensorflow-cpu==2.21.*", "keras==3.15.*"], ("keras",), ("tensorflow",), "tensorflow"),
    "torch": Framework(["torch==2.13.0", "keras==3.15.*"], ("torch",), ("pytorch", "distributed"), "torch"),
}
FRAMEWORK_ONLY = ("integrations", *(f"{form}.py" for name in FRAMEWORKS for form in (name, f"_{name}_*")))
RANK_ONLY = ("verify/layouts.py", "verify/rank.py")  # they run on torch.distributed
REFERENCES = [  # of the vectors in tests/vectors, in the versions that these were recorded with
    "autoclip==0.2.1",
    "jax==0.10.2",
    "optax==0.2.8",
    "pytorch-optimizer==4.1.0",
    "torch==2.13.0",
    "zclip==1.0.0",
]
PRELOADED = ["libasan.so", "libstdc++.so.6"]
built: dict[str, str] = {}


def tried_again(session: nox.Session, download: Callable[[], object]) -> None:
    """Three times at most, since pip gives up at a download that breaks off."""
    for left in (2, 1, 0):
        try:
            download()
        except CommandFailed:
            if not left:
                raise
            session.warn(f"that did not work; tried again, {left} more at most")
        else:
            return


def install(session: nox.Session, *wanted: str, env: dict[str, str] | None = None) -> None:
    """These packages in the session's environment."""
    tried_again(session, lambda: session.install(*wanted, env=env))


def wheel(session: nox.Session, name: str = "native", env: dict[str, str] | None = None) -> str:
    """The wheel of this tree, built by the first session that asks."""
    if name not in built:
        folder = DIST / name
        shutil.rmtree(folder, ignore_errors=True)
        words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
        tried_again(session, lambda: session.run("python", "-m", "pip", *words, env=env))
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
    install(session, *group("lint"))
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("ruff", "check", *SOURCES)


@nox.session
def types(session: nox.Session) -> None:
    install(session, "nox", f"{wheel(session)}[cli]", *group("lint"))
    session.run("mypy")


@nox.session
def core(session: nox.Session) -> None:
    install(session, f"{wheel(session)}[cli]", *group("test"))
    session.run("pytest", "--numprocesses=2", *native_tests(session), *session.posargs)
    of_frameworks = [f"--ignore-glob=*/{name}" for name in (*FRAMEWORK_ONLY, *RANK_ONLY)]
    session.run("pytest", "--doctest-modules", "--pyargs", "gradclip", "--doctest-glob=README.md", "README.md", *of_frameworks)


@nox.session
@nox.parametrize("framework", [nox.param(name, id=name) for name in FRAMEWORKS])
def tests(session: nox.Session, framework: str) -> None:
    """One framework: every rule in every mode that it has, its faces, its page of the documentation, its examples."""
    packages, faces, pages, keras = FRAMEWORKS[framework]
    install(session, f"{wheel(session)}[cli]", *packages, *group("test"))
    session.run("pytest", "--numprocesses=2", "tests/frameworks", f"--framework={framework}", *session.posargs)
    if keras:
        there = {"KERAS_BACKEND": keras}
        session.run("pytest", "--numprocesses=2", "tests/frameworks", "--framework=keras", *session.posargs, env=there)
        session.run("pytest", "--doctest-glob=docs/*.md", "docs/keras.md", env=there)
    documents = [f"docs/{page}.md" for page in pages]
    modules = [f"gradclip.integrations.{face}" for face in faces]
    session.run("pytest", "--doctest-modules", "--doctest-glob=docs/*.md", *documents, "--pyargs", *modules)


@nox.session
def oldest(session: nox.Session) -> None:
    """The oldest NumPy that is promised."""
    install(session, f"{wheel(session)}[cli]", *group("test"), "numpy==1.26.*")
    session.run("pytest", "--numprocesses=2", *native_tests(session), *session.posargs)


@nox.session
def pure(session: nox.Session) -> None:
    """An install that finds no compiler works, on NumPy alone."""
    install(session, f"{wheel(session, 'pure', NO_COMPILER)}[cli]", *group("test"))
    session.run("python", "-c", "from gradclip import native; assert not native.available")
    session.run("pytest", "--numprocesses=2", "--ignore=tests/test_native.py", *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """The core's own tests under AddressSanitizer and UBSan."""
    compiler = shutil.which("g++")
    if compiler is None:
        session.skip("the sanitizers need g++, and there is none")
    install(session, ".", "--config-settings=cmake.define.GRADCLIP_SANITIZE=ON", *group("test"), env={"CXX": compiler})
    libraries = (session.run(compiler, f"-print-file-name={name}", external=True, silent=True) for name in PRELOADED)
    environment = {
        "LD_PRELOAD": " ".join(str(library).strip() for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    session.run("pytest", "--numprocesses=2", "tests/test_native.py", env=environment)


@nox.session
def references(session: nox.Session) -> None:
    """The recorded vectors once more, by the packages that they are of. Not a part of the gate: these do not change."""
    install(session, *REFERENCES)
    install(session, "--no-deps", "timm==1.0.31")  # one file of it is wanted, and torchvision is not
    session.run("python", "tests/vectors/regenerate.py")
