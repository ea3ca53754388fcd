"""The sandbox that chat templates run in: Jinja's, with a budget.

A template comes with a checkpoint, or with a request where the server trusts those; neither may hold up the server or
use up its memory. Loops, calls and everything that makes texts or lists larger is counted, before it is done.
"""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .template_sizes import FILTERS, MAX_SIZE, METHODS, OPERATORS, size_of

MAX_STEPS = 200_000
"""Loop iterations and macro calls of one rendering."""
MAX_SECONDS = 10.0
"""Of processor time."""
_SIZE_THAT_TAKES_TIME = 2**14
_FORBIDDEN = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
"""Methods that make much of little, and that no chat template needs."""


class Refusal(TemplateError):
    """`raise_exception(message)` in a template."""


class Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.began = time.thread_time()
        self.steps = 0
        self.size = 0

    def step(self, size: int) -> None:
        """One turn of a loop or call of a macro, which writes `size` characters beside what it computes."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        self.charge(size)
        self.check_time()

    def charge(self, size: int) -> None:
        """Before something of this size is made."""
        self.size += size
        if self.size > MAX_SIZE:
            raise SecurityError(f"it makes more than {MAX_SIZE:,} characters")
        if size > _SIZE_THAT_TAKES_TIME:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() - self.began > MAX_SECONDS:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


class BudgetContext(Context):
    """The variables of one rendering, and its budget."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> "BudgetContext":
        context: BudgetContext = super().derived(locals)  # type: ignore[assignment]
        context.budget = self.budget
        return context


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises `SecurityError` for what leaves the sandbox or exceeds the budget."""

    context_class = BudgetContext
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_output)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.filters["tojson"] = _to_json
        self.filters |= {name: _guarded(self.filters[name], size) for name, size in FILTERS.items()}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: BudgetContext, operator: str, left: Any, right: Any) -> Any:
        context.budget.charge(OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: BudgetContext, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str) and (size := METHODS.get(method.__name__)):
            args = tuple(_listed(one) for one in args)
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # those are Jinja's
            __context.budget.charge(size(text, *args, **named))
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def count_step(context: BudgetContext, size: int) -> None:
        context.budget.step(size)

    @staticmethod
    def concatenated(context: BudgetContext, *values: Any) -> str:
        """`a ~ b`"""
        context.budget.charge(sum(map(size_of, values)))
        return "".join(map(str, values))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _replace_concatenations(tree)
        bodies: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *(node for kind in (nodes.For, nodes.Macro, nodes.CallBlock) for node in tree.find_all(kind))
        ]
        for node in bodies:
            size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_call("count_step", nodes.Const(size))).set_lineno(node.lineno))
        return tree


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model has learned from."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace_concatenations(tree: nodes.Node) -> None:
    for node in tree.iter_child_nodes():
        _replace_concatenations(node)
    for name, value in tree.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(tree, name, _call("concatenated", *value.nodes))
        elif isinstance(value, list):
            value[:] = [_call("concatenated", *one.nodes) if isinstance(one, nodes.Concat) else one for one in value]


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), [nodes.ContextReference(), *arguments], [], None, None)


@pass_context
def _output(context: BudgetContext, value: Any) -> Any:
    """What `{{ value }}` writes."""
    context.budget.charge(size_of(value))
    return value


def _guarded(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    """The filter `function`, which first pays for what it will make."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def guarded(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _listed(value)
        if not isinstance(value, Undefined):
            context.budget.charge(size(value, *args, **kwargs))
        known = {"eval_context": context.eval_ctx, "environment": context.environment}
        return function(*([known[wanted]] if wanted else []), value, *args, **kwargs)

    return guarded


def _listed(value: Any) -> Any:
    """What can be read once, as a list."""
    return list(value) if isinstance(value, Iterator) else value
