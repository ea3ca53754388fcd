"""Tools and items of other people's servers: what this one cannot run is passed over and named, never refused."""

import json
import time
from typing import Any

import httpx
import pytest

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine
from tests.server.test_agent_histories import TemplateEngine

IGNORED = "x-octavo-ignored-fields"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
NESTED = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STRICT = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
MINE = {"name": "get_weather", "input_schema": PARAMETERS, "strict": True}
NAME = {"name": "get_weather"}
HELLO = [{"role": "user", "content": "hi"}]
SPACE = {"type": "namespace", "name": "team", "description": "Others", "tools": [{**FLAT, "name": "spawn"}, FLAT]}
OF_OPENAI: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "mcp", "server_label": "s", "server_url": "https://example.com", "require_approval": "never"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search"},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
]
OF_ANTHROPIC = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]


@pytest.fixture
def engine() -> FakeEngine:
    return TemplateEngine()


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    response = await client.post(path, json={"model": "fake", **fields})
    assert response.status_code == 200, response.text
    return response


def ignored(response: httpx.Response) -> list[str]:
    return response.headers[IGNORED].split(", ") if IGNORED in response.headers else []


@pytest.mark.parametrize("tool", OF_OPENAI)
async def test_tools_that_openai_runs_are_passed_over_and_named(
    client: httpx.AsyncClient, engine: TemplateEngine, tool: dict[str, Any]
) -> None:
    response = await post(client, "/v1/responses", input="hi", tools=[FLAT, tool], tool_choice="auto")
    assert ignored(response) == [f"tools[1] {tool['type']}"]
    assert [one["name"] for one in response.json()["tools"]] == ["get_weather"]
    assert engine.template_kwargs["tools"] == [NESTED]
    hello = [{"role": "user", "content": "hi"}]
    response = await post(client, "/v1/chat/completions", messages=hello, tools=[tool, NESTED])
    assert ignored(response) == [f"tools[0] {tool['type']}"]
    assert engine.template_kwargs["tools"] == [NESTED]


@pytest.mark.parametrize("tool", OF_ANTHROPIC)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_tools_that_anthropic_runs_are_passed_over(
    client: httpx.AsyncClient, engine: TemplateEngine, tool: dict[str, Any], path: str
) -> None:
    mine = {"name": "get_weather", "input_schema": PARAMETERS}
    hello = [{"role": "user", "content": "hi"}]
    limit = {} if path.endswith("count_tokens") else {"max_tokens": 9}
    response = await post(client, path, messages=hello, tools=[mine, tool], **limit)
    assert ignored(response) == [f"tools[1] {tool['type']}"]
    assert [one["function"]["name"] for one in engine.template_kwargs["tools"]] == ["get_weather"]


CALL = '<tool_call>{"name": "team__spawn", "arguments": {"city": "Rome"}}</tool_call>'


async def test_functions_of_a_namespace_are_called_by_both_names(
    client: httpx.AsyncClient, engine: TemplateEngine
) -> None:
    engine.script = lambda prompt, params: CALL
    request = {"input": "hi", "tools": [FLAT, SPACE]}
    response = await post(client, "/v1/responses", **request)
    offered = [one["function"]["name"] for one in engine.template_kwargs["tools"]]
    assert offered == ["get_weather", "team__spawn", "team__get_weather"]
    [item] = response.json()["output"]
    assert (item["namespace"], item["name"], json.loads(item["arguments"])) == ("team", "spawn", {"city": "Rome"})
    assert response.json()["tools"][1] == SPACE
    text = (await post(client, "/v1/responses", **request, stream=True)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]
    items = [one["item"] for one in events if "item" in one]
    assert [(one["namespace"], one["name"]) for one in items] == [("team", "spawn")] * 2

    output = {"type": "function_call_output", "call_id": item["call_id"], "output": DONE}
    await post(client, "/v1/responses", **{**request, "input": [{"role": "user", "content": "hi"}, item, output]})
    assert engine.messages[1]["tool_calls"][0]["function"]["name"] == "team__spawn"
    assert engine.messages[2]["name"] == "team__spawn"


