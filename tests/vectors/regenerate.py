"""Runs the references that pip can install over inputs.json and compares with what was recorded of them.

`nox -s references` gives it the environment. What no package holds was recorded once, from sources: `ONCE`. A difference
beyond TOLERANCE, or a package of another version than was recorded, is an error.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import torch
from autoclip.torch import QuantileClip
from pytorch_optimizer.optimizer.adagc import AdaGC
from zclip import ZClip

HERE = Path(__file__).parent
TOLERANCE = 1e-6
ONCE = {
    "agc_dreamerv3__c0.3": "dreamerv3 is no package",
    "autoclip_pseeth__p10": "pseeth/autoclip is no package",
    "icefall_median__period100": "icefall is no package",
    "behaviour_levelshift_spike": "a comparison of behaviour, of several packages",
}


def numbers(values):
    """Recorded numbers, of which those that are not finite are strings."""
    if isinstance(values, dict):
        return {name: numbers(value) for name, value in values.items()}
    return np.array([numbers(x) for x in values], np.float32) if isinstance(values, list) else float(values)


INPUTS = json.loads((HERE / "inputs.json").read_text())
PARAMS = numbers(INPUTS["params"])


def steps(run):
    for t, recorded in enumerate(INPUTS["S3"] if run == "S3" else INPUTS["S1"]):
        yield numbers(INPUTS["S2_overrides"].get(str(t), recorded) if run == "S2" else recorded)


class Model(torch.nn.Module):
    """The parameters, for what takes a model."""

    def __init__(self):
        super().__init__()
        for name, value in PARAMS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def take(self, grads):
        for name, p in self.named_parameters():
            p.grad = torch.tensor(grads[name])

    def grads(self):
        return {name: p.grad.numpy().copy() for name, p in self.named_parameters()}


def zclip(hyper):
    model, clipper = Model(), ZClip(**hyper)

    def step(grads):
        model.take(grads)
        norm = clipper.step(model)
        return {"out": model.grads(), "ret": norm, "mean": clipper.mean, "var": clipper.var}

    return step


def autoclip(hyper):
    model = Model()
    clipper = QuantileClip(model.parameters(), **hyper)

    def step(grads):
        model.take(grads)
        clipper.step()
        return {"out": model.grads()}

    return step


def adagc(hyper):
    """Its first moment is the clipped gradient, since betas[0] is 0."""
    model = Model()
    optimizer = AdaGC(model.parameters(), **hyper)

    def step(grads):
        model.take(grads)
        optimizer.step()
        state = {name: optimizer.state[p] for name, p in model.named_parameters()}
        return {
            "out": {name: of["exp_avg"].numpy().copy() for name, of in state.items()},
            "gamma": {name: of["gamma"].item() for name, of in state.items()},
        }

    return step


def timm_agc(hyper):
    """By its file: the package itself wants torchvision."""
    place = Path(importlib.util.find_spec("timm").submodule_search_locations[0]) / "utils" / "agc.py"
    spec = importlib.util.spec_from_file_location("agc", place)
    spec.loader.exec_module(agc := importlib.util.module_from_spec(spec))
    model = Model()

    def step(grads):
        model.take(grads)
        agc.adaptive_clip_grad(model.parameters(), **hyper)
        return {"out": model.grads()}

    return step


def transformed(make):
    """A transformation of optax, on arrays whose last axis is the outputs'."""

    def reference(hyper):
        transform, params = make(**hyper), outputs_last(PARAMS)
        state = transform.init(params)

        def step(grads):
            nonlocal state
            out, state = transform.update(outputs_last(grads), state, params)
            return {"out": outputs_first(out)}

        return step

    return reference


def outputs_last(tree):
    return {name: jnp.moveaxis(jnp.array(x), [0, 1], [-1, -2]) if x.ndim > 1 else jnp.array(x) for name, x in tree.items()}


def outputs_first(tree):
    return {name: np.asarray(jnp.moveaxis(x, [-1, -2], [0, 1]) if x.ndim > 1 else x) for name, x in tree.items()}


def skips(hyper):
    def step(grads):
        large, said = optax.skip_large_updates(grads, 0, None, **hyper)
        lost, counted = optax.skip_not_finite(grads, 0, None)
        return {
            "skip_large": large,
            "norm_squared": said["norm_squared"],
            "skip_nonfinite": lost,
            "num_not_finite": counted["num_not_finite"],
        }

    return step


REFERENCES = {
    "adagc_pytorch_optimizer__w10": ("pytorch-optimizer", adagc),
    "agc_optax__c0.01": ("optax", transformed(optax.adaptive_grad_clip)),
    "agc_timm__c0.01": ("timm", timm_agc),
    "autoclip_pypi__quantile_global": ("autoclip", autoclip),
    "block_rms_optax__0.1": ("optax", transformed(optax.clip_by_block_rms)),
    "block_rms_optax__1.0": ("optax", transformed(optax.clip_by_block_rms)),
    "normalize_optax__1.0": ("optax", transformed(optax.normalize_by_update_norm)),
    "skip_optax__25": ("optax", skips),
    "zclip__adaptive_nomax": ("zclip", zclip),
    "zclip__default": ("zclip", zclip),
    "zclip__mean_nomax": ("zclip", zclip),
    "zclip__percentile_nomax": ("zclip", zclip),
}


def norm64(x):
    return np.linalg.norm(x.astype(np.float64))


def difference(ours, recorded):
    """The largest difference, by the largest number recorded; inf where one is finite and the other is not."""
    a, b = (np.atleast_1d(np.asarray(x, np.float64)) for x in (ours, recorded))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))


def differences(row, grads, made):
    """One for every tensor and number of a step."""
    made = dict(made)
    if "out" in made:
        with np.errstate(invalid="ignore"):
            made["coef"] = {name: norm64(x) / norm64(grads[name]) for name, x in made["out"].items()}
    for field, value in made.items():
        recorded = row.get(field)
        if recorded is None:
            continue
        if isinstance(value, dict):
            yield from (difference(value[name], numbers(recorded[name])) for name in value)
        else:
            yield difference(value, numbers(recorded))


def compared(name, package, reference):
    """Largest difference and how many there were."""
    recorded = json.loads((HERE / f"{name}.json").read_text())
    if recorded["versions"][package] != version(package):
        raise SystemExit(f"{name} was recorded with {package} {recorded['versions'][package]}; this is {version(package)}")
    found = []
    for run, rows in recorded["runs"].items():
        step, by_time = reference(recorded["hyper"]), {row["t"]: row for row in rows}
        for t, grads in enumerate(steps(run)):
            made = step(grads)
            found += differences(by_time[t], grads, made) if t in by_time else ()
    return max(found), len(found)


def main():
    there = {path.stem for path in HERE.glob("*.json")} - {"inputs"}
    if unknown := there - set(REFERENCES) - set(ONCE):
        raise SystemExit(f"nothing regenerates {', '.join(sorted(unknown))}")
    worst = 0.0
    for name, (package, reference) in REFERENCES.items():
        largest, count = compared(name, package, reference)
        worst = max(worst, largest)
        print(f"{name:34} {package} {version(package):8} {count:5} numbers and tensors, largest difference {largest:.1e}")
    for name, why in ONCE.items():
        print(f"{name:34} recorded once: {why}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
