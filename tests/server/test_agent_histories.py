"""Conversations of agents that come back: whatever calls a model once wrote, the next answer is not refused."""

import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from engine.input_processor import RenderedChat
from engine.text.chat_template import ChatTemplate
from tests.server.fake_engine import FakeEngine

PRINTING = """
{%- for tool in tools or [] %}{{ tool }}{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }}
{{- call.function.arguments | tojson }}</tool_call>
{%- endfor %}
{% endfor %}"""
ITEMS = """
{%- for tool in tools or [] %}{{ tool }}{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls %}<tool_call><function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}
{%- endfor %}
{% endfor %}"""
DEEP = "[" * 5000 + "]" * 5000
CUT = ['{\n    "', '{"city": "Par', '{"a": 1,}', "{'a': 1}", "[]", '["x"]', "7", '"text"', "Paris", '{"a": "\\ud800"}']
ROUTES = ("chat", "responses", "messages", "ollama")
GO = {"role": "user", "content": "Go"}
SYSTEM = {"role": "system", "content": "be brief"}


class TemplateEngine(FakeEngine):
    """Renders chats with a real template, and answers with `ok`."""

    def __init__(self, template: str = PRINTING) -> None:
        super().__init__(lambda prompt, params: "ok", max_model_len=100_000)
        self.chat_template = template
        self.prompt = ""

    async def render_chat(
        self, messages: Sequence[dict[str, Any]], must_fit: bool = False, /, **template_kwargs: Any
    ) -> RenderedChat:
        given = {name: value for name, value in template_kwargs.items() if name != "chat_template"}
        self.messages, self.template_kwargs = list(messages), template_kwargs
        self.prompt = ChatTemplate(self.chat_template, {"bos_token": "<s>"}).render(messages, **given)
        return RenderedChat(self.prompt, list(self.prompt.encode()))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return TemplateEngine(getattr(request, "param", PRINTING))


async def ask(client: httpx.AsyncClient, route: str, arguments: Any) -> httpx.Response:
    """Ask with a call in the history."""
    function = {"name": "f", "arguments": arguments}
    if route == "responses":
        call = {"type": "function_call", "call_id": "c1", **function}
        output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
        body: dict[str, Any] = {"input": [{"role": "user", "content": "Go"}, call, output]}
        return await client.post("/v1/responses", json=body)
    if route == "messages":
        use = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "done"}
        turns = [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        return await client.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": turns})
    call = {"function": function} if route == "ollama" else {"id": "c1", "type": "function", "function": function}
    turns = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]
    path = "/api/chat" if route == "ollama" else "/v1/chat/completions"
    return await client.post(path, json={"model": "fake", "messages": turns, "stream": False})


def letters(text: str) -> str:
    """What no template escapes."""
    return re.sub(r"\W", "", text)


@pytest.mark.parametrize("engine", [PRINTING, ITEMS, "{{ messages }}"], indirect=True)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("arguments", [*CUT, DEEP, "{" * 5000, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000])
async def test_arguments_that_are_no_object_reach_the_model_as_text(
    client: httpx.AsyncClient, engine: TemplateEngine, route: str, arguments: str
) -> None:
    response = await ask(client, route, arguments)
    assert response.status_code == 200, response.text
    assert "INVALID_JSON" in engine.prompt
    assert letters(arguments) in letters(engine.prompt)


@pytest.mark.parametrize("engine", [PRINTING, ITEMS], indirect=True)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "arguments", [None, "", "null", "{}", {}, [], 7, True, ["x"], '{"a": 1, "a": 2}', '{"a": NaN}']
)
async def test_any_arguments_are_answered(client: httpx.AsyncClient, route: str, arguments: Any) -> None:
    response = await ask(client, route, arguments)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("depth", [100, 300, 700, 900, 990, 5000])
async def test_deep_values_as_arguments_are_answered_or_refused(
    client: httpx.AsyncClient, route: str, depth: int
) -> None:
    arguments: Any = {}
    for _ in range(depth):
        arguments = {"a": arguments}
    text = '{"a":' * depth + "{}" + "}" * depth
    response = await ask(client, route, "PLACE")
    body = response.request.content.replace(b'"PLACE"', text.encode())
    response = await client.post(response.request.url, content=body, headers={"content-type": "application/json"})
    if depth == 5000 or route != "responses":  # there, arguments are a text, which may be one of anything
        assert response.status_code == 400, response.text
        assert "deep" in response.text
    else:
        assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    "name",
    [
        *("self", "messages", "template", "tools", "bos_token", "add_generation_prompt", "chat_template", "tokenize"),
        *("loop", "range", "raise_exception", "namespace", "kwargs", "continue_final_message", "documents", "a b", "_"),
        "",
    ],
)
@pytest.mark.parametrize("value", [None, True, "x", [], {"a": [1]}])
async def test_template_kwargs_of_any_name_are_no_fault_of_the_server(
    client: httpx.AsyncClient, name: str, value: Any
) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template"):
        body = {"messages": [{"role": "user", "content": "Go"}], "chat_template_kwargs": {name: value}}
        response = await client.post(path, json=body)
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["param"] in ("chat_template_kwargs", "messages")


ONE_SYSTEM_MESSAGE = """
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("System message must be at the beginning.") }}
{%- endif %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


@pytest.mark.parametrize("engine", [ONE_SYSTEM_MESSAGE], indirect=True)
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [SYSTEM, {"role": "developer", "content": "be kind"}, GO]}),
        ("/v1/responses", {"instructions": "be brief", "input": [{"role": "developer", "content": "be kind"}, GO]}),
        ("/v1/messages", {"max_tokens": 9, "system": "be brief", "messages": [GO, {**SYSTEM, "content": "be kind"}]}),
        ("/api/chat", {"messages": [SYSTEM, GO, {**SYSTEM, "content": "be kind"}]}),
        ("/apply-template", {"messages": [SYSTEM, GO, {**SYSTEM, "content": "be kind"}]}),
    ],
)
async def test_several_system_messages_are_one_where_the_template_takes_one(
    client: httpx.AsyncClient, engine: TemplateEngine, path: str, fields: dict[str, Any]
) -> None:
    response = await client.post(path, json={"model": "fake", **fields})
    assert response.status_code == 200, response.text
    assert engine.prompt.split() == ["system:", "be", "brief", "be", "kind", "user:", "Go"]


@pytest.mark.parametrize("engine", ["{{ raise_exception('no') }}", ONE_SYSTEM_MESSAGE + "{{ 1 / 0 }}"], indirect=True)
@pytest.mark.parametrize("messages", [[], [SYSTEM], [SYSTEM, SYSTEM]])
async def test_templates_that_refuse_anyway_are_heard(
    client: httpx.AsyncClient, messages: list[dict[str, Any]]
) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": [*messages, GO]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
