"""A character-level recurrent network, and its gradient written by hand."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = Any
HIDDEN = 128
SLOPE = 0.4  # of the activation below 0
RADIUS = 1.1  # of the recurrent matrix: what the network remembers grows, and so does its gradient


class Network(NamedTuple):
    """The weights, or their gradient: h ← leaky_relu(inputs[x] + h · recurrent + bias), then softmax(h · outputs + offset)."""

    inputs: Array  # [kinds, hidden]
    recurrent: Array  # [hidden, hidden]
    bias: Array  # [hidden]
    outputs: Array  # [hidden, kinds]
    offset: Array  # [kinds]

    def stepped(self, grads: Network, rate: float) -> Network:
        """Weights one step of gradient descent further."""
        return Network(*(weights - rate * grad for weights, grad in zip(self, grads, strict=True)))


def fresh(frequencies: Array, rng: np.random.Generator, dtype: Any = np.float32, hidden: int = HIDDEN) -> Network:
    """A network that knows how frequent each character is, and nothing of their order."""
    kinds = len(frequencies)
    network = Network(
        inputs=rng.normal(size=(kinds, hidden)),
        recurrent=RADIUS * np.linalg.qr(rng.normal(size=(hidden, hidden)))[0],
        bias=np.zeros(hidden),
        outputs=rng.normal(size=(hidden, kinds)) / math.sqrt(hidden),
        offset=np.log(frequencies),
    )
    return Network(*(weights.astype(dtype) for weights in network))


def loss_and_gradient(network: Network, codes: Array) -> tuple[float, Network]:
    """The mean loss in nats of each next character, and its gradient; codes: [length + 1, batch]."""
    with np.errstate(all="ignore"):
        seen, due = codes[:-1], codes[1:]
        states = _states(network, seen)
        loss, errors = _loss_and_errors(states[1:] @ network.outputs + network.offset, due)
        deltas = _deltas(network, states[1:], errors @ network.outputs.T)
        return loss, _gradient(network, seen, states, deltas, errors)


def _states(network: Network, seen: Array) -> Array:
    """What the network remembers before the first character and after each: [length + 1, batch, hidden]."""
    drive = network.inputs[seen] + network.bias
    states = np.zeros((len(seen) + 1, *drive.shape[1:]), drive.dtype)
    for step in range(len(seen)):
        total = states[step] @ network.recurrent + drive[step]
        np.maximum(total, SLOPE * total, out=states[step + 1])
    return states


def _loss_and_errors(logits: Array, due: Array) -> tuple[float, Array]:
    """The mean loss, and its derivative by the logits: [length, batch, kinds]."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    odds = np.exp(logits)
    totals = odds.sum(axis=-1, keepdims=True)
    index = due[..., None]
    loss = np.mean(np.log(totals) - np.take_along_axis(logits, index, -1), dtype=np.float64)
    errors = odds / totals
    np.put_along_axis(errors, index, np.take_along_axis(errors, index, -1) - 1, -1)
    return float(loss), errors / due.size


def _deltas(network: Network, after: Array, deltas: Array) -> Array:
    """The derivative by what enters the activation, from the last step back: [length, batch, hidden]."""
    slopes = np.where(after > 0, 1, SLOPE).astype(after.dtype)
    back = network.recurrent.T.copy()
    deltas[-1] *= slopes[-1]
    for step in range(len(deltas) - 2, -1, -1):
        deltas[step] += deltas[step + 1] @ back
        deltas[step] *= slopes[step]
    return deltas


def _gradient(network: Network, seen: Array, states: Array, deltas: Array, errors: Array) -> Network:
    marks = np.eye(len(network.offset), dtype=deltas.dtype)[seen]
    return Network(
        inputs=_summed(marks, deltas),
        recurrent=_summed(states[:-1], deltas),
        bias=deltas.sum(axis=(0, 1)),
        outputs=_summed(states[1:], errors),
        offset=errors.sum(axis=(0, 1)),
    )


def _summed(left: Array, right: Array) -> Array:
    """Σ leftᵀ · right over the steps, in products that are too small for a BLAS to start threads for."""
    total = np.zeros((left.shape[-1], right.shape[-1]), left.dtype)
    for a, b in zip(left, right, strict=True):
        total += a.T @ b
    return total
