"""Rules made of rules: the tighter of several, one that skips, one for each group of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import translate
from typing import Any, ClassVar

from .rule import Array, Bound, Measured, Rule, State, count
from .rules import MaxNorm


@dataclass(frozen=True, init=False)
class Both(Rule):
    """The tighter bounds of several rules, in one pass: max of the lows, min of the highs; where they conflict, the high.

    >>> from gradclip import MaxNorm, Median
    >>> Both(MaxNorm(1.0), Median()).scopes
    ('global', 'tensor')
    """

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule) -> None:
        if len(rules) < 2:
            raise ValueError(f"Both takes two rules or more; got {len(rules)}")
        for rule in rules:
            check_part("Both", rule)
        object.__setattr__(self, "rules", rules)
        self.allowed_scopes()

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return any(rule.needs_weights for rule in self.rules)

    @property
    def needs_size(self) -> bool:  # type: ignore[override]
        return any(rule.needs_size for rule in self.rules)

    @property
    def scopes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those that all rules can serve."""
        common = [set(rule.allowed_scopes()) for rule in self.rules]
        return tuple(scope for scope in self.rules[0].allowed_scopes() if all(scope in others for others in common))

    def allowed_scopes(self) -> tuple[str, ...]:
        if not self.scopes:
            each = "; ".join(f"{type(rule).__name__}: {', '.join(rule.allowed_scopes())}" for rule in self.rules)
            raise ValueError(f"these rules have no scope in common: {each}")
        return self.scopes

    def init(self, zero: Array) -> State:
        return tuple(entry for rule in self.rules for entry in rule.init(zero))

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        low, high, after = 0.0, math.inf, ()
        for rule, own in zip(self.rules, parts(self.rules, state), strict=True):
            bound, new = rule.decide(measured, own, ops)
            low, high, after = larger(low, bound.low, ops), smaller(high, bound.high, ops), (*after, *new)
        return Bound(smaller(low, high, ops), high), after

    def passed(self, state: State) -> State:
        each = zip(self.rules, parts(self.rules, state), strict=True)
        return tuple(entry for rule, own in each for entry in rule.passed(own))

    def kind(self) -> str:
        return f"Both({', '.join(rule.kind() for rule in self.rules)})"

    def rebased(self, state: State) -> Array | None:
        return added(rule.rebased(own) for rule, own in zip(self.rules, parts(self.rules, state), strict=True))


@dataclass(frozen=True)
class Skip(Rule):
    """Where the norm is above the rule's limit the whole step is left out: `.skipped` is set and nothing is clipped.

    A number is a limit of its own, `Skip(5.0)`. After `at_most` steps in a row it clips instead, until a norm lies within the
    limit again: a model that has moved on must not stand still. `Skip(ZScore(6.0, decay=0.99))` is the rolling σ of OLMo.

    State: the rule's, and how many steps in a row.

    >>> from gradclip import clip, init
    >>> rule = Skip(5.0, at_most=1)
    >>> state = init([1.0], rule)
    >>> first = clip([30.0], rule, state=state)
    >>> first.grads, bool(first.skipped)
    ([30.0], True)
    >>> clip([30.0], rule, state=first.state).grads
    [5.0]
    """

    rule: Rule | float
    _: KW_ONLY
    at_most: int = 10

    can_skip = True

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            object.__setattr__(self, "rule", MaxNorm(self.rule))
        check_part("Skip", self.inner)
        count("at_most", self.at_most)

    @property
    def inner(self) -> Rule:
        """The rule whose limit it is."""
        assert isinstance(self.rule, Rule)
        return self.rule

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.inner.needs_weights

    @property
    def needs_size(self) -> bool:  # type: ignore[override]
        return self.inner.needs_size

    def allowed_scopes(self) -> tuple[str, ...]:
        return tuple(scope for scope in self.inner.allowed_scopes() if scope != "element")

    def init(self, zero: Array) -> State:
        return (*self.inner.init(zero), 0.0)

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        *own, run = state
        bound, after = self.inner.decide(measured, tuple(own), ops)
        above = ops.any(measured.norm > bound.high)
        skip = above & (run < self.at_most)
        run = ops.where(skip, run + 1.0, ops.where(above, 1.0 * self.at_most, 0.0))
        return Bound(bound.low, bound.high, skip), (*after, run)

    def passed(self, state: State) -> State:
        return (*self.inner.passed(state[:-1]), state[-1])

    def kind(self) -> str:
        return f"Skip({self.inner.kind()})"

    def rebased(self, state: State) -> Array | None:
        return self.inner.rebased(state[:-1])