async def test_calls_of_functions_without_a_namespace_name_none(
    client: httpx.AsyncClient, engine: TemplateEngine
) -> None:
    engine.script = lambda prompt, params: CALL.replace("team__spawn", "get_weather")
    response = await post(client, "/v1/responses", input="hi", tools=[SPACE, FLAT])
    [item] = response.json()["output"]
    assert item["name"] == "get_weather"
    assert "namespace" not in item


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "spawn", "namespace": "team"},
        {"type": "function", "name": "team__spawn"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "web_search"}, {"type": "function", "name": "spawn", "namespace": "team"}],
        },
    ],
)
async def test_a_choice_may_name_a_function_of_a_namespace(
    client: httpx.AsyncClient, engine: TemplateEngine, choice: dict[str, Any]
) -> None:
    tools = [SPACE, FLAT, {"type": "web_search"}]
    await post(client, "/v1/responses", input="hi", tools=tools, tool_choice=choice)
    assert [one["function"]["name"] for one in engine.template_kwargs["tools"]] == ["team__spawn"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_thousands_of_tools_are_soon_refused(engine: FakeEngine, path: str) -> None:
    named = [{"type": "function", "name": f"f{index}"} for index in range(16_000)]
    tools = [{"type": "function", "function": one} for one in named] if "chat" in path else named
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"input": "hi"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "fake"))
    start = time.process_time()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(path, json={**body, "tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert time.process_time() - start < 4


async def test_what_a_namespace_holds_beside_functions_is_passed_over(client: httpx.AsyncClient) -> None:
    space = {**SPACE, "tools": [{"type": "custom", "name": "exec"}, {**FLAT, "defer_loading": True}]}
    response = await post(client, "/v1/responses", input="hi", tools=[space])
    assert ignored(response) == ["tools[0].tools[0] custom", "tools[0].tools[1].defer_loading"]


USER = {"role": "user", "content": "go"}
LAST = {"role": "user", "content": "on"}
DONE = "done: 完了"


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** a"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": DONE},
            "patch",
            {"input": "*** a"},
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "id": "x", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": DONE},
            "local_shell",
            {"action": {"type": "exec", "command": ["ls"]}},
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": DONE, "stderr": ""}, 5]},
            "shell",
            {"action": {"commands": ["ls"]}},
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": DONE},
            "apply_patch",
            {"operation": {"type": "delete_file", "path": "a"}},
        ),
        (
            {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"q": "x"}},
            {"type": "function_call_output", "call_id": "c", "output": DONE},
            "tool_search",
            {"execution": "client", "arguments": {"q": "x"}},
        ),
    ],
)
async def test_calls_that_a_client_ran_are_told_as_calls_of_functions(
    client: httpx.AsyncClient, engine: TemplateEngine, call: Any, output: Any, name: str, arguments: Any
) -> None:
    await post(client, "/v1/responses", input=[USER, call, output, LAST])
    _, said, result, _ = engine.messages
    assert said["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
    assert DONE in result["content"]
    assert result["name"] == name


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "fs", "queries": ["q"], "status": "completed"},
        {"type": "image_generation_call", "id": "ig", "result": "AAAA", "status": "completed"},
        {"type": "code_interpreter_call", "id": "ci", "code": "1", "container_id": "c", "outputs": []},
        {"type": "mcp_list_tools", "id": "ml", "server_label": "s", "tools": []},
        {"type": "mcp_call", "id": "mc", "name": "n", "arguments": "{}", "server_label": "s", "output": "o"},
        {"type": "compaction", "encrypted_content": "AAAA"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "AAAA"},
    ],
)
async def test_items_that_only_their_own_server_reads_are_passed_over_and_named(
    client: httpx.AsyncClient, engine: TemplateEngine, item: dict[str, Any]
) -> None:
    response = await post(client, "/v1/responses", input=[USER, item, LAST])
    named = "input[1].encrypted_content" if item["type"] == "reasoning" else f"input[1] {item['type']}"
    assert ignored(response) == [named]
    assert [message["content"] for message in engine.messages] == ["go", "on"]
    [_, *stored] = (await client.get(f"/v1/responses/{response.json()['id']}/input_items?order=asc")).json()["data"]
    assert stored[-1]["content"] == [{"type": "input_text", "text": "on"}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
    ],
)
async def test_blocks_of_tools_that_anthropic_runs_are_passed_over(
    client: httpx.AsyncClient, engine: TemplateEngine, block: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "ok"}, block]}
    response = await post(client, "/v1/messages", max_tokens=9, messages=[USER, said, LAST])
    assert ignored(response) == [f"messages[1].content[1] {block['type']}"]
    assert [message["content"] for message in engine.messages] == ["go", "ok", "on"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("part", "kind", "said"),
    [
        (IMAGE, "image", "[image left out: this model reads only text]"),
        ({"type": "document", "source": {"type": "base64", "data": "AA"}}, "document", "[document left out: "),
        ({"type": "document", "source": {"type": "text", "data": "plain", "media_type": "text/plain"}}, None, "plain"),
        ({"type": "search_result", "title": "t", "content": [{"type": "text", "text": "found"}]}, None, "found"),
    ],
)
async def test_a_picture_among_results_leaves_a_word_in_messages(
    client: httpx.AsyncClient, engine: TemplateEngine, part: Any, kind: str | None, said: str
) -> None:
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, part]}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    response = await post(client, "/v1/messages", max_tokens=9, messages=turns)
    assert engine.messages[-1]["content"].startswith("a\n" + said)
    assert ignored(response) == ([f"messages[2].content[0].content[1] {kind}"] if kind else [])


