"""`octavo serve` as a process of its own, with the real engine and the bundled checkpoint."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {"--max-model-len": "256", "--max-num-seqs": "8"}


class LiveServer:
    """A started server. `wait_ready` polls it as a load balancer would."""

    def __init__(self, log: Path, *flags: str, model: str = "smollm2", prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the one behind it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        limits = [word for limit in LIMITS.items() if limit[0] not in flags for word in limit]
        command = [*prefix, sys.executable, "-m", "server.cli", "serve", model, "--config", "test", *limits, *flags]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> list[int]:
        """Statuses of /health until the first 200; 0 stands for a refused connection."""
        statuses: list[int] = []
        while not statuses or statuses[-1] != 200:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
            try:
                statuses.append(httpx.get(f"{self.url}/health").status_code)
            except httpx.ConnectError:
                statuses.append(0)
        return statuses

    def post(self, **fields: Any) -> dict[str, Any]:
        body = {"temperature": 0, "max_tokens": 24, **fields}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        body = {"temperature": 0, "max_tokens": 24, "stream": True, **fields}
        text = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).text
        return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]

    @contextlib.contextmanager
    def opened_stream(self, **fields: Any) -> Iterator[httpx.Response]:
        """A stream whose first token is there."""
        body = {"prompt": "x", "ignore_eos": True, "stream": True, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            yield response

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def live_server(log: Path, *flags: str, model: str = "smollm2", prefix: Sequence[str] = ()) -> Iterator[LiveServer]:
    server = LiveServer(log, *flags, model=model, prefix=prefix)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("live") / "log") as running:
        statuses = running.wait_ready()
        assert set(statuses[:-1]) <= {0}, "the port answered before the model was loaded"
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LiveServer]:
    """For tests that end the server."""
    with live_server(tmp_path / "log") as running:
        running.wait_ready()
        yield running


PROMPT = "Once upon a time, in a village by the sea, there lived"


def test_start_message(server: LiveServer) -> None:
    text = server.log.read_text()
    for word in ("smollm2", "LlamaForCausalLM", "float32", "attention", "KV cache", "start-up", "curl", server.url):
        assert word in text


def test_streamed_text_and_counts_equal_the_whole_answer(server: LiveServer) -> None:
    whole = server.post(prompt=PROMPT, logprobs=2)
    chunks = server.stream(prompt=PROMPT, logprobs=2, stream_options={"include_usage": True})
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    logprobs = whole["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == whole["usage"]["completion_tokens"] == 24
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for piece in streamed for token in piece["tokens"]] == logprobs["tokens"]
    assert [offset for piece in streamed for offset in piece["text_offset"]] == logprobs["text_offset"]


def test_stop_strings_cut_streams_and_whole_answers_alike(server: LiveServer) -> None:
    text = server.post(prompt=PROMPT)["choices"][0]["text"]
    for stop in (text[9:21], text[12:14], text[3], "\x00" * 30):
        expected = text.split(stop)[0]
        whole = server.post(prompt=PROMPT, stop=stop)["choices"][0]
        chunks = server.stream(prompt=PROMPT, stop=stop)
        assert whole["text"] == expected
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert whole["finish_reason"] == ("stop" if stop in text else "length")
        kept = server.post(prompt=PROMPT, stop=stop, include_stop_str_in_output=True)["choices"][0]
        assert kept["text"] == (expected + stop if stop in text else text)


def test_choices_equal_their_prompts_alone(server: LiveServer) -> None:
    prompts = [PROMPT, "The sky", "2 + 2 =", "def main():"]
    alone = [server.post(prompt=prompt, logprobs=1)["choices"][0] for prompt in prompts]
    together = server.post(prompt=prompts, logprobs=1, n=2)["choices"]
    assert [choice["index"] for choice in together] == list(range(8))
    for choice in together:
        single = alone[choice["index"] // 2]
        assert choice["text"] == single["text"]
        assert choice["logprobs"]["tokens"] == single["logprobs"]["tokens"]


def test_the_context_is_the_limit(server: LiveServer) -> None:
    fits = server.post(prompt=[500] * 255, max_tokens=1)
    assert fits["usage"]["prompt_tokens"] == 255
    for prompt, max_tokens in (([500] * 256, 1), ([500] * 255, 2), ([500] * 10_000, None), (PROMPT * 100, 1)):
        for streamed in (False, True):
            body = {"prompt": prompt, "max_tokens": max_tokens, "stream": streamed}
            response = httpx.post(f"{server.url}/v1/completions", json=body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
            assert "256" in error["message"] or "255" in error["message"]


@pytest.mark.parametrize("prompt", [[49152], [10**9, 1], [-1], [2**80]])
def test_ids_outside_the_vocabulary(server: LiveServer, prompt: list[int]) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    server.post(prompt="still alive", max_tokens=1)


def test_chat_with_the_openai_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        whole = api.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "What is 2+2?"}], temperature=0, max_tokens=24
        )
        parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}]}]
        chunks = api.chat.completions.create(model="smollm2", messages=parts, temperature=0, max_tokens=24, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text
    assert "4" in text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(("},
        {"properties": {f"p{number}": {"description": "x" * 100} for number in range(10_000)}},
    ],
    ids=["type", "circle", "reference", "pattern", "size"],
)
def test_a_schema_that_cannot_be_used_ends_its_request_alone(server: LiveServer, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema}}
    with server.opened_stream(max_tokens=20) as stream:
        for streamed in (False, True):
            body = {"prompt": "x", "response_format": wanted, "stream": streamed}
            response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"


def test_costly_grammars_end_alone_while_others_are_compiled(server: LiveServer) -> None:
    """Wide patterns in long chains: each would take minutes."""

    def constrained(pattern: str) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"json": {"type": "string", "pattern": pattern}}}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(8) as threads:
        endless = [threads.submit(constrained, f"(?:(?:[a{letter}]?){{99}}){{90}}") for letter in "bcdef"]
        time.sleep(0.5)
        start = time.monotonic()
        assert server.post(prompt="x", structured_outputs={"regex": "[a-f]{3}"})["choices"][0]["text"]
        assert time.monotonic() - start < 10
        answers = [each.result() for each in endless]
    assert {answer.status_code for answer in answers} <= {400, 503}
    for answer in answers:
        error, is_busy = answer.json()["error"], answer.status_code == 503
        assert error["code" if is_busy else "param"] == ("compiler_busy" if is_busy else "structured_outputs")
        assert is_busy == ("retry-after" in answer.headers)
    assert constrained("(?:[^a]b?){2,99}").status_code == 200
    assert server.post(prompt="x")["choices"][0]["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-z]+", "allowed_token_ids": [17]},
        {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [17]},
        {"guided_grammar": 'start: "a"', "allowed_token_ids": [17], "stream": True},
    ],
)
def test_restrictions_that_contradict_each_other_are_the_clients_mistake(
    server: LiveServer, fields: dict[str, Any]
) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **fields}, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "no token is allowed" in error["message"]
    assert error["param"] in fields


def test_an_answer_follows_its_schema(server: LiveServer) -> None:
    """Also one that refers to itself, and one with a format that nobody knows."""
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "format": "unheard-of"}, "age": {"type": "integer", "minimum": 1}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    nested = {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, {"enum": ["leaf"]}]}
    for schema in (person, nested):
        wanted = {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema}}
        choice = server.post(prompt="A person as JSON:", response_format=wanted, max_tokens=60)["choices"][0]
        assert choice["finish_reason"] == "stop"
        answer = json.loads(choice["text"])
        if schema is person:
            assert answer.keys() == {"name", "age"}
            assert isinstance(answer["name"], str)
            assert answer["age"] >= 1
        else:
            assert answer == "leaf" or isinstance(answer, list)


def test_seeded_choices_can_be_reproduced(server: LiveServer) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 8}
    first, second = ([choice["text"] for choice in server.post(**fields)["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1


def test_sigterm_lets_streams_finish(own_server: LiveServer) -> None:
    children = own_server.children()
    with contextlib.ExitStack() as open_streams:
        streams = [open_streams.enter_context(own_server.opened_stream(max_tokens=60)) for _ in range(3)]
        own_server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            lines = [line for line in stream.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(timeout=10) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    socket.create_server(("127.0.0.1", own_server.port)).close()


def test_sigint_ends_in_time_though_a_client_never_reads(tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        own_server = opened.enter_context(live_server(tmp_path / "log", "--shutdown-timeout", "2"))
        own_server.wait_ready()
        stuck = opened.enter_context(socket.create_connection(("127.0.0.1", own_server.port)))
        opened.enter_context(httpx.Client()).get(f"{own_server.url}/health")  # stays idle
        body = json.dumps({"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 64}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        stuck.sendall(head.encode() + body)
        time.sleep(0.5)
        own_server.process.send_signal(signal.SIGINT)
        assert own_server.process.wait(timeout=10) == 0


def test_a_core_that_is_killed_is_soon_replaced(own_server: LiveServer) -> None:
    """The weights are in the page cache, from which they are mapped."""
    expected = own_server.post(prompt=PROMPT)["choices"]
    [core, *_] = own_server.children()
    with own_server.opened_stream(max_tokens=250) as stream:
        os.kill(core.pid, signal.SIGKILL)
        lines = [line for line in stream.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    while (
        answer := httpx.post(f"{own_server.url}/v1/completions", json={"prompt": "x"}, timeout=20)
    ).status_code == 503:
        time.sleep(float(answer.headers["retry-after"]))
    assert own_server.post(prompt=PROMPT)["choices"] == expected
    assert httpx.get(f"{own_server.url}/health").status_code == 200
