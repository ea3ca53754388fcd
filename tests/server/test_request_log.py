"""What is logged: one line per request, in both forms, with its numbers and without its words."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from configs.settings import ServerConfig
from engine.log_lines import ConsoleLines, JsonLines, configure
from server.app import create_app
from server.metrics.records import current_request_id
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is put back as it was."""
    logger, hook = logging.getLogger(), sys.excepthook
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], sys.excepthook = handlers, hook
    logger.setLevel(level)


@pytest.fixture
def lines(root: logging.Logger) -> Iterator[list[dict[str, Any]]]:
    """What requests log, as JSON objects."""
    written: list[dict[str, Any]] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(json.loads(self.format(record)))

    handler = Keeps()
    handler.setFormatter(JsonLines("server", current_request_id))
    logger = logging.getLogger("octavo.requests")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield written
    logger.removeHandler(handler)
    logger.setLevel("NOTSET")


async def test_a_line_has_the_numbers_of_its_request(
    client: httpx.AsyncClient, engine: FakeEngine, lines: list[dict[str, Any]]
) -> None:
    engine.delay, engine.num_cached_tokens = 0.002, 2
    body = {"prompt": ["abc", "abcd"], "n": 2, "max_tokens": 5}
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    [line] = lines
    assert (line["level"], line["process"], line["logger"]) == ("info", "server", "octavo.requests")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["message"] == "POST /v1/completions 200"
    expected = {"request_id": "mine", "response_id": answer.json()["id"], "model": "fake", "finish_reason": "length"}
    expected |= {"choices": 4, "prompt_tokens": 4 + 5, "cached_tokens": 4, "output_tokens": 4 * 5, "preemptions": 0}
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["queue"] <= line["ttft"] <= line["e2e"] < 5
    assert line["e2e"] >= line["ttft"] + 4 * 0.002
    assert 0.002 <= line["itl"] < 0.1


@pytest.mark.parametrize("path", BODIES)
async def test_every_request_with_a_body_has_one_line(
    client: httpx.AsyncClient, lines: list[dict[str, Any]], path: str
) -> None:
    await client.post(path, json=BODIES[path])
    await client.post(path, content=b"{", headers={"content-type": "application/json"})
    assert [line["message"] for line in lines] == [f"POST {path} 200", f"POST {path} 400"]
    assert lines[1]["error"]


async def test_other_requests_have_none(client: httpx.AsyncClient, lines: list[dict[str, Any]]) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nothing"):
        await client.get(path)
    assert not lines


async def test_no_word_of_a_request_is_in_its_line(
    client: httpx.AsyncClient, engine: FakeEngine, lines: list[dict[str, Any]]
) -> None:
    secret = "SENTINEL"
    engine.script = lambda prompt, params: secret
    for path, body in BODIES.items():
        if "prompt" in body or "input" in body:
            await client.post(
                path, json={**body, "prompt" if "prompt" in body else "input": secret, "user": secret, "stop": secret}
            )
    engine.fail_after = (2, RuntimeError(secret))
    await client.post("/v1/completions", json={"prompt": secret, "model": secret})
    await client.post("/v1/completions", json={"prompt": secret})
    assert len(lines) >= 7
    assert secret not in json.dumps(lines)


async def test_a_stream_is_one_line_at_its_end(client: httpx.AsyncClient, lines: list[dict[str, Any]]) -> None:
    async with client.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as answer:
        await answer.aread()
    [line] = lines
    assert (line["output_tokens"], line["finish_reason"]) == (6, "stop")


