"""Who imports whom: arrows point down only, and a framework is imported where it belongs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradclip

PACKAGE = Path(gradclip.__file__).parent
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}

ALLOWED = {
    "__init__": {"native", "call", "clip", "clipped", "clipper", "combinations", "layout", "nonfinite", "rules"},
    "conventions": set(),
    "rule": {"conventions"},
    "rules": {"conventions", "published", "rule"},
    "published": {"rule"},
    "combinations": {"rule", "rules"},
    "layout": {"backends", "rule"},
    "measure": {"backends", "layout", "rule"},
    "nonfinite": {"backends"},
    "clipped": {"backends"},
    "call": {"layout", "measure", "nonfinite", "rule"},
    "step": {"backends", "call", "clipped", "conventions", "layout", "rule"},
    "eager": {"backends", "clipped", "measure", "nonfinite", "step"},
    "traced": {"backends", "clipped", "eager", "nonfinite", "rule", "step"},
    "clip": {"backends", "call", "clipped", "eager", "layout", "measure", "rule", "rules", "step", "traced"},
    "clipper": {"backends", "call", "clip", "clipped", "layout", "measure", "rule"},
    "backends/__init__": {"backends/numpy", "backends/torch", "backends/_protocol", "backends/_tree"},
    "backends/_blocks": set(),
    "backends/_overlap": set(),
    "backends/_protocol": set(),
    "backends/_tree": set(),
    "backends/native": {"native", "native/_core"},
    "backends/_powers": {"backends/_blocks", "backends/native"},
    "backends/numpy": {"backends/_blocks", "backends/_overlap", "backends/_powers", "backends/native"},
    "native/__init__": {"native/_core"},
}
FRAMEWORK = {f"backends/{name}" for name in ("_blocks", "_overlap", "_powers", "_tree", "native", "numpy")}
FRAMEWORKS = {"torch", "mindspore", "paddle", "jax", "jaxlib", "optax", "tensorflow", "keras", "mlx"}
CLI_PACKAGES = {"typer", "rich", "matplotlib", "safetensors", "ml_dtypes"}


def imports(source, module):
    """The package's own modules and the foreign packages that a source imports."""
    own, foreign = set(), set()
    here = [*module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            foreign |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            foreign.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] + (node.module.split(".") if node.module else [])
            own |= {"/".join(base)} if node.module else {"/".join([*base, name.name]) for name in node.names}
    return {name for name in own if name}, foreign


def belongs(module, framework):
    """Is it this framework's backend, or a part of it, `_torch_shares` of `torch`?"""
    return module == f"backends/{framework}" or module.startswith(f"backends/_{framework}_")


def allowed_to_a_backend(module):
    """Besides what all backends use, the parts of its own framework's; a part does not import the whole."""
    framework = module.removeprefix("backends/").strip("_").partition("_")[0]
    return FRAMEWORK | {part for part in MODULES if belongs(part, framework)} - {f"backends/{framework}"}


def faults(source, module):
    own, foreign = imports(source, module)
    wrong = []
    if module.startswith("integrations/"):
        package = "/".join(module.split("/")[:2])
        wrong += [name for name in own if name.startswith(("integrations/", "cli/")) and not name.startswith(package)]
    elif module.startswith("cli/"):
        wrong += [
            name for name in own if name.startswith("integrations/") and "benchmarks" not in module and "verify" not in module
        ]
    else:
        wrong += sorted(own - ALLOWED.get(module, allowed_to_a_backend(module) if module.startswith("backends/") else set()))
    if not module.startswith("integrations/") and not module.startswith(("cli/verify", "cli/benchmarks/")):
        wrong += sorted(name for name in foreign & FRAMEWORKS if not belongs(module, name))
    if not module.startswith("cli/"):
        wrong += sorted(foreign & CLI_PACKAGES)
    if "numpy" in foreign and not module.startswith(("backends/", "cli/", "integrations/")):
        wrong.append("numpy")
    return wrong


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows_point_down(module):
    assert faults(MODULES[module].read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("source", "module", "fault"),
    [
        ("from .clip import clip", "rules", "clip"),
        ("def f():\n    from .cli import main", "clip", "cli"),
        ("from ..clip import clip", "backends/numpy", "clip"),
        ("import torch", "backends/jax", "torch"),
        ("import torch", "backends/torch", None),
        ("import torch", "backends/_torch_shares", None),
        ("from ._torch_shares import local", "backends/torch", None),
        ("from ._torch_shares import local", "backends/_torch_norms", None),
        ("from ._torch_shares import local", "backends/paddle", "backends/_torch_shares"),
        ("from .torch import where", "backends/_torch_norms", "backends/torch"),
        ("import torch", "backends/_blocks", "torch"),
        ("import numpy as np", "clip", "numpy"),
        ("from rich import print", "clipper", "rich"),
    ],
)
def test_the_test_of_the_arrows_can_fail(source, module, fault):
    assert faults(source, module) == ([fault] if fault else [])


HEAVY = """
import sys
import {package}
heavy = sorted({{name.partition(".")[0] for name in sys.modules}} & set({names!r}))
print(*heavy)
"""


def loaded_by(package):
    names = sorted(FRAMEWORKS | CLI_PACKAGES | {"pytest", "hypothesis", "scipy", "pandas"})
    code = HEAVY.format(package=package, names=names)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_importing_gradclip_loads_numpy_and_nothing_heavier():
    assert loaded_by("gradclip") == []


def test_the_test_of_the_import_can_fail():
    assert loaded_by("hypothesis") == ["hypothesis"]


TIMES = """
import time
times = [time.process_time()]
import numpy
times.append(time.process_time())
import gradclip
times.append(time.process_time())
print((times[2] - times[1]) / (times[1] - times[0]))
"""


def test_importing_gradclip_takes_less_than_half_of_what_numpy_takes():
    """NumPy has to be there in any case, and is a measure that the machine does not change."""
    ratios = [float(subprocess.check_output([sys.executable, "-c", TIMES])) for _ in range(7)]
    assert min(ratios) < 0.5
