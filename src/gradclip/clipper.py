"""`clip` that remembers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from .backends import flatten, host, settled
from .call import as_it_is, resolve
from .clip import clip, init
from .clipped import Clipped
from .layout import Unit
from .measure import Reduce
from .rule import Rule, State, fits

Array = Any
VERSION = 1
UNREAD = 100  # calls whose flags may wait on their device


class Counts(NamedTuple):
    """How many calls there were and what came of them; a call that raised is not among them."""

    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    nonfinite: int = 0

    def plus(self, clipped: Array, finite: Array, skipped: Array) -> Counts:
        """The counts with one more call, whose flags are read now; a step that is left out was not clipped."""
        out = bool(skipped)
        taken = bool(clipped) and not out
        return Counts(self.steps + 1, self.clipped + taken, self.skipped + out, self.nonfinite + (not bool(finite)))


class Clipper:
    """`clip` with everything but the gradients said once, and the rule's state kept between calls.

    `rule` may be replaced between steps: its state goes on where the new one is of the same class. `last` is what the last
    call returned, with a dtype in place of each gradient so that none is kept alive; `counts` says what came of all calls.

    >>> from gradclip import MaxNorm
    >>> clipper = Clipper(MaxNorm(1.0))
    >>> clipper([3.0, 4.0]).grads
    [0.6000000000000001, 0.8]
    >>> clipper.counts
    Counts(steps=1, clipped=1, skipped=0, nonfinite=0)
    """

    def __init__(self, rule: Rule, scope: str | Unit | None = None, p: float = 2, nonfinite: str = "raise") -> None:
        resolve(rule, scope, p, nonfinite)
        self.rule = rule
        self.scope = scope
        self.p = p
        self.nonfinite = nonfinite
        self.last: Clipped | None = None
        self._counts = Counts()
        self._flags: list[tuple[Array, Array, Array]] = []
        self._state: State | None = None
        self._kind = rule.kind()
        self._told = 0

    @as_it_is
    def __call__(self, grads: Any, weights: Any = None) -> Clipped:
        """`clip(grads, rule, …)` with this clipper's state; one that raises changes neither state nor counts."""
        return self.by(clip, grads, weights)

    @as_it_is
    def by(
        self,
        how: Callable[..., Clipped],
        grads: Any,
        weights: Any = None,
        *,
        reduce: Reduce | None = None,
        norm: Array | None = None,
    ) -> Clipped:
        """The same with `clip_`, or another function with the signature of `clip`."""
        grads = settled(grads)
        clipped = how(
            grads,
            self.rule,
            scope=self.scope,
            p=self.p,
            weights=weights,
            state=self._state_for(grads),
            nonfinite=self.nonfinite,
            reduce=reduce,
            norm=norm,
        )
        self._state, self._kind = clipped.state, self.rule.kind()
        self._flags.append((clipped.clipped, clipped.finite, clipped.skipped))
        if len(self._flags) == UNREAD:
            self._read()
        self.last = _without_memory(clipped)
        return clipped

    @property
    def counts(self) -> Counts:
        """What came of all calls; flags that are still on a device are read when it is asked for.

        Warns where the rule took a new level of the norm for granted, after too many clips in a row.
        """
        self._read()
        self._tell()
        return self._counts

    def _tell(self) -> None:
        rebased = None if self._state is None else self.rule.rebased(self._state)
        times = 0 if rebased is None else int(host.field(rebased).sum())
        if times > self._told:
            plural = "s" * (times > 1)
            warnings.warn(
                f"{type(self.rule).__name__} took a new level for granted {times} time{plural}, after too many clips in a row: "
                "has the learning rate, the batch or the loss scale changed?",
                stacklevel=3,
            )
        self._told = times

    def _read(self) -> None:
        flags, self._flags = self._flags, []
        for one in flags:
            self._counts = self._counts.plus(*one)

    def grow(self, grads: Any) -> None:
        """Makes room for tensors that came to the end of the tree; they begin with a fresh state, the others go on."""
        if self._state is not None and any(host.field(entry).ndim for entry in self._state):
            fresh = init(grads, self.rule, self.scope)
            self._state = tuple(host.grown(old, new) for old, new in zip(self._state, fresh, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """State and counts as numbers, lists and strings, for JSON."""
        return self._header() | {
            "state": None if self._state is None else [host.field(x).tolist() for x in self._state],
            "counts": self.counts._asdict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on where `state_dict` was made. ValueError for another version, rule, scope or p; nothing is changed then."""
        if not isinstance(saved, dict):
            raise ValueError(f"this is no state of a Clipper: {saved!r}")
        for name, ours in self._header().items():
            if saved.get(name) != ours:
                raise ValueError(f"this state is of {name} {saved.get(name)!r}, and the clipper of {ours!r}")
        state, counts = _loaded(saved, self.rule)
        self._state, self._counts, self._flags, self._kind = state, counts, [], self.rule.kind()

    def _header(self) -> dict[str, Any]:
        call = resolve(self.rule, self.scope, self.p, self.nonfinite)
        return {
            "version": VERSION,
            "rule": self.rule.kind(),
            "scope": call.scope,
            "p": call.p if math.isfinite(call.p) else "inf",
        }

    def _state_for(self, grads: Any) -> State | None:
        resolve(self.rule, self.scope, self.p, self.nonfinite)  # the rule may have been replaced
        if not self.rule.init(0.0):
            return ()
        goes_on = self._state is not None and self._kind == self.rule.kind() and fits(self.rule, self._state)
        return self._state if goes_on else init(grads, self.rule, self.scope)


def _loaded(saved: dict[str, Any], rule: Rule) -> tuple[State | None, Counts]:
    try:
        counts = Counts(**{name: int(count) for name, count in saved["counts"].items()})
        entries = None if saved["state"] is None else list(saved["state"])
        state = None if entries is None else tuple(_restored(x) for x in entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no state of a Clipper: {error!r}") from None
    if min(counts) < 0:
        raise ValueError(f"this is no state of a Clipper: {counts}")
    if state is not None and len(state) != len(rule.init(0.0)):
        raise ValueError(f"this state has {len(state)} entries, and {rule!r} needs {len(rule.init(0.0))}")
    if state is not None and not fits(rule, state):
        raise ValueError(f"this state is of another window than that of {rule!r}")
    return state, counts


def _restored(entry: Any) -> Any:
    """An entry of the state; whole numbers, which count, stay whole."""
    return host.field(entry)[()] if isinstance(entry, int) else host.norms("the state", entry)[()]


def _without_memory(clipped: Clipped) -> Clipped:
    leaves, rebuild = flatten(clipped.grads)
    return clipped._replace(grads=rebuild(None if x is None else getattr(x, "dtype", type(x)) for x in leaves))
