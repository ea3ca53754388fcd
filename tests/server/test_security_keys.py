"""With API keys set, every route but those that tell of the server's health needs one."""

import base64
import contextlib
import hmac
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from configs.errors import SettingsError
from configs.settings import ServerConfig
from configs.sources import resolve
from server.app import create_app
from server.security import Unauthorized, check_security, read_keys
from tests.server.conftest import MODEL, running_server
from tests.server.described import ROUTES
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES, check_error

KEYS = ("first-key", "second-key")
HEALTH = {"/health", "/health/ready", "/health/live", "/ping"}
OPEN = HEALTH | {"/docs", "/openapi.json"}
REGISTERED = [(one.method, one.path) for one in ROUTES] + [
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/page/main.js"),
]


def in_process(config: ServerConfig) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(FakeEngine(), config, MODEL))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(ServerConfig(api_key=KEYS)) as http:
        yield http


def is_page(path: str) -> bool:
    """Files that know nothing of what is served: they have to be there before somebody can type a key."""
    return path == "/" or path.startswith("/page/")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), REGISTERED)
async def test_every_registered_route(client: httpx.AsyncClient, method: str, path: str) -> None:
    url = re.sub(r"\{[^}]*\}", "x", path)
    body: Any = BODIES.get(path)
    without = await client.request(method, url, json=body)
    with_key = await client.request(method, url, json=body, headers=bearer(KEYS[1]))
    assert with_key.status_code != 401
    if path in OPEN or is_page(path):
        assert without.status_code == 200
    else:
        check_error(without, 401)
        assert without.headers["www-authenticate"] == 'Bearer realm="Octavo"'
        for wrong in (
            "",
            "first-ke",
            "first-key2",
            "second-key,first-key",
            "FIRST-KEY",
            "\N{LATIN SMALL LETTER E WITH ACUTE}",
        ):
            response = await client.request(method, url, json=body, headers={"x-api-key": wrong.encode()})
            assert response.status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "/HEALTH",
        "/health//live",
        "/v1//models",
        "/no",
    ],
)
async def test_no_other_spelling_of_a_path_is_open(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"):
        request = client.build_request(method, "http://test")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert (await client.send(request)).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer  second-key "},
        {"x-api-key": "first-key"},
        {"api-key": "second-key"},
        {"authorization": "Bearer wrong", "x-api-key": "first-key"},
    ],
)
async def test_how_a_key_may_be_sent(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "first-key"},
        {"authorization": "Token first-key"},
        {"authorization": "Basic " + base64.b64encode(b"x:first-key").decode()},
        {"authorization": "Bearer"},
        {"cookie": "key=first-key"},
    ],
)
async def test_how_it_may_not_be_sent(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.get("/v1/models?key=first-key&api_key=first-key", headers=headers)
    assert response.status_code == 401


async def test_errors_are_in_the_shape_of_their_protocol(client: httpx.AsyncClient) -> None:
    error = check_error(await client.post("/v1/chat/completions", json={}), 401)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    answer = (await client.post("/v1/messages", json={})).json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")


async def test_metrics_may_be_opened() -> None:
    async with in_process(ServerConfig(api_key=KEYS, metrics_without_key=True)) as client:
        assert (await client.get("/metrics")).status_code != 401
        assert (await client.get("/metrics/")).status_code != 401
        assert (await client.get("/metrics/more")).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401


async def test_without_keys_everybody_is_let_in() -> None:
    async with in_process(ServerConfig()) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("whatever"))).status_code == 200


