"""The divergences that are known, and what causes them; one that is not here is shown as new."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A cause, and where it shows: in which functions, in which cases."""

    functions: tuple[str, ...]
    cases: tuple[str, ...]
    cause: str


EPS = ("clip_grad_norm_", "clip_grad_norm_ of each", "optimizers.clip_grad_norm")
SMALL = ("(6e-8, 8e-8) at its norm", "(3e-7, 4e-7) below 1e-6")
SQUARES = ("100 of 1e20", "4 of 1e-25")
HALVES = ("1000 of 300, float16", "1000 of 60000, float16", "1000 of 300, bfloat16")
DOCUMENTS = ("g * c / sqrt(sum(square(g)))", "the same over all")

KNOWN = [
    Known(EPS, (*SMALL, "random float64"), "divides by norm + 1e-6, and so clips what is within the limit"),
    Known(
        (*EPS, *DOCUMENTS),
        SQUARES,
        "squares in float32: 1e20² is inf and the coefficient 0, (1e-25)² is 0 and nothing is clipped",
    ),
    Known(
        ("clip_grad_norm_", "clip_grad_norm_ of each"),
        ("1000 of 60000, float16",),
        "the norm is rounded to float16, whose largest is 65504",
    ),
    Known(
        ("clip_grad_norm_", "clip_grad_norm_ of each"),
        ("2^22 of 0.1",),
        "the norm is summed in float32 one after another, 0.2 % off",
    ),
    Known(DOCUMENTS, ("a NaN",), "a NaN norm compares as false: every gradient passes unclipped"),
    Known(DOCUMENTS, (*HALVES, "random float16", "random bfloat16"), "squares and sums in the gradients' own type"),
    Known(("tf.clip_by_norm", "tf.clip_by_global_norm"), ("zeros",), "0 / 0 where the norm is 0 and the limit is not reached"),
    Known(
        ("tf.clip_by_global_norm",),
        ("100 of 1e20", "1000 of 300, float16", "1000 of 60000, float16", "an inf"),
        "a norm that is not finite makes all gradients NaN, by design",
    ),
    Known(("tf.clip_by_global_norm", "tf.clip_by_norm"), SQUARES, "squares in float32"),
    Known(("tf.clip_by_norm",), ("1000 of 300, float16", "1000 of 60000, float16"), "squares in float16"),
    Known(
        ("tf.clip_by_norm", "tf.clip_by_global_norm"),
        ("random bfloat16", "1000 of 300, bfloat16", "random float16"),
        "sums and multiplies in the gradients' own type",
    ),
    Known(
        ("tf.clip_by_global_norm",),
        ("41 times (0.01, 0.02), below",),
        "multiplies by limit · (1 / limit), which is not always 1",
    ),
    Known(("optax.clip_by_global_norm",), SQUARES, "squares in float32"),
    Known(("optax.clip_by_global_norm",), HALVES, "squares and sums in the gradients' own type"),
    Known(("optimizers.clip_grad_norm",), ("1000 of 300, bfloat16", "random bfloat16"), "sums and multiplies in bfloat16"),
    Known(("optimizers.clip_grad_norm",), ("2^22 of 0.1",), "the norm is summed in float32 one after another"),
    Known(("ops.clip_by_global_norm",), ("a NaN",), "a NaN norm compares as false: every gradient passes unclipped"),
    Known(("nn.ClipByNorm",), (*SMALL, "4 of 1e-25"), "norms below 1e-3 are taken for 1e-3"),
    Known(("nn.ClipByNorm",), ("a NaN",), "a NaN norm compares as false: the gradient passes unclipped"),
    Known(("nn.ClipByNorm",), ("2^22 of 0.1",), "the norm is summed in float32 one after another"),
    Known(("nn.ClipByNorm", "ops.clip_by_global_norm"), ("100 of 1e20", "4 of 1e-25"), "squares in float32"),
    Known(("ops.clip_by_global_norm",), HALVES, "squares in float16"),
    Known(("ops.clip_by_value",), ("a NaN",), "NaN becomes the lower bound"),
    Known(("ClipGradByGlobalNorm", "ClipGradByNorm"), SQUARES, "squares in float32"),
]


def cause_of(function: str, case: str) -> str | None:
    """Why this function differs in this case, if it is known."""
    return next((known.cause for known in KNOWN if function in known.functions and case in known.cases), None)
