"""The real server with checkpoints of which a part is wrong: what can be answered is answered."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.test_checkpoints_hf_folder import edit_json
from tests.engine.test_input_processor import TOOL_USE, TOOLS, byte_level
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import CHAT_TEMPLATE, tiny_model, write_tiny
from tests.server.test_live_server import LiveServer, live_server

HELLO = [{"role": "user", "content": "Hello"}]


def chat(server: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **fields}, timeout=60)


@pytest.fixture(scope="module")
def folder_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The template does not parse, the sampling defaults are out of range, and texts end where turns do not."""
    folder = tmp_path_factory.mktemp("folder")
    write_tiny(folder)
    edit_json(folder / "generation_config.json", temperature="0.7", top_p=0.0, eos_token_id="q")
    edit_json(folder / "tokenizer_config.json", chat_template="{% for %}")
    with live_server(folder / "log", model=str(folder)) as running:
        running.wait_ready()
        yield running


def test_values_that_cannot_be_used_are_named_at_start_and_spoil_no_request(folder_server: LiveServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    response = httpx.post(f"{folder_server.url}/v1/completions", json=body, timeout=60)
    assert response.json()["usage"]["completion_tokens"] == 3
    log = folder_server.log.read_text()
    for entry in ('temperature "0.7"', "top_p 0.0", 'eos_token_id "q"'):
        assert f"generation_config.json: {entry}" in log


def test_a_template_that_does_not_parse_refuses_chats_alone(folder_server: LiveServer) -> None:
    response = chat(folder_server)
    assert response.status_code == 400
    assert "chat template cannot be used" in response.json()["error"]["message"]
    embeddings = httpx.post(f"{folder_server.url}/v1/embeddings", json={"input": "Hello"}, timeout=60)
    assert embeddings.status_code == 200


@pytest.fixture(scope="module")
def gguf_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The file names another token as the end of a text than the one with which its template ends a turn."""
    folder = tmp_path_factory.mktemp("gguf")
    templates = {"tokenizer.chat_template": CHAT_TEMPLATE, "tokenizer.chat_template.tool_use": TOOL_USE}
    vocabulary = byte_level() | {"tokenizer.ggml.eos_token_id": 50}
    write_gguf(folder / "m.gguf", tiny_model(vocab_size=99), top_metadata=vocabulary | templates)
    with live_server(folder / "log", model=str(folder / "m.gguf")) as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("end", [0, 2, 50])
def test_an_answer_ends_at_each_token_that_ends_a_turn(gguf_server: LiveServer, end: int) -> None:
    choice = chat(gguf_server, max_tokens=9, logit_bias={end: 100}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert not choice["message"]["content"]
    choice = chat(gguf_server, max_tokens=9, logit_bias={60: 100}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_chats_with_tools_are_rendered_by_their_own_template(gguf_server: LiveServer) -> None:
    def num_tokens(**fields: Any) -> int:
        return int(chat(gguf_server, max_tokens=1, **fields).json()["usage"]["prompt_tokens"])

    assert num_tokens(tools=TOOLS) == num_tokens() + len("weather: <tool_call>")
