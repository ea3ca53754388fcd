"""A client that openapi-python-client makes of the server's OpenAPI document."""

import os
import sys
from importlib import import_module
from pathlib import Path

import httpx
import pytest
from conftest import run


def test_a_generated_client_chats(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openapi.json").write_text(httpx.get(f"{url}/openapi.json", timeout=60).text)
    programs = Path(sys.executable).parent  # the generator runs ruff
    command = [programs / "openapi-python-client", "generate", "--path", "openapi.json", "--meta", "none"]
    run([*command, "--fail-on-warning"], tmp_path, PATH=f"{programs}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    models, client = import_module("octavo_client.models"), import_module("octavo_client").Client(url)
    chat = import_module("octavo_client.api.open_ai.chat_completions_v1_chat_completions_post")
    message = {"role": "user", "content": "Name a colour."}
    answer = chat.sync(client=client, body=models.ChatRequest.from_dict({"messages": [message], "max_tokens": 8}))
    assert isinstance(answer, models.ChatCompletion)
    assert answer.usage.completion_tokens == 8
    refused = chat.sync(client=client, body=models.ChatRequest.from_dict({"messages": [message], "n": -1}))
    assert isinstance(refused, models.ErrorResponse)
    assert refused.error.param == "n"
