"""A rule written as in Python, `Both(MaxNorm(1.0), Median(k=2))`: read as a syntax tree, and never run."""

from __future__ import annotations

import ast
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import gradclip

from ..rule import Rule
from .errors import UserError, told

RULES: dict[str, Any] = {
    name: kind for name in gradclip.__all__ if isinstance(kind := getattr(gradclip, name), type) and issubclass(kind, Rule)
}
PUBLISHED = [name for name, kind in RULES.items() if hasattr(kind, "published")]
LONGEST = 1000  # characters, so that nothing nests deeper than can be followed
LARGEST = 2**53  # of a whole number: beyond it float64 does not hold every one
MOST = 100_000  # norms that a rule may remember
CONSTANTS = (int, float, str, bool, type(None))
ACCEPTED = (
    f"accepted are {', '.join(RULES)}, of which {', '.join(PUBLISHED)} may have .published, called with numbers, inf, strings, "
    "None, True, False, lists, tuples, dicts and further rules"
)


def rule_of(text: str) -> Rule:
    """The rule; UserError with the position of what is not accepted, and with what is."""
    text = " ".join(text.splitlines()).strip()
    made = _Reader(text).value(_parsed(text))
    if not isinstance(made, Rule):
        raise UserError(f"--rule {_short(text)} is no rule: write one such as Median(k=2); {ACCEPTED}")
    return made


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise UserError(f"--rule has {len(text)} characters: at most {LONGEST} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise UserError(f"--rule {_short(text)} cannot be read: {error.msg} (character {error.offset or 1})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"--rule {_short(text)} cannot be read: {error or 'it is nested too deeply'}") from None


class _Reader:
    """What the nodes of a text's syntax tree stand for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name(id="inf"):
                return math.inf
            case ast.Starred():
                raise self._fault(node, "is not accepted: write out what it holds")
            case ast.Name(id=name) if name in RULES:
                raise self._fault(node, f"is to be called: write {name}(…)")
            case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
                return self._signed(node)
            case ast.List(elts=entries):
                return [self.value(entry) for entry in entries]
            case ast.Tuple(elts=entries):
                return tuple(self.value(entry) for entry in entries)
            case ast.Dict():
                return self._dict(node)
            case ast.Call():
                return self._call(node)
        raise self._fault(node)

    def _constant(self, node: ast.Constant) -> Any:
        if type(node.value) not in CONSTANTS:
            raise self._fault(node)
        if type(node.value) is int and node.value > LARGEST:
            raise self._fault(node, "is too large for a whole number: write a number such as 1e18")
        return node.value

    def _signed(self, node: ast.UnaryOp) -> Any:
        number: Any = self.value(node.operand) if isinstance(node.operand, ast.Constant | ast.Name) else None
        if type(number) not in (int, float):
            raise self._fault(node)
        return -number if isinstance(node.op, ast.USub) else number

    def _dict(self, node: ast.Dict) -> dict[str, Any]:
        for key in node.keys:
            if not isinstance(key, ast.Constant) or type(key.value) is not str:
                raise self._fault(key or node, "is not accepted: the keys of a dict are strings, patterns of names")
        return {self.value(key): self.value(entry) for key, entry in zip(node.keys, node.values, strict=True) if key}

    def _call(self, node: ast.Call) -> Rule:
        make = self._maker(node.func)
        return self._made(node, make, [self.value(x) for x in node.args], self._named(node.keywords))

    def _named(self, keywords: list[ast.keyword]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in keywords:
            if each.arg is None:
                raise self._fault(each.value, "is not accepted behind **: write out what it holds")
            if each.arg in found:
                raise self._fault(each.value, f"is not accepted: {each.arg} is given twice")
            found[each.arg] = self.value(each.value)
        return found

    def _maker(self, node: ast.expr) -> Callable[..., Rule]:
        match node:
            case ast.Name(id=name) if name in RULES:
                return RULES[name]  # type: ignore[no-any-return]
            case ast.Attribute(value=ast.Name(id=name), attr="published") if name in PUBLISHED:
                return RULES[name].published  # type: ignore[no-any-return]
        raise self._fault(node)

    def _made(self, node: ast.Call, make: Callable[..., Rule], args: list[Any], named: dict[str, Any]) -> Rule:
        signature = inspect.signature(make)
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError as error:
            raise self._fault(node, f"has wrong arguments: {error}; they are {_plain(signature)}") from None
        for name in ("window", "period"):
            if type(given.get(name)) is int and given[name] > MOST:
                raise self._fault(node, f"remembers too much: {name} may be at most {MOST} here")
        with told(f"--rule: {self._place(node)}", (TypeError, ValueError)):
            return make(*args, **named)

    def _fault(self, node: ast.expr, why: str = f"is not accepted: {ACCEPTED}") -> UserError:
        return UserError(f"--rule: {self._place(node)} {why}")

    def _place(self, node: ast.expr) -> str:
        column = len(self.text.encode()[: node.col_offset].decode()) + 1
        return f"{_short(ast.get_source_segment(self.text, node) or '')} (character {column})"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


def _plain(signature: inspect.Signature) -> str:
    """The arguments without their types."""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
