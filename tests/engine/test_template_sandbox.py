"""Chat templates get out of their sandbox neither by attributes nor by using up time and memory."""

import resource
import time

import pytest

from configs.errors import CheckpointError, InvalidRequest
from configs.settings import EngineConfig
from engine.input_processor import MAX_TEMPLATE, InputProcessor
from engine.text import template_sandbox
from engine.text.chat_template import ChatTemplate
from engine.text.template_sizes import size_of

HELLO = [{"role": "user", "content": "hello\nworld"}]


def rendered(source, messages=HELLO, **variables):
    return ChatTemplate(source, {}).render(messages, **variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ [''.__class__]|map(attribute='__mro__')|list }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('{0.__class__}'|attr('format'))(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ range.__self__ }}",
        "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{% from 'a' import b %}",
        "{% extends 'a' %}",
        "{{ config.items() }}",
        "{{ request.application }}",
        "{{ lipsum(5) }}",
        "{{ open('/etc/passwd') }}",
        "{{ __import__('os') }}",
        "{{ messages[0].__setitem__('role', 'x') }}",
        "{% set messages[0].role = 'x' %}",
    ],
)
def test_no_way_out(source):
    messages = [dict(message) for message in HELLO]
    try:
        text = rendered(source, messages)
    except (InvalidRequest, CheckpointError):
        text = ""
    assert text == ""
    assert messages == HELLO


def sixty_times(first, following):
    """`n.x` is `first`, then sixty times what follows from it."""
    return f"{{% set n = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set n.x = {following} %}}{{% endfor %}}"


BOMBS = {
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated list": "{{ [0] * 10 ** 10 }}",
    "repetition of a repetition": "{% set a = 'x' * 10000 %}{% set b = a * 10000 %}{% set c = b * 10000 %}",
    "repetition from the left": "{{ 10 ** 10 * 'x' }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set x = 9 ** 999 %}{{ x ** 999 ** 2 }}",
    "products": sixty_times("9 ** 999", "n.x * n.x"),
    "doubling by +": sixty_times("'x'", "n.x + n.x"),
    "doubling by ~": sixty_times("'x'", "n.x ~ n.x"),
    "doubling of a list": sixty_times("[1]", "n.x + n.x"),
    "doubling by join": sixty_times("'x'", "[n.x, n.x]|join"),
    "the method join": sixty_times("'x'", "n.x.join('abc')"),
    "doubling by replace": sixty_times("'x'", "n.x|replace('x', 'xx')"),
    "the method replace": sixty_times("'x'", "n.x.replace('', n.x)"),
    "doubling by format": sixty_times("'x'", "'{0}{0}'.format(n.x)"),
    "doubling by %": sixty_times("'x'", "'%s%s' % (n.x, n.x)"),
    "doubling by a filter": sixty_times("'x'", "'%s%s'|format(n.x, n.x)"),
    "doubling by set": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}{% endfor %}",
    "width of %": "{{ '%9999999999d' % 1 }}",
    "width of % among the values": "{{ '%*d' % (10 ** 10, 1) }}",
    "width of format": "{{ '{:>9999999999}'.format(1) }}",
    "width of format among the values": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "center": "{{ 'x'|center(10 ** 10) }}",
    "the method center": "{{ 'x'.center(10 ** 10) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "indent by a text": "{{ ('a\n' * 100000)|indent('x' * 100000) }}",
    "tojson": "{{ [[1]]|tojson(indent=10 ** 10) }}",
    "wordwrap": "{{ ('a ' * 100000)|wordwrap(1, wrapstring='x' * 100000) }}",
    "batch": "{{ [1]|batch(10 ** 10, 'x')|list }}",
    "slice": "{{ [1]|slice(10 ** 10)|list }}",
    "round": "{{ 1.5|round(10 ** 10, 'ceil') }}",
    "sum": "{{ ([[0] * 1000] * 1000)|sum(start=[])|length }}",
    "nested lists as text": "{% set a = [0] * 999 %}{% set b = [a] * 999 %}{{ [b, b, b] * 9 }}",
    "nested lists as JSON": sixty_times("[1]", "[n.x, n.x]") + "{{ n.x|tojson }}",
    "nested lists written": sixty_times("[1]", "[n.x, n.x]") + "{{ n.x }}",
    "nested lists as strings": sixty_times("[1]", "[n.x, n.x]") + "{{ n.x|string|length }}",
    "steps": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text of the template": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "written again and again": "{% set x = 'x' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "many texts": "{% set x = 'x' * 10 ** 7 %}" + "{% set x = x + 'x' %}" * 1000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_use_up_time_or_memory_is_stopped_before_it_does(name):
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=r"the chat template was stopped: it (makes|takes|pads)") as refused:
        rendered(BOMBS[name])
    assert refused.value.param == "messages"
    assert time.process_time() - start < 20  # it would never end
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KB


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ range(10 ** 9)|list }}",
        "{{ strftime_now('%999999999d')[0:9] }}{{ 1 / 0 }}",
        "{{ 'x'.encode().join(messages) }}",
        "{{ 'x'.translate({120: 'x' * 10 ** 6}) }}",
        "{{ (1).to_bytes(10 ** 10, 'big') }}",
        "{{ 'x\t'.expandtabs(10 ** 10) }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ '9' * 5000 }}{{ ('9' * 5000)|int + ('9' * 5000).nothing() }}",
    ],
)
def test_other_attempts_fail(source):
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"the chat template (failed|was stopped)"):
        rendered(source)
    assert time.process_time() - start < 20  # it would never end


