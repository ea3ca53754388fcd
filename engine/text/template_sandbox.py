"""The sandbox that chat templates run in: Jinja's, with a budget.

A template comes with a checkpoint, or with a request where the server trusts those; neither may hold up the server or
use up its memory. Loops, calls, everything that makes texts or lists larger, and all that walks through lists in one go
is counted, before it is done. Who sends more may use more.
"""

import itertools
import json
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_sizes import COMPARING, CONTAINERS, ELEMENT, FILTERS, MAX_SIZE, METHODS, OPERATORS, WALKING, size_of

MAX_STEPS = 200_000
"""Loop iterations and macro calls of one rendering."""
STEPS_PER_ELEMENT = 1000
"""So many more for each text, list and object of the request: templates look for each call among all messages."""
SIZES_OF_INPUT = 256
"""So many times the size of the request may be made beside `MAX_SIZE`."""
LARGEST_SIZE = 2**31
"""Most characters that one rendering makes, whatever the size of the request."""
_STEPS_PER_CHECK = 32
MAX_SECONDS = 10.0
"""Of processor time."""
_SIZE_THAT_TAKES_TIME = 2**14
_FORBIDDEN = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
"""Methods that make much of little, and that no chat template needs."""
_COUNTED = (nodes.For, nodes.Macro, nodes.CallBlock)
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "gt")},
    "lteq": operator.le,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class Refusal(TemplateError):
    """`raise_exception(message)` in a template."""


