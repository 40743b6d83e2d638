"""Rules as what JSON can hold, and back; thresholds that are Keras variables as tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import keras

from ...combinations import Both
from ...layout import Unit
from ...rule import Rule

Value = Any


def parts(rule: Rule) -> dict[str, Value]:
    """What a rule was made of."""
    return {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]


def made(kind: type[Rule], given: Mapping[str, Value]) -> Rule:
    """The rule of this kind that is made of them."""
    return Both(*given["rules"]) if kind is Both else kind(**given)


def variables(value: Value) -> Iterator[keras.Variable]:
    """The Keras variables in a rule, each as often as it is there."""
    if isinstance(value, keras.Variable):
        yield value
    children = parts(value) if isinstance(value, Rule) else value
    if isinstance(children, Mapping | tuple):
        for child in children.values() if isinstance(children, Mapping) else children:
            yield from variables(child)


def live(value: Value) -> Value:
    """The rule with what its variables hold now, as tensors, in their place."""
    if isinstance(value, Rule):
        return made(type(value), {name: live(part) for name, part in parts(value).items()})
    if isinstance(value, Mapping):
        return {key: live(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(live, value))
    return keras.ops.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def saved(value: Value) -> Value:
    """A rule, a scope or a number for JSON. ValueError for a function that Keras could not find again."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind, (name, write, _) in FORMS.items():
        if isinstance(value, kind):
            return {name: write(value)}
    if getattr(value, "shape", None) == ():
        number = float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))
        return {"variable": number} if isinstance(value, keras.Variable) else saved(number)
    return {"object": _object(value)}


def loaded(value: Value) -> Value:
    """What `saved` was given; ValueError for a rule that is not known here."""
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    return READ[name](content)


def _object(value: Value) -> Value:
    if getattr(value, "__name__", "") == "<lambda>" or not callable(value):
        raise ValueError(
            f"{value!r} cannot be saved: take a named function with @keras.saving.register_keras_serializable(), or one of "
            "keras.optimizers.schedules"
        )
    return keras.saving.serialize_keras_object(value)


def _rule(content: Mapping[str, Value]) -> Rule:
    known = {kind.__name__: kind for kind in _kinds(Rule)}
    if content["name"] not in known:
        raise ValueError(f"the optimizer clips by {content['name']}, a rule that is not known here: import it before you load")
    return made(known[content["name"]], loaded(content["parts"]))


def _kinds(kind: type[Rule]) -> Iterator[type[Rule]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _saved_rule(rule: Rule) -> Value:
    return {"name": type(rule).__name__, "parts": saved(parts(rule))}


def _saved_pairs(value: Mapping[str, Value]) -> Value:
    return [[key, saved(part)] for key, part in value.items()]


FORMS: dict[Any, tuple[str, Callable[[Any], Value], Callable[[Any], Value]]] = {
    Rule: ("rule", _saved_rule, _rule),
    Unit: ("unit", lambda unit: saved(unit.axis), lambda axis: Unit(loaded(axis))),
    Mapping: ("dict", _saved_pairs, lambda pairs: {key: loaded(part) for key, part in pairs}),
    tuple: ("tuple", lambda value: [saved(part) for part in value], lambda value: tuple(map(loaded, value))),
}
READ: dict[str, Callable[[Any], Value]] = {name: read for name, _, read in FORMS.values()} | {
    "float": float,
    "variable": lambda number: keras.Variable(number, trainable=False, dtype="float32", name="threshold"),
    "object": keras.saving.deserialize_keras_object,
}