def two_of(doubled):
    """`n.a` and `n.b` are equal, and hold far more than can be gone through, each level twice what is below it."""
    step = "".join(f"{{% set n.{name} = {doubled.replace('X', 'n.' + name)} %}}" for name in "ab")
    return "{% set n = namespace(a=(1,), b=(1,)) %}{% for i in range(45) %}" + step + "{% endfor %}"


USES = [
    "n.a == n.b", "n.a != n.b", "n.a < n.b", "n.b >= n.a", "1 < 2 != n.a == n.b", "n.a in [n.b]", "n.a not in [n.b, 1]",
    "n.a is eq(n.b)", "n.a is in([n.b])", "[n.a]|select('equalto', n.b)|list", "[n.a]|reject('ne', n.b)|list",
    "[{'x': n.a}]|selectattr('x', '==', n.b)|list", "[n.a].index(n.b)", "[n.a].count(n.b)", "[n.a, n.b]|sort",
    "[n.a, n.b]|unique|list", "[n.a, n.b]|min", "[n.a, n.b]|max", "[{'x': n.a}, {'x': n.b}]|groupby('x')",
    "{1: n.a, 2: n.b}|dictsort(by='value')", "n.a|upper", "n.a|trim|length", "n.a|escape", "n.a|urlencode", "n.a|title",
    "n.a|replace('x', 'y')", "n.a|indent", "n.a|wordcount", "n.a|safe", "n.a|format(1)", "n.a|center(9)",
    "raise_exception(n.a)", "{}[n.a].x", "{}[n.a, 1]", "{n.a: 1}", "1|default(n.a)", "{}.get((n.a, 1))", "n.a ~ ''",
    "[1]|map(n.a)|list", "'%s' % [n.a]", "[n.a]|join", "{'x': n.a}|xmlattr", "'{}'.format(n.a)", "dict([(n.a, 1)])",
    "cycler(1).next() == 1 and n.a == n.b",
]  # fmt: skip
KINDS = [
    "(X, X)", "{'x': X, 'y': X}", "{'x': X, 'y': X}.values()|list", "{'x': X, 'y': X}.values()", "dict(x=X, y=X)",
    "([1]|batch(3, X)|list)[0]",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "use"), [*(("[X, X]", use) for use in USES), *((kind, USES[0]) for kind in KINDS)])