@dataclass(frozen=True)
class Groups(Rule):
    """A rule for each group of tensors, by the first pattern that fits a tensor's dotted path; one norm for each group.

    Patterns are those of fnmatch: "*", "?", "[abc]". None leaves a group's tensors alone, and out of the norms. Every gradient
    has to fit a pattern, and every pattern a tensor, which may lack its gradient: "*" last takes the rest. Norm, limit and
    coefficient are [k] in the order of the dict; those of a None group are 0, inf and 1. `budget` shares one limit C, that of
    every MaxNorm in it, out among the k groups so that together they stay below C: "equal" gives each C/√k, "size"
    C·√(size/total).

    >>> from gradclip import clip
    >>> rule = Groups({"head.*": None, "*": MaxNorm(1.0)})
    >>> clip({"head": {"w": 9.0}, "body": {"w": 3.0, "b": 4.0}}, rule).grads
    {'head': {'w': 9.0}, 'body': {'w': 0.6000000000000001, 'b': 0.8}}
    """

    rules: Mapping[str, Rule | None]
    _: KW_ONLY
    budget: str | None = None

    _patterns: ClassVar[list[re.Pattern[str]]]

    scopes = ("global",)
    grouped = True

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise TypeError(f"Groups takes a dict of patterns and rules (or None); got {self.rules!r}")
        for pattern, rule in self.rules.items():
            if rule is not None:
                check_part(f"Groups, for {pattern!r},", rule)
        self._check_budget()
        compiled = [re.compile(translate(pattern)) for pattern in self.rules]  # once, not for every tensor and step
        object.__setattr__(self, "_patterns", compiled)

    def _check_budget(self) -> None:
        if self.budget not in (None, "equal", "size"):
            raise ValueError(f'budget must be "equal", "size" or None; got {self.budget!r}')
        others = [rule for rule in self.rules.values() if rule is not None and not isinstance(rule, MaxNorm)]
        if self.budget and others:
            raise ValueError(f"budget= shares the limit of MaxNorm out; got {others[0]!r} too")

    def __hash__(self) -> int:
        return hash((tuple(self.rules.items()), self.budget))

    @property
    def needs_size(self) -> bool:  # type: ignore[override]
        return self.budget == "size" or any(rule is not None and rule.needs_size for rule in self.rules.values())

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return any(rule is not None and rule.needs_weights for rule in self.rules.values())

    def members(self, leaves: Sequence[tuple[str, bool]], complete: bool) -> list[list[int]]:
        """The tensors of every group; ValueError for a gradient or a pattern that none fits."""
        fitting = [next((i for i, pattern in enumerate(self._patterns) if pattern.match(path)), None) for path, _ in leaves]
        for i, pattern in enumerate(self.rules):
            if complete and i not in fitting:
                raise ValueError(f"the pattern {pattern!r} of Groups fits no tensor that an earlier one has not taken")
        members: list[list[int]] = [[] for _ in self.rules]
        present = [(path, group) for (path, there), group in zip(leaves, fitting, strict=True) if there]
        for place, (path, group) in enumerate(present):
            if group is None:
                raise ValueError(f'no pattern of Groups fits {path!r}: add one, or "*" for the rest')
            members[group].append(place)
        return [[] if rule is None else places for rule, places in zip(self.rules.values(), members, strict=True)]

    def init(self, zero: Array) -> State:
        """The states one after another; `zero` is that of one norm, or of all."""
        first = zero[0] if getattr(zero, "shape", ()) else zero
        return tuple(entry for rule in self.rules.values() if rule is not None for entry in rule.init(first))

    def decide(self, measured: Measured, state: State, ops: Any) -> tuple[Bound, State]:
        bounds, after = [], ()
        for i, (rule, own) in enumerate(zip(self.rules.values(), parts(list(self.rules.values()), state), strict=True)):
            bound, new = (Bound(0.0, math.inf), ()) if rule is None else rule.decide(part_of(measured, i), own, ops)
            bounds.append(bound._replace(high=bound.high * self._share(measured, i)))
            after = (*after, *new)
        like = measured.norm[0] * 0.0
        low, high = (ops.stack([ops.like(like, value) for value in side]) for side in list(zip(*bounds, strict=True))[:2])
        return Bound(low, high), after

    def _share(self, measured: Measured, i: int) -> Array:
        """How much of the budget group i has."""
        taking = [j for j, rule in enumerate(self.rules.values()) if rule is not None]
        if self.budget is None or i not in taking:
            return 1.0
        if self.budget == "equal":
            return len(taking) ** -0.5
        return (measured.size[i] / sum(measured.size[j] for j in taking)) ** 0.5

    def passed(self, state: State) -> State:
        rules = list(self.rules.values())
        each = zip(rules, parts(rules, state), strict=True)
        return tuple(entry for rule, own in each if rule is not None for entry in rule.passed(own))

    def kind(self) -> str:
        each = (f"{pattern!r}: {rule and rule.kind()}" for pattern, rule in self.rules.items())
        return f"Groups({', '.join(each)})"

    def rebased(self, state: State) -> Array | None:
        rules = list(self.rules.values())
        each = zip(rules, parts(rules, state), strict=True)
        return added(rule.rebased(own) for rule, own in each if rule is not None)


