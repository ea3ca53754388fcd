"""Reasoning parts of a real model whose markers are plain text: their budget, and the stop strings behind them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_live_server import LiveServer, live_server

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{# '</think>\\n\\n' #}"""
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
IM_END = "<|im_end|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("reasoning")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    with live_server(folder / "log", "--chat-template", str(template)) as running:
        running.wait_ready()
        yield running


def post(server: LiveServer, route: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{route}", json={"model": "smollm2", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def chat(server: LiveServer, *, inside: bool = True, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 40, "return_token_ids": True, **fields}
    body["chat_template_kwargs"] = {"enable_thinking": inside}
    return dict(post(server, "/v1/chat/completions", **body)["choices"][0])


@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_the_budget_ends_the_reasoning(server: LiveServer, budget: int) -> None:
    choice = chat(server, thinking_token_budget=budget)
    message = choice["message"]
    free = chat(server)
    assert not free["message"]["content"]  # the model would never end it
    assert choice["token_ids"][:budget] == free["token_ids"][:budget]
    assert message["content"]
    assert "think>" not in message["content"] + message.get("reasoning_content", "")
    assert free["message"]["reasoning_content"].startswith(message.get("reasoning_content", ""))


def test_the_budget_of_messages_is_the_same(server: LiveServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    answer = post(server, "/v1/messages", messages=QUESTION, max_tokens=40, temperature=0, thinking=thinking)
    kinds = {block["type"]: block for block in answer["content"]}
    assert list(kinds) == ["thinking", "text"]
    expected = chat(server, thinking_token_budget=5)["message"]
    assert kinds["thinking"]["thinking"] == expected["reasoning_content"]
    assert kinds["text"]["text"] == expected["content"]


@pytest.mark.parametrize("stop", ["e", " ", "\n", ["no such text", "a"]])
def test_stop_strings_count_behind_the_reasoning(server: LiveServer, stop: Any) -> None:
    free = chat(server, thinking_token_budget=12)["message"]
    stopped = chat(server, thinking_token_budget=12, stop=stop)
    found = stop if isinstance(stop, str) else stop[-1]
    assert stopped["message"]["reasoning_content"] == free["reasoning_content"]
    assert (stopped["message"]["content"] or "") == free["content"].split(found)[0]
    is_found = found in free["content"]
    assert stopped["finish_reason"] == ("stop" if is_found else "length")
    assert stopped.get("stop_reason") == (found if is_found else None)


def test_without_a_reasoning_part_stop_strings_count_at_once(server: LiveServer) -> None:
    free = chat(server, inside=False)["message"]["content"]
    stopped = chat(server, inside=False, stop="e")
    assert (stopped["message"]["content"], stopped["stop_reason"]) == (free.split("e")[0], "e")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_that_spells_a_special_token_ends_the_answer_there(server: LiveServer, ignore_eos: bool) -> None:
    """Texts leave the token out; it is what ends the model's turn, or is made likely here."""
    likely = {"logit_bias": {"2": 100}, "min_tokens": 0, "ignore_eos": ignore_eos, "max_tokens": 9, "temperature": 0}
    body = {"messages": QUESTION, **likely}
    whole = post(server, "/v1/chat/completions", **body, stop=["x", IM_END])
    choice = whole["choices"][0]
    assert (choice["message"]["content"] or "", choice["finish_reason"], choice["stop_reason"]) == ("", "stop", IM_END)
    assert whole["usage"]["completion_tokens"] == 1
    kept = post(server, "/v1/chat/completions", **body, stop=IM_END, include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == IM_END
    completion = post(server, "/v1/completions", prompt="The sea", **likely, stop=IM_END)["choices"][0]
    assert (completion["text"], completion["finish_reason"], completion["stop_reason"]) == ("", "stop", IM_END)


def test_special_stops_of_other_protocols(server: LiveServer) -> None:
    """The model ends this turn by itself within its tokens: with the stop, the answer says by what."""
    question = [{"role": "user", "content": "Say hi."}]
    body = {"messages": question, "max_tokens": 120, "temperature": 0}
    assert post(server, "/v1/messages", **body)["stop_reason"] == "end_turn"
    answer = post(server, "/v1/messages", **body, stop_sequences=["Human:", IM_END])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", IM_END)
    options = {"stop": [IM_END, "<|im_start|>"], "temperature": 0, "num_predict": 120}
    ollama = post(server, "/api/chat", messages=question, options=options, stream=False)
    assert ollama["done_reason"] == "stop"
    assert IM_END not in ollama["message"]["content"]