async def test_every_key_is_compared_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function that looks at all bytes, whose number does not depend on the key."""
    keys = read_keys(ServerConfig(api_key=("a", "b" * 100, "c")))
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counting(given: bytes, known: bytes) -> bool:
        compared.append((len(given), len(known)))
        return real(given, known)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for sent in (b"a", b"b" * 100, b"c", b"", b"x" * 10_000):
        compared.clear()
        with contextlib.suppress(Unauthorized):
            keys.check({b"x-api-key": sent})
        assert compared == [(32, 32)] * 3


@pytest.fixture
def url() -> Iterator[str]:
    with running_server(FakeEngine(), ServerConfig(api_key=KEYS)) as address:
        yield address


def test_the_openai_client(url: str) -> None:
    for key, status in (("second-key", None), ("wrong", 401)):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api:
            check_client(openai.AuthenticationError, status, lambda api=api: api.models.list())  # type: ignore[misc]


def test_the_anthropic_client(url: str) -> None:
    hello: Any = [{"role": "user", "content": "hi"}]
    for options, status in (
        ({"api_key": "first-key"}, None),
        ({"auth_token": "first-key"}, None),
        ({"api_key": "x"}, 401),
    ):
        with anthropic.Anthropic(base_url=url, max_retries=0, **options) as api:
            call = lambda api=api: api.messages.create(model=MODEL, max_tokens=5, messages=hello)  # noqa: E731
            check_client(anthropic.AuthenticationError, status, call)  # type: ignore[arg-type]


def check_client(error: type[Exception], status: int | None, call: Callable[[], object]) -> None:
    if status is None:
        call()
        return
    with pytest.raises(error) as caught:
        call()
    assert "API key is not accepted" in str(caught.value)


def accepted(config: ServerConfig, key: str) -> bool:
    try:
        read_keys(config).check({b"x-api-key": key.encode()})
    except Unauthorized:
        return False
    return True


def test_where_keys_come_from(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfile-1\n\n  file-2  \n")
    toml = tmp_path / "settings.toml"
    toml.write_text('api_key = ["toml-1", "toml-2"]\n')
    sources: list[tuple[dict[str, Any], list[str]]] = [
        ({"flags": {"api_key": ["a", "b,c"]}}, ["a", "b", "c"]),
        ({"flags": {"api_key": ['["a,b", "c"]']}}, ["a,b", "c"]),
        ({"environ": {"OCTAVO_API_KEY": "a, b"}}, ["a", "b"]),
        ({"environ": {"OCTAVO_API_KEY": "a", "OCTAVO_API_KEY_FILE": str(file)}}, ["a", "file-1", "file-2"]),
        ({"flags": {"api_key_file": str(file)}}, ["file-1", "file-2"]),
        ({"toml": toml}, ["toml-1", "toml-2"]),
    ]
    for source, keys in sources:
        config = resolve(ServerConfig, **source)
        assert all(accepted(config, key) for key in keys)
        assert not any(accepted(config, key) for key in ("", "#", "# of the team", "x", ",".join(keys) + "x"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"environ": {"OCTAVO_API_KEY": ""}}, ["OCTAVO_API_KEY", "length >= 1"]),
        ({"environ": {"OCTAVO_API_KEY": "sesame,,"}}, ["OCTAVO_API_KEY", "length >= 1"]),
        ({"environ": {"OCTAVO_API_KEY": '["sesame'}}, ["OCTAVO_API_KEY", "JSON"]),
        ({"flags": {"api_key": ['["sesame", 5]']}}, ["--api-key", "str"]),
        ({"flags": {"api_key": ["open sesame"]}}, ["api_key", "number 1", "no header can carry"]),
        ({"flags": {"api_key": ["a", "s\u00e9same"]}}, ["api_key", "number 2", "no header can carry"]),
        ({"flags": {"api_key_file": "/no/such"}}, ["--api-key-file /no/such", "No such file"]),
        ({"flags": {"api_key_file": "/"}}, ["--api-key-file /", "directory"]),
        ({"flags": {"api_key_file": "EMPTY"}}, ["holds no key"]),
        ({"flags": {"api_key_file": "BINARY"}}, ["not a text"]),
        ({"toml": "TOML"}, ["api_key", "length >= 1"]),
    ],
)
def test_keys_that_cannot_be_used_are_refused_without_being_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("# nothing\n\n")
    Path("BINARY").write_bytes(b"\xff\xfe")
    Path("TOML").write_text('api_key = ["sesame", ""]\n')
    with pytest.raises(SettingsError) as caught:
        check_security(resolve(ServerConfig, **source))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "same" not in str(caught.value)


def test_settings_hide_their_keys() -> None:
    config = ServerConfig(api_key=("sesame",), port=77)
    assert "sesame" not in f"{config!r} {config!s}"
    assert "port=77" in repr(config)


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("localhost", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.5", True),
        ("server.example", True),
        ("", True),
    ],
)
def test_a_server_that_is_open_to_others_says_so(host: str, is_open: bool) -> None:
    assert bool(check_security(ServerConfig(host=host))) is is_open
    assert check_security(ServerConfig(host=host, api_key=KEYS)) is None


def test_the_default_host_is_this_machine() -> None:
    assert check_security(ServerConfig()) is None