def test_nested_lists_are_not_gone_through_in_one_call_whatever_their_size(kind, use):
    """Such a call is C code, which nothing can stop, and nothing else runs meanwhile."""
    if "values()" in kind and "|list" not in kind:
        use = "n.a|upper"  # views are equal only to themselves
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"the chat template (was stopped: it makes|failed)"):
        rendered(two_of(kind) + "{% set x = " + use + " %}")
    assert time.process_time() - start < 20  # it would never end


def test_what_changes_is_compared_too():
    changed = two_of("[X, X]") + "{% for x in [n.a, n.b] %}{{ loop.changed(x) }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="was stopped: it makes"):
        rendered(changed)


def test_a_namespace_does_not_write_what_it_holds():
    step = "{% for i in range(60) %}{% set n.x = namespace(x=n.x, y=n.x) %}{% endfor %}"
    assert rendered("{% set n = namespace(x=1) %}" + step + "{{ n.x }}") == "<namespace>"


LOOKS_AMONG_ALL = """
{%- macro place(messages, id) %}{%- set n = namespace(at=0, seen=false) %}
{%- for m in messages %}{%- for call in m.tool_calls or [] %}
{%- if call.id == id and not n.seen %}{{ n.at }}{%- set n.seen = true %}{%- endif %}{%- set n.at = n.at + 1 %}
{%- endfor %}{%- endfor %}{%- endmacro %}
{%- for tool in tools %}<{{ tool.function.name }} {{ tool|tojson }}>{% endfor %}
{%- for m in messages %}{%- if m.role == 'tool' %}[{{ place(messages, m.tool_call_id) }}: {{ m.content }}]
{%- else %}{{ m.role }}: {{ m.content }}{%- for call in m.tool_calls or [] %}{{ call.function|tojson }}{%- endfor %}
{%- endif %}
{%- endfor %}"""
"""As Cohere's, which number each result by its call."""
GATHERS = """
{%- set n = namespace(text='') %}
{%- for m in messages %}{%- set n.text = n.text + m.role ~ ': ' ~ m.content + '\\n' %}{%- endfor %}{{ n.text }}"""


def history(num_turns, num_tools=60):
    """Of an agent: many tools, and in each turn a call and its result."""
    properties = {f"p{number}": {"type": "string", "description": "what it is for " * 3} for number in range(6)}
    tools = [
        {"type": "function", "function": {"name": f"tool{number}", "parameters": {"properties": properties}}}
        for number in range(num_tools)
    ]
    messages = [{"role": "user", "content": "begin"}]
    for number in range(num_turns):
        call = {"id": f"c{number}", "function": {"name": f"tool{number % 60}", "arguments": {"p0": "x" * 50}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "result " * 60})
    return messages, tools


@pytest.mark.parametrize(("source", "num_turns"), [(LOOKS_AMONG_ALL, 300), (GATHERS, 500)])
def test_long_histories_of_agents_are_rendered(source, num_turns):
    """Templates whose work grows with the square of the history."""
    messages, tools = history(num_turns)
    text = rendered(source, messages, tools=tools)
    assert text.count("result") == 60 * num_turns
    assert source is GATHERS or f"[{num_turns - 1}: result" in text


@pytest.mark.parametrize("name", ["doubling by +", "doubling of a list", "nested lists written", "steps", "calls"])
def test_bombs_are_stopped_among_long_histories_too(name):
    messages, tools = history(200)
    start = time.process_time()
    with pytest.raises(InvalidRequest, match="the chat template was stopped"):
        rendered(BOMBS[name], messages, tools=tools)
    assert time.process_time() - start < 15