def logged(form: logging.Formatter, message: str, **options: Any) -> str:
    """By a logger of its own: half a surrogate pair is nothing that a test's report can hold."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(form)
    logger = logging.Logger("test.forms")
    logger.addHandler(handler)
    logger.error(message, **options)
    return handler.stream.getvalue()


def test_both_forms_say_the_same() -> None:
    fields = {"fields": {"tokens": 7, "reason": "stop"}}
    console = logged(ConsoleLines(lambda: "abc"), "it ends", extra=fields)
    assert re.fullmatch(r"\d{4}-.* ERROR test\.forms: it ends request_id=abc tokens=7 reason=stop\n", console)
    line = json.loads(logged(JsonLines("engine", lambda: "abc"), "it ends", extra=fields))
    assert (line["message"], line["tokens"], line["request_id"], line["process"]) == ("it ends", 7, "abc", "engine")
    assert "request_id" not in logged(ConsoleLines(lambda: "-"), "it ends")
    assert "request_id" not in logged(JsonLines("engine", lambda: "-"), "it ends")


HOSTILE = [
    "a\nb", "a\r\nb", "\x1b[31mred", "\x9b31m", "\u2028", "\u2029", "\x85", "\0", "\x0b", "\x7f", "\u202e\u2066",
    "\u200f", "\ud800", "\U000e0001", "2026-11-30 23:59:59,000 INFO octavo.requests: POST /v1/completions 200 error=x",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_forges_a_line_or_steers_a_terminal(text: str) -> None:
    try:
        raise ValueError(f"first {text}\n{text}")
    except ValueError:
        options = {"exc_info": True, "stack_info": True, "extra": {"fields": {"response_id": text, "n": 1}}}
        console = logged(ConsoleLines(lambda: "abc"), f"it {text} ends", **options)
        record = logged(JsonLines("server", lambda: text), f"it {text} ends", **options)
    for written in (console, record):
        assert all(letter.isprintable() for letter in written.replace("\n", "")), written
    first, *others = console.splitlines()
    assert re.match(r"\d{4}-\S+ \S+ ERROR test\.forms: it ", first)
    assert [line[:4] for line in others] == ["    "] * len(others)
    assert "ValueError: first" in console
    names = re.findall(r'(\w+)=(?:"(?:[^"\\]|\\.)*"|[^\s"]+)', first.partition(" ends ")[2])
    assert names == ["request_id", "response_id", "n"]
    [line] = record.splitlines()
    assert json.loads(line)["message"] == f"it {text} ends"


@pytest.mark.parametrize("form", [ConsoleLines, lambda request_id: JsonLines("server", request_id)])
async def test_nothing_that_a_client_sends_forges_a_line(root: logging.Logger, engine: FakeEngine, form: Any) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(form(current_request_id))
    root.addHandler(handler)
    root.setLevel("DEBUG")
    app = create_app(engine, ServerConfig(), "model\n2026-11-30 23:59:59,000 FORGED \x1b[31m")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for text in HOSTILE[:-3]:
            header = {"x-request-id": text.encode("utf-8"), "traceparent": text.encode()}
            fields = {"request_id": text, "model": text, "user": text, "cache_salt": text, "stop": text, text: 1}
            for name in fields:
                for path, body in BODIES.items():
                    if path in ("/v1/completions", "/api/chat", "/v1/responses"):
                        await client.post(path, json={**body, name: fields[name]}, headers=header)
            await client.get(f"/v1/requests/{quote(text)}")
            engine.fail_after = (1, ZeroDivisionError(text))
            await client.post("/v1/completions", json={"prompt": text, "user": text})
            engine.fail_after = None
    lines = written.getvalue().split("\n")
    assert len(lines) > 100
    assert all(line.isprintable() for line in lines)
    assert {bool(re.match(r"\{|\d{4}-|    |$", line)) for line in lines} == {True}
    assert not any(re.match("2026-11-30 23:59:59", line) for line in lines)


def test_exceptions_and_odd_values_stay_one_line_of_json() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        text = logged(
            JsonLines("server", lambda: "-"),
            "first\nsecond",
            exc_info=True,
            extra={"fields": {"odd": {1j}, "path": io}},
        )
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["exception"].endswith("ValueError: two\nlines")
    assert line["message"] == "first\nsecond"


@pytest.mark.parametrize("form", ["console", "json"])
def test_configure_sets_level_form_and_last_words(
    root: logging.Logger, form: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    configure("warning", form, "engine")
    logging.getLogger("uvicorn.error").info("too little")
    logging.getLogger("uvicorn.error").warning("enough")
    try:
        raise KeyError("gone")
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    monkeypatch.setenv("TQDM_DISABLE", "")
    text = capsys.readouterr().err
    assert "too little" not in text
    if form == "json":
        assert [json.loads(line)["message"] for line in text.splitlines()] == ["enough", "the process ends"]
    else:
        assert "WARNING uvicorn.error: enough\n" in text
    assert "KeyError: 'gone'" in text


def test_lines_go_to_standard_error_as_it_is_then(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure("info", "console", "engine")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    root.warning("later")
    assert second.getvalue().endswith("later\n")
