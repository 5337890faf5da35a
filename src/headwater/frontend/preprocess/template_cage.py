"""The cage in which Jinja2 runs templates: its immutable sandbox, and an end to every loop, recursion and number.

Jinja2 limits neither time nor memory. Here every turn of a loop and every call of a macro takes a step from a budget
that belongs to one rendering, and what makes a lot out of little (powers, repeated texts, padding, format widths) is
refused. A template that needs more is no chat template.
"""

import re
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000
_MAX_POWER = 64
_MAX_REPEATED = 1_000_000
_MAX_FORMAT_CHARS = 200
_MAX_TEXT = 64_000_000
"""Far above what a body may hold."""
_MANY_DIGITS = re.compile("[0-9]{3}")
_TICK = "headwater_tick__"
_JOIN = "headwater_join__"
_PADDING = frozenset(("ljust", "rjust", "zfill", "center", "expandtabs", "format_map", "translate"))
_WIDE_FILTERS = ("center", "indent", "wordwrap", "format", "batch", "slice")


class CagedEnvironment(ImmutableSandboxedEnvironment):
    """Give every rendering the variables of `budget()`."""

    intercepted_binops = frozenset(("**", "*", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _WIDE_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["replace"] = _replace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            node.body.insert(0, _step(self))
        joined = _Joins(self).visit(tree)
        assert isinstance(joined, nodes.Template)
        return joined

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 2 or abs(right) <= _MAX_POWER):
            raise SecurityError(f"a power of {right} is not worked out in a template")
        if operator == "*":
            _check_repetition(left, right)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str) and len(left) > _MAX_FORMAT_CHARS:
            raise SecurityError("a template's format is too long")
        if operator == "%" and isinstance(left, str) and _has_width(left):
            raise SecurityError("a template's format asks for a width")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and getattr(obj, "__name__", "") == "replace":
            return _replace(text, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = getattr(value, "__self__", None)
        if isinstance(form, str) and getattr(value, "__name__", "") == "format" and _MANY_DIGITS.search(form):
            raise SecurityError("a template's format asks for a width")
        return super().wrap_str_format(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Joins(NodeTransformer):
    """`a ~ b` by a function that looks at the length."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the name is Jinja2's
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None)
        return call.set_environment(self._environment)


def budget() -> dict[str, Callable[..., str]]:
    """Variables for one rendering."""
    left = MAX_STEPS

    def tick() -> str:
        nonlocal left
        left -= 1
        if left < 0:
            raise SecurityError(f"the template does not come to an end within {MAX_STEPS:,} steps")
        return ""

    return {_TICK: tick, _JOIN: _join}


def _step(environment: Environment) -> nodes.Node:
    call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
    return nodes.ExprStmt(call).set_environment(environment)


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """Of a text, as its method and as Jinja2's filter."""
    given, times = str(text), -1 if count is None else count
    found = len(given) + 1 if not old else given.count(old)
    _check_size(len(given) + found * len(new))
    return given.replace(old, new, times)


def _check_size(size: int) -> None:
    if size > _MAX_TEXT:
        raise SecurityError(f"a text or list of {size} is not made in a template")


def _check_repetition(left: Any, right: Any) -> None:
    for things, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(things, str | bytes | list | tuple):
            if len(things) * times > _MAX_REPEATED:
                raise SecurityError(f"{times} times {len(things)} characters or items are not made in a template")
            return
    if all(isinstance(number, int) and number.bit_length() > 1024 for number in (left, right)):
        raise SecurityError("numbers of more than 1024 bits are not worked with in a template")


def _has_width(form: str) -> bool:
    """Three digits in a row after a percent sign, or a star."""
    for piece in form.split("%")[1:]:
        digits = len(piece) - len(piece.lstrip("0123456789.-+ #"))
        if digits >= 3 or piece.lstrip("0123456789.-+ #").startswith("*"):
            return True
    return False


def _narrow(make: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses large numbers as arguments."""

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, int) and value > 1000:
                raise SecurityError(f"{value} is too much for a filter in a template")
        if isinstance(args[0], str) and make.__name__ == "do_format" and _has_width(args[0]):
            raise SecurityError("a template's format asks for a width")
        return make(*args, **kwargs)

    return narrowed
