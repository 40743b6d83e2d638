"""One of several processes: `python -m gradclip.cli.verify.rank RANK SIZE STORE OUT [LAYOUT P]` writes what it found."""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ... import MaxNorm, clip_, norm
from ...integrations.torch import Joined, Layout, clip_grad_norm_
from .layouts import LAYOUTS, ORDERS, STOPS_TORCH, Ranks, Spread

Array = Any
SLOW = timedelta(seconds=60)  # what a busy machine may take until all ranks have joined a collective
PATIENCE = timedelta(seconds=6)  # after which one ends in an error that others are known not to join
CLOSE = 1e-6


def main() -> None:
    """All layouts; or torch's function on the one that is named, which may take the process group down."""
    rank, size, store, out, *one = sys.argv[1:]
    torch.set_num_threads(1)  # the ranks share the machine
    wait = PATIENCE if one else SLOW
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=wait)
    ranks = Ranks(int(rank), int(size))
    if one:
        found = [{"layout": one[0], "p": one[1], "ours": None, "theirs": _theirs(one[0], float(one[1]), ranks)}]
    else:
        found = [_row(layout, p, ranks) for layout in LAYOUTS for p in ORDERS]
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    if not one:
        dist.destroy_process_group()


def _row(layout: str, p: float, ranks: Ranks) -> dict[str, Any]:
    """What this rank found of one layout."""
    alone = (layout, p) in STOPS_TORCH
    return {
        "layout": layout,
        "p": str(p),
        "ours": _ours(layout, p, ranks),
        "theirs": None if alone else _theirs(layout, p, ranks),
    }


def _ours(layout: str, p: float, ranks: Ranks) -> dict[str, Any]:
    spread = LAYOUTS[layout](ranks)
    want = _truth(spread.whole, p)
    before = {
        name: None if x.grad is None else _here(x.grad).clone() for name, x in spread.named.items() if not _partial(x.grad)
    }
    try:
        with CommDebugMode() as counting:
            found = _measured(spread, p)
        _clipped(spread, p, 1.0 if math.isnan(want) else want / 2)
    except Exception as error:  # whatever it is, it is ours
        return {"ok": False, "said": _line(error), "norm": None, "collectives": 0}
    off = _off(found, want)
    scaled = math.isnan(want) or all(_scaled(spread.named[name].grad, x) for name, x in before.items())
    return {
        "ok": off <= CLOSE and scaled,
        "norm": found.hex(),
        "error": off if math.isfinite(off) else None,
        "collectives": counting.get_total_counts(),
        "said": "" if off <= CLOSE else f"{found:.6g} for {want:.6g}",
    }


def _joined(spread: Spread) -> Joined | None:
    return None if spread.pieces is None else Layout(spread.pieces).over(spread.named)


def _measured(spread: Spread, p: float) -> float:
    joined = _joined(spread)
    if joined is None:
        return float(clip_grad_norm_(spread.named.values(), math.inf, p))
    return float(norm(joined.gradients(), p))


def _clipped(spread: Spread, p: float, limit: float) -> None:
    joined = _joined(spread)
    if joined is None:
        clip_grad_norm_(spread.named.values(), limit, p)
    else:
        clip_(joined.gradients(), MaxNorm(limit), p=p, nonfinite="keep")


def _theirs(layout: str, p: float, ranks: Ranks) -> dict[str, Any]:
    """What torch's own function makes of it: the norm that this rank is told, or the error."""
    spread = LAYOUTS[layout](ranks)
    want = _truth(spread.whole, p)
    try:
        with CommDebugMode() as counting:
            found = torch.nn.utils.clip_grad_norm_(spread.named.values(), 1.0 if math.isnan(want) else want / 2, p)
        value = _here(found).item()
    except Exception as error:  # a framework's own errors are of many kinds
        return {"kind": "raises", "said": _line(error), "collectives": 0}
    off = _off(value, want)
    said = "" if off <= 1e-3 else f"{value:.6g} for {want:.6g}"
    return {"kind": "wrong" if said else "right", "said": said, "collectives": counting.get_total_counts()}


def _truth(whole: list[Array], p: float) -> float:
    values = np.abs(np.concatenate([x.ravel() for x in whole]))
    peak = values.max()
    if p == math.inf or math.isnan(peak):
        return float(peak)
    return float(peak * ((values / peak) ** p).sum() ** (1 / p))


def _off(found: float, want: float) -> float:
    if math.isnan(want):
        return 0.0 if math.isnan(found) else math.inf
    return abs(found - want) / want


def _here(x: Any) -> Tensor:
    return x.to_local().detach() if isinstance(x, DTensor) else x


def _partial(x: Any) -> bool:
    return isinstance(x, DTensor) and any(placement.is_partial() for placement in x.placements)


def _scaled(grad: Any, before: Tensor | None) -> bool:
    """Is it half of what it was, to the precision of its type?"""
    if before is None or grad is None:
        return before is None and grad is None
    close = 4 * torch.finfo(before.dtype).eps
    return bool(torch.allclose(_here(grad).double(), before.double() / 2, rtol=close, atol=0))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


if __name__ == "__main__":
    main()