def test_time_is_bounded(monkeypatch):
    """Where each step takes long, though it makes nothing."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    slow = "{% set x = range(99999)|list %}{% for i in range(9999) %}{{ (x|sort|unique|sum) - 1 > 0 }}{% endfor %}"
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"more than 0\.2 seconds"):
        rendered(slow)
    assert time.process_time() - start < 3


def test_each_rendering_has_a_budget_of_its_own():
    template = ChatTemplate("{{ 'x' * 60000000 }}", {})
    for _ in range(3):
        assert len(template.render(HELLO)) == 60_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ -" + "-" * 9000 + "1 }}",
    ],
    ids=["brackets", "blocks", "signs"],
)
def test_programs_that_are_nested_too_deeply(source):
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ missing ~ messages[0].role }}", "a1Noneuser"),
        ("{{ ('a' ~ ('b' ~ ['c' ~ 'd'][0]))|upper }}", "ABCD"),
        ("{{ 'a' + 'b' * 3 + '%s-%05.2f' % ('c', 1.5) }}", "abbbc-01.50"),
        ("{{ 2 ** 10 + 3 * 4 - 7 % 4 }} {{ [1] + [2] * 2 }} {{ 2 ** -1 }} {{ 1.5 * 2 }}", "1033 [1, 2, 2] 0.5 3.0"),
        ("{{ messages|map(attribute='role')|join('+') }}{{ ['a', 'b']|join }}{{ '-'.join(['a', 'b']) }}", "userab a-b"),
        ("{{ 'aXbX'|replace('X', '--') }}{{ 'aXbX'.replace('X', '', 1) }}", "a--b--abX"),
        ("{{ messages[0].content|indent(2) }}{{ 'a\nb'|indent('> ', true) }}", "hello\n  world> a\n> b"),
        ("{{ 'a'|center(5) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}", "  a  |a  |007"),
        ("{{ {'b': [1], 'a': 'é'}|tojson }}{{ [1]|tojson(indent=1) }}", '{"b": [1], "a": "é"}[\n 1\n]'),
        ("{{ '{} {a:>4}'.format('x', a=1) }}{{ '{a}'.format_map({'a': 2}) }}", "x    12"),
        ("{{ [1, 2, 3]|batch(2)|list }}{{ [1, 2, 3]|slice(2)|list }}", "[[1, 2], [3]][[1, 2], [3]]"),
        (
            "{{ 2.567|round(2) }}{{ [1, 2]|sum }}{{ [[1], [2]]|sum(start=[]) }}{{ 'abc'|list }}",
            "2.573[1, 2]['a', 'b', 'c']",
        ),
        ("{{ '12345 10000 %s' % 'x' }}{{ 'at 10:00:00 {}'.format('x') }}", "12345 10000 xat 10:00:00 x"),
        ("{{ missing|join }}{{ missing|default('a')|string }}{{ missing|replace('a', 'b') }}", "a"),
        ("{% for a in 'ab' %}{% set b %}{{ a }}{{ loop.index }}{% endset %}{{ b }}{% endfor %}", "a1b2"),
    ],
)
def test_what_templates_do_otherwise_is_left_as_it_is(source, text):
    assert rendered(source) == text.replace("userab a-b", "useraba-b")


def test_templates_of_requests_have_a_size(smollm2_path):
    inputs = InputProcessor(EngineConfig(model=str(smollm2_path)))
    assert inputs.render(HELLO, chat_template="{{ messages[0].role }}") == "user"
    for source in ("x" * (MAX_TEMPLATE + 1), "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% for %}"):
        with pytest.raises(InvalidRequest) as refused:
            inputs.render(HELLO, chat_template=source)
        assert refused.value.param == "chat_template"


def test_sizes():
    assert size_of("abc") - size_of("") == 3
    assert size_of(["abc"] * 5) == size_of([]) + 5 * size_of("abc")
    assert size_of({"a": ("b", {"c"})}) > 4
    nested = ["x"]
    for _ in range(60):
        nested = [nested, nested]
    start = time.process_time()
    assert size_of(nested) > 2**27
    assert time.process_time() - start < 20  # it would never end
