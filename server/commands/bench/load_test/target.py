"""The server under test: its model, the requests it is sent, and what goes wrong with them."""

import argparse
import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from configs.errors import UsageError

from .answer import Answer, BadAnswer, error_text
from .http_client import Address, ConnectionLost, HttpClient
from .names import COMPLETIONS

CHECK_INTERVAL = 0.5

Message = dict[str, Any]


class Ask(NamedTuple):
    """One request."""

    prompt: str | list[int] | list[Message]
    output_len: int


class Refused(Exception):
    """An answer other than 200."""


class Target:
    """Sends prompts to one endpoint of an OpenAI-style server."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        """Raises `UsageError` for a URL that is none."""
        try:
            address = Address.parse(url)
        except ValueError as error:
            raise UsageError(str(error)) from error
        self.url = url
        self.model = arguments.model
        self.endpoint = arguments.endpoint
        self._client = HttpClient(
            address._replace(path=address.path.removesuffix("/v1")),
            _headers(arguments),
            timeout=arguments.request_timeout_sec,
            tls=_careless_tls() if arguments.insecure else None,
        )
        self._fields = _fields(arguments)

    async def wait_until_ready(self, seconds: float) -> None:
        """Until the server answers a request for its models. Raises `UsageError` when it does not."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                listed = await self._get("/v1/models")
                break
            except Refused as error:
                if self.model is not None:  # a server need not list models
                    return
                raise UsageError(f"{self.url}/v1/models: {error}; give the model's name with --model") from error
            except (OSError, ConnectionLost, BadAnswer) as error:
                if time.monotonic() >= deadline:
                    hint = "start the server, or wait for it with --ready-check-timeout-sec 60"
                    raise UsageError(f"no server answers at {self.url} ({error}); {hint}") from error
                await asyncio.sleep(CHECK_INTERVAL)
        if self.model is None:
            models = listed.get("data") if isinstance(listed, dict) else None
            if not models:
                raise UsageError(f"{self.url}/v1/models lists no model; give its name with --model")
            self.model = models[0]["id"]

    async def check(self, ask: Ask) -> Answer:
        """The answer to one request. Raises `UsageError` with what the server says against it."""
        answer = Answer(time.perf_counter())
        await self.send(ask, answer)
        if answer.error is not None:
            raise UsageError(f"{self.url}{self.endpoint} does not answer a first request: {answer.error}")
        return answer

    async def send(self, ask: Ask, answer: Answer) -> None:
        """Fills in `answer`, whatever happens."""
        answer.started = time.perf_counter()
        try:
            status, refusal = await self._client.request("POST", self.endpoint, self.body(ask), answer.receive)
            if status != 200:
                raise Refused(f"HTTP {status}: {error_text(refusal)}")
            answer.finish()
        except TimeoutError:
            answer.error = f"no whole answer within {self._client.timeout:g} s"
        except (OSError, ConnectionLost, BadAnswer, Refused) as error:
            answer.error = str(error) or type(error).__name__
        if answer.error is not None:
            answer.end = time.perf_counter()

    def body(self, ask: Ask) -> bytes:
        fields = {"model": self.model, **self._fields}
        if self.endpoint == COMPLETIONS:
            fields |= {"prompt": ask.prompt, "max_tokens": ask.output_len}
        else:
            fields |= {"messages": as_messages(ask.prompt), "max_completion_tokens": ask.output_len}
        return msgspec.json.encode(fields)

    async def _get(self, path: str) -> Any:
        pieces: list[bytes] = []
        status, refusal = await self._client.request("GET", path, b"", lambda data, _: pieces.append(data))
        if status != 200:
            raise Refused(f"HTTP {status}: {error_text(refusal)}")
        try:
            return msgspec.json.decode(b"".join(pieces))
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"{path} is not JSON: {error}") from error

    def close(self) -> None:
        self._client.close()


def as_messages(prompt: str | list[int] | list[Message]) -> list[Message]:
    """A text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    assert all(isinstance(message, dict) for message in prompt), "token ids need /v1/completions"
    return [message for message in prompt if isinstance(message, dict)]


def _headers(arguments: argparse.Namespace) -> dict[str, str]:
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    return {**({"Authorization": f"Bearer {key}"} if key else {}), **dict(arguments.header or [])}


def _fields(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """What all requests share; `--extra-body` has the last word, and null takes a field away."""
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    if arguments.temperature is not None:
        fields["temperature"] = arguments.temperature
    fields |= arguments.extra_body or {}
    return {name: value for name, value in fields.items() if value is not None}


def _careless_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