def check_part(whole: str, rule: Any) -> None:
    """TypeError or ValueError for what cannot be a part of another rule."""
    if not isinstance(rule, Rule):
        raise TypeError(f"{whole} takes rules such as MaxNorm(1.0); got {rule!r}")
    if rule.signed or rule.can_skip or rule.grouped:
        raise ValueError(f"{whole} cannot take {type(rule).__name__}")
    if getattr(rule, "like", None) is not None:
        raise ValueError(f"{whole} cannot take the arithmetic of another framework: {rule!r}")


def parts(rules: Sequence[Rule | None], state: State) -> list[State]:
    """The state of each rule."""
    found, first = [], 0
    for rule in rules:
        size = 0 if rule is None else len(rule.init(0.0))
        found.append(state[first : first + size])
        first += size
    return found


def added(counts: Iterable[Array | None]) -> Array | None:
    """Their sum, of those that there are; None where there is none."""
    known = [count for count in counts if count is not None]
    return sum(known[1:], known[0]) if known else None


def part_of(measured: Measured, i: int) -> Measured:
    """What was measured of group i."""
    weights = None if measured.weights is None else measured.weights[i]
    return Measured(measured.norm[i], weights, None if measured.size is None else measured.size[i])


def larger(a: Array, b: Array, ops: Any) -> Array:
    """max(a, b), NaN kept."""
    if isinstance(a, float) and isinstance(b, float):
        return a if a >= b else b if b >= a else math.nan
    return ops.where(a >= b, a, ops.where(b >= a, b, a + b))


def smaller(a: Array, b: Array, ops: Any) -> Array:
    """min(a, b), NaN kept."""
    if isinstance(a, float) and isinstance(b, float):
        return a if a <= b else b if b <= a else math.nan
    return ops.where(a <= b, a, ops.where(b <= a, b, a + b))
