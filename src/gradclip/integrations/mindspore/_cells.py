"""Clipping as a cell of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Parameter

from ...backends.mindspore import check
from ...rule import Rule
from ...rules import MaxNorm
from ._clip import Clip
from ._measure import Grads


class ClipGradients(Clip):
    """(g, …) → (g · coef, …), with coef = 1 where low ≤ ‖g‖ₚ ≤ high or the norm is 0, else bound / ‖g‖ₚ.

    A tuple of gradients in, a tuple of the same shapes and types out; the norm is computed in float32 at least. Goes wherever
    a cell goes: PyNative and Graph mode, `mindspore.jit`, a network or a step of one's own, data sinking.

    Args:
        rule: how large a norm may be. A threshold is a number, a Parameter (which may change from step to step without
            compiling anew), or a function of the step made of operators and NumPy's elementwise functions.
        scope, p: as in `gradclip.clip`.
        nonfinite: "keep" (NaN spreads), "zero" (gradients become 0), "skip" (the same, and `skipped` says not to step).
        loss_scale: what the gradients are still multiplied by; the rule sees them without.
        parameters: the optimizer's, in its order, for rules that compare with the weights or remember each tensor's norm.

    What came of the last call lies in Parameters, to be read between steps, whatever the mode: `norm`, `limit` (the largest
    where there are many) and `coef` (the smallest; 1 in the scope "element"), the flags `clipped`, `finite` and `skipped`, and
    `counts`, which add up: steps, clipped, skipped, nonfinite, as in `gradclip.clipper.Counts`.

    Raises TypeError or ValueError for what cannot be put into a graph: a rule that looks at a value, nonfinite="raise".

    >>> import mindspore as ms
    >>> from gradclip import MaxNorm
    >>> clip = ClipGradients(MaxNorm(1.0))
    >>> clip((ms.Tensor([3.0, 4.0]),))
    (Tensor(shape=[2], dtype=Float32, value= [ 6.00000024e-01,  8.00000012e-01]),)
    >>> float(clip.norm), bool(clip.clipped)
    (5.0, True)
    """

    def __init__(
        self,
        rule: Rule,
        *,
        scope: str | None = None,
        p: float = 2,
        nonfinite: str = "keep",
        loss_scale: float = 1.0,
        parameters: Sequence[Parameter] | None = None,
    ) -> None:
        Clip.__init__(self, rule, scope, p, nonfinite, loss_scale, parameters)

    @classmethod
    def from_type(cls, clip_type: int, clip_value: float) -> ClipGradients:
        """By MindSpore's customary codes: 0 clips by value, 1 each tensor by its own norm, anything else nothing.

        >>> import mindspore as ms
        >>> ClipGradients.from_type(0, 1.0)((ms.Tensor([3.0, -0.5]),))
        (Tensor(shape=[2], dtype=Float32, value= [ 1.00000000e+00, -5.00000000e-01]),)
        """
        if clip_type == 0:
            return cls(MaxNorm(clip_value), scope="element")
        if clip_type == 1:
            return cls(MaxNorm(clip_value), scope="tensor")
        return cls(MaxNorm(float("inf")))

    def __call__(self, grads: Grads) -> Any:
        return super().__call__(checked(grads))

    def construct(self, grads: Grads) -> Grads:
        new: Grads = self.clip(grads)[0]
        return new


def checked(grads: Any) -> Grads:
    """The gradients, if they are what a graph takes; TypeError with what to do."""
    if not isinstance(grads, tuple):
        raise TypeError(
            f"gradients must be a tuple of Tensors, as mindspore.value_and_grad gives them: pass tuple(grads); got "
            f"a {type(grads).__name__}"
        )
    if not grads:
        raise ValueError("there are no gradients: mindspore.value_and_grad takes weights=optimizer.parameters")
    for i, grad in enumerate(grads):
        kind = type(grad)
        if "mindspore" not in {base.__module__.partition(".")[0] for base in kind.__mro__}:
            raise TypeError(f"gradient {i} is a {kind.__module__}.{kind.__qualname__}, and must be a mindspore.Tensor")
        check(grad, f"gradient {i}")
    return grads