class Budget:
    """What one rendering has used."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """`given`: the variables that the template begins with."""
        self.began = time.thread_time()
        self.steps = 0
        self.size = 0
        self._max_steps, self._max_size = MAX_STEPS, MAX_SIZE
        self._given: Mapping[str, Any] | None = given

    def step(self, size: int) -> None:
        """One turn of a loop or call of a macro, which writes `size` characters beside what it computes."""
        self.steps += 1
        if self.steps > self._max_steps and not self._raised():
            raise SecurityError(f"it takes more than {self._max_steps:,} steps")
        self.charge(size)
        if self.steps % _STEPS_PER_CHECK == 0:
            self.check_time()

    def charge(self, size: int) -> None:
        """Before something of this size is made."""
        self.size += size
        if size > MAX_SIZE or (self.size > self._max_size and not self._raised()):
            raise SecurityError(f"it makes more than {self._max_size:,} characters")
        if size > _SIZE_THAT_TAKES_TIME:
            self.check_time()

    def walk(self, *values: Any) -> None:
        """Before one call goes through all that the lists among these hold, and what those hold."""
        size = sum(size_of(value) for value in values if isinstance(value, CONTAINERS))
        if size > MAX_SIZE:  # or any number more
            raise SecurityError("it makes lists that are too large to walk through")
        self.charge(size // ELEMENT)

    def _raised(self) -> bool:
        """Whether the bounds have been raised just now, by what the size of the request allows."""
        if self._given is None:
            return False
        size = sum(map(size_of, self._given.values()))
        self._given = None
        self._max_steps += STEPS_PER_ELEMENT * (size // ELEMENT)
        self._max_size = min(self._max_size + SIZES_OF_INPUT * size, LARGEST_SIZE)
        return True

    def check_time(self) -> None:
        if time.thread_time() - self.began > MAX_SECONDS:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


class BudgetContext(Context):
    """The variables of one rendering, and its budget."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.budget = Budget(self.parent)

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
        self.globals["namespace"] = SilentNamespace
        self.filters |= {
            name: _guarded(one, FILTERS.get(name), walks=name in FILTERS or name in WALKING)
            for name, one in self.filters.items()
        }
        tests: Any = self.tests
        tests |= {name: _guarded(tests[name], None, walks=True) for name in COMPARING}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        context.budget.charge(OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is __context:  # one of ours, below
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `str.format`
        text = getattr(method, "__self__", None)
        if not isinstance(__obj, Macro):
            __context.budget.walk(*args, *kwargs.values())
            if isinstance(text, list | tuple) and method.__name__ in ("count", "index"):
                __context.budget.walk(text)
        if isinstance(text, str) and (size := METHODS.get(method.__name__)):
            args = tuple(_listed(one) for one in args)
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # those are Jinja's
            __context.budget.charge(size(text, *args, **named))
        return super().call(__context, __obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.checked_key(argument))

    @staticmethod
    def checked_key(key: Any) -> Any:
        """A tuple is hashed, and an error quotes it."""
        if isinstance(key, CONTAINERS) and size_of(key) > _SIZE_THAT_TAKES_TIME:
            raise SecurityError("it makes a key of too many elements")
        return key

    @staticmethod
    def compared(context: BudgetContext, left: Any, *others: Any) -> bool:
        """`left == b`, `left < b < c`, …; the names of operators stand before what is compared."""
        for name, right in zip(others[::2], others[1::2], strict=True):
            if isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
                context.budget.walk(left, right)
            if not _COMPARISONS[name](left, right):
                return False
            left = right
        return True

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
        _replace_expressions(tree)
        bodies: Iterator[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in list(bodies):
            size = _own_data(node.body)
            node.body.insert(0, nodes.ExprStmt(_call("count_step", nodes.Const(size))).set_lineno(node.lineno))
        return tree


class SilentNamespace(Namespace):
    """Jinja's writes all that it holds, which nothing counts."""

    def __repr__(self) -> str:
        return "<namespace>"


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


def _own_data(body: list[nodes.Node]) -> int:
    """Characters that stand in a body, but not in the loops and macros inside, which count theirs."""
    size, found = 0, list(body)
    while found:
        node = found.pop()
        if isinstance(node, nodes.TemplateData):
            size += len(node.data)
        found += node.iter_child_nodes(exclude=("body",) if isinstance(node, _COUNTED) else None)
    return size


def _replace_expressions(tree: nodes.Node) -> None:
    for node in tree.iter_child_nodes():
        _replace_expressions(node)
    for name, value in tree.iter_fields():
        if isinstance(value, list):
            value[:] = [_replacement(one) for one in value]
        else:
            setattr(tree, name, _replacement(value))
    if isinstance(tree, nodes.Pair) and not isinstance(tree.key, nodes.Const):
        tree.key = nodes.Call(nodes.EnvironmentAttribute("checked_key"), [tree.key], [], None, None)


def _replacement(value: Any) -> Any:
    if isinstance(value, nodes.Concat):
        return _call("concatenated", *value.nodes)
    if isinstance(value, nodes.Compare):
        operands = [value.expr, *(one.expr for one in value.ops)]
        if all(nodes.Const in map(type, pair) for pair in itertools.pairwise(operands)):
            return value  # with texts and numbers nothing is walked through
        rest = [part for one in value.ops for part in (nodes.Const(one.op), one.expr)]
        return _call("compared", value.expr, *rest)
    return value


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), [nodes.ContextReference(), *arguments], [], None, None)


@pass_context
def _output(context: BudgetContext, value: Any) -> Any:
    """What `{{ value }}` writes."""
    context.budget.charge(size_of(value))
    return value


def _guarded(function: Callable[..., Any], size: Callable[..., int] | None, *, walks: bool) -> Callable[..., Any]:
    """The filter or test `function`, which first pays for what it will make, and walk through."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def guarded(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        if size is not None:
            value = _listed(value)
        context.budget.walk(*args, *kwargs.values(), *([value] if walks else ()))
        if size is not None and not isinstance(value, Undefined):
            context.budget.charge(size(value, *args, **kwargs))
        known = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        return function(*([known[wanted]] if wanted else []), value, *args, **kwargs)

    return guarded


def _listed(value: Any) -> Any:
    """What can be read once, as a list."""
    return list(value) if isinstance(value, Iterator) else value