async def test_a_picture_among_results_leaves_a_word_in_openais_protocols(
    client: httpx.AsyncClient, engine: TemplateEngine
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": parts}]
    response = await post(client, "/v1/chat/completions", messages=turns)
    assert engine.messages[-1]["content"] == "a\n[image left out: this model reads only text]"
    assert ignored(response) == ["messages[2].content[1] image_url"]
    items = [
        USER,
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:,"}]},
    ]
    response = await post(client, "/v1/responses", input=items)
    assert engine.messages[-1]["content"] == "[image left out: this model reads only text]"
    assert ignored(response) == ["input[2].output[0] input_image"]
    turns = [USER, {"role": "tool", "content": "a", "images": ["AAAA"]}]
    response = await post(client, "/api/chat", messages=turns)
    assert engine.messages[-1]["content"] == "a\n[image left out: this model reads only text]"
    assert ignored(response) == ["messages[1].content[1] image"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("chat", {"verbosity": "low", "store": True, "service_tier": "flex"}, ["service_tier", "store", "verbosity"]),
        ("chat", {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
        ("chat", {"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]),
        ("chat", {"metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False}, []),
        ("responses", {"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ("responses", {"text": {"verbosity": "medium"}, "service_tier": "default"}, []),
        ("responses", {"service_tier": "priority", "context_management": [{"type": "compaction"}]}, None),
        ("responses", {"reasoning": {"effort": "low", "summary": "detailed"}}, []),
        (
            "messages",
            {"speed": "fast", "inference_geo": "eu", "container": "c"},
            ["container", "inference_geo", "speed"],
        ),
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ["context_management"]),
        ("messages", {"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, ["mcp_servers"]),
        ("messages", {"thinking": {"type": "adaptive"}, "cache_control": {"type": "ephemeral"}}, []),
        ("messages", {"service_tier": "auto", "speed": "standard", "mcp_servers": []}, []),
    ],
)
async def test_hints_are_ignored_and_named(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], names: list[str] | None
) -> None:
    bodies: dict[str, Any] = {
        "chat": {"messages": [USER]},
        "responses": {"input": "hi"},
        "messages": {"messages": [USER], "max_tokens": 9},
    }
    url = "/v1/chat/completions" if path == "chat" else f"/v1/{path}"
    response = await post(client, url, **bodies[path], **fields)
    assert ignored(response) == (sorted(fields) if names is None else names)


async def test_functions_under_their_older_name(client: httpx.AsyncClient, engine: TemplateEngine) -> None:
    engine.script = lambda prompt, params: CALL.replace("team__spawn", "get_weather")
    called = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    turns = [USER, called, {"role": "function", "name": "get_weather", "content": "sunny"}]
    functions = [NESTED["function"]]
    response = await post(client, "/v1/chat/completions", messages=turns, functions=functions, function_call="auto")
    assert engine.template_kwargs["tools"] == [NESTED]
    assert engine.messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert (engine.messages[2]["role"], engine.messages[2]["content"]) == ("tool", "sunny")
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "function_call"
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Rome"})
    assert "tool_calls" not in choice["message"]
    text = (await post(client, "/v1/chat/completions", messages=turns, functions=functions, stream=True)).text
    choices = [json.loads(line[6:])["choices"][0] for line in text.split("\n") if line.startswith("data: {")]
    pieces = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
    assert (pieces[0]["name"], "".join(piece["arguments"] for piece in pieces)) == ("get_weather", call["arguments"])
    assert all("name" not in piece for piece in pieces[1:])
    assert choices[-1]["finish_reason"] == "function_call"
    named = {"name": "get_weather"}
    await post(client, "/v1/chat/completions", messages=turns, functions=functions, function_call=named)
    structured = engine.requests[-1][2].structured
    assert structured is not None
    assert "get_weather" in structured.source


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [STRICT], "response_format": {"type": "text"}}),
        ("/v1/chat/completions", {"messages": HELLO, "functions": [STRICT["function"]], "function_call": NAME}),
        ("/v1/responses", {"input": "hi", "tools": [{**FLAT, "strict": True}], "text": {"format": {"type": "text"}}}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "tools": [MINE]}),
        ("/api/chat", {"messages": HELLO, "tools": [STRICT]}),
    ],
)
async def test_a_grammar_of_tools_alone_is_refused_by_their_name(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.fail_after = (0, InvalidRequest("no such keyword", param="structured"))
    response = await client.post(path, json={"model": "fake", **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    field = "functions" if "functions" in fields else "tools"
    assert error == "tools: no such keyword" if path == "/api/chat" else error["param"] == field
