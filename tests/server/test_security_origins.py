"""Pages of other origins: preflights, the headers of answers, and what a page may not do."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL, running_server
from tests.server.fake_engine import FakeEngine

PAGE, OTHER = "https://page.example", "https://other.example"
ALLOWED, CREDENTIALS = "access-control-allow-origin", "access-control-allow-credentials"
PATH, BODY = "/v1/completions", {"prompt": "hi"}


def in_process(**settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(FakeEngine(), ServerConfig(**settings), MODEL))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")


async def preflight(client: httpx.AsyncClient, origin: str, path: str = PATH) -> httpx.Response:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return await client.options(path, headers={"origin": origin, **asks})


@pytest.mark.parametrize("key", [None, ("secret",)])
async def test_a_preflight_needs_no_key_and_the_request_does(key: tuple[str, ...] | None) -> None:
    async with in_process(allowed_origins=(PAGE,), api_key=key) as client:
        response = await preflight(client, PAGE)
        assert response.is_success
        assert response.headers[ALLOWED] == PAGE
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        assert response.headers["vary"] == "Origin"
        assert response.headers["x-request-id"]
        answer = await client.post(PATH, json=BODY, headers={"origin": PAGE})
        assert answer.status_code == (401 if key else 200)


async def test_a_preflight_of_another_origin() -> None:
    async with in_process(allowed_origins=(PAGE,), api_key=("secret",)) as client:
        for origin in (
            OTHER,
            "null",
            "http://page.example",
            "https://page.example:444",
            "https://page.example.evil",
            "",
        ):
            response = await preflight(client, origin)
            assert response.status_code == 403
            assert ALLOWED not in response.headers


async def test_options_that_are_no_preflight_need_the_key() -> None:
    async with in_process(allowed_origins=(PAGE,), api_key=("secret",)) as client:
        assert (await client.options(PATH)).status_code == 401
        assert (await client.options(PATH, headers={"origin": PAGE})).status_code == 401


@pytest.fixture
def url() -> Iterator[str]:
    with running_server(FakeEngine(), ServerConfig(allowed_origins=(PAGE,), api_key=("secret",))) as address:
        yield address


@pytest.mark.parametrize("origin", [PAGE, OTHER])
def test_answers_streams_and_errors_are_readable_by_allowed_pages_alone(url: str, origin: str) -> None:
    key = {"authorization": "Bearer secret"}
    cases: list[tuple[dict[str, Any], dict[str, str], int]] = [
        (BODY, key, 200),
        ({**BODY, "stream": True}, key, 200),
        ({**BODY, "n": 0}, key, 400),
        ({**BODY, "n": 0, "stream": True}, key, 400),
        (BODY, {}, 401),
    ]
    for body, headers, status in cases:
        response = httpx.post(url + PATH, json=body, headers={"origin": origin, **headers})
        assert response.status_code == status
        assert response.headers.get(ALLOWED) == (PAGE if origin == PAGE else None)
        assert response.headers["vary"] == "Origin"
        exposed = response.headers.get("access-control-expose-headers", "")
        assert ("x-request-id" in exposed) is (origin == PAGE)
    for path in ("/no/such", PATH):
        response = httpx.get(url + path, headers={"origin": origin, **key})
        assert response.status_code in (404, 405)
        assert (ALLOWED in response.headers) is (origin == PAGE)


async def test_all_origins() -> None:
    async with in_process(allowed_origins=("*",)) as client:
        assert (await preflight(client, PAGE)).headers[ALLOWED] == "*"
        answer = await client.post(PATH, json=BODY, headers={"origin": OTHER})
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*")
        assert "vary" not in answer.headers


async def test_credentials_are_for_named_origins_alone() -> None:
    """A browser takes no * together with them."""
    async with in_process(allowed_origins=("*",), allow_credentials=True) as client:
        for answer in (await preflight(client, PAGE), await client.get("/v1/models", headers={"origin": PAGE})):
            assert (answer.headers[ALLOWED], answer.headers[CREDENTIALS]) == (PAGE, "true")
            assert answer.headers["vary"] == "Origin"
    async with in_process(allowed_origins=("*",)) as client:
        assert CREDENTIALS not in (await preflight(client, PAGE)).headers


async def test_methods_and_headers_can_be_chosen() -> None:
    async with in_process(
        allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("authorization", "x-mine")
    ) as client:
        headers = (await preflight(client, PAGE)).headers
        assert headers["access-control-allow-methods"] == "GET"
        assert headers["access-control-allow-headers"] == "authorization, x-mine"


LOCAL = [
    *("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443", "http://tauri.localhost"),
    *("app://obsidian.md", "app://.", "file://", "tauri://localhost", "capacitor://localhost"),
    *("vscode-webview://0a1b", "vscode-file://vscode-app", "chrome-extension://abcdef", "moz-extension://12-34"),
]
FOREIGN = [
    *(PAGE, "null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "http://[::1", "x", "app"),
    *("https://app.example", "http://evillocalhost", "http://file", "https://evil.example/app://x", "web+app://x"),
]


@pytest.mark.parametrize(("origin", "allowed"), [*((one, True) for one in LOCAL), *((one, False) for one in FOREIGN)])
async def test_without_keys_only_pages_of_this_machine_may_use_the_server(origin: str, allowed: bool) -> None:
    """Else any page that somebody opens could use, and read, what runs on that person's machine."""
    async with in_process() as client:
        assert (await preflight(client, origin)).status_code == (204 if allowed else 403)
        answer = await client.post(PATH, json=BODY, headers={"origin": origin})
        assert answer.status_code == (200 if allowed else 403)
        assert (ALLOWED in answer.headers) is allowed
        assert (await client.get("/health", headers={"origin": origin})).status_code == 200


async def test_with_keys_all_pages_may_try() -> None:
    async with in_process(api_key=("secret",)) as client:
        assert (await preflight(client, PAGE)).headers[ALLOWED] == "*"
        answer = await client.post(PATH, json=BODY, headers={"origin": PAGE, "x-api-key": "secret"})
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://server.example:8000", "host": "server.example:8000"},
        {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "cross-site"},
        {},
    ],
)
async def test_the_servers_own_pages_links_and_programs_are_not_foreign(headers: dict[str, str]) -> None:
    async with in_process(host="0.0.0.0") as client:
        assert (await client.post(PATH, json=BODY, headers=headers)).status_code == 200


async def test_a_browser_that_says_cross_site_is_believed() -> None:
    headers = {"origin": PAGE, "host": "page.example", "sec-fetch-site": "cross-site"}
    async with in_process(host="0.0.0.0") as client:
        response = await client.post(PATH, json=BODY, headers=headers)
    assert response.status_code == 403
    assert "--allowed-origins" in response.json()["error"]["message"]


REBOUND = [
    "evil.com", "evil.com:8000", "EVIL.com.", "localhost.evil.com", "127.0.0.1.evil.com", "127.0.0.1@evil.com",
    "xlocalhost.com", "evil.com:80:80", "[::1", "1.2.3.4.5", "b\u00fccher.example", "a.b",
]  # fmt: skip
OWN = [
    "localhost", "LOCALHOST:8000", "localhost.", "app.localhost:3000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000",
    "[::1]", "192.168.1.7:8000", "octavo", "octavo:8000", "host.docker.internal:8000", "mac.local",
    socket.gethostname(), "",
]  # fmt: skip


@pytest.mark.parametrize("host", [*REBOUND, *OWN])
async def test_without_keys_on_loopback_only_names_of_this_machine_are_answered(host: str) -> None:
    """A page of a name that was made to point here would be the server's own to a browser."""
    raw = host.encode("utf-8")
    for settings in ({}, {"host": "::1"}, {"host": "localhost"}, {"allowed_origins": (PAGE,)}):
        async with in_process(**settings) as client:
            for name in ("origin", "x"):
                headers = {"host": raw, name: b"http://" + raw, "sec-fetch-site": b"same-origin"}
                for method, path in [("POST", PATH), ("GET", "/v1/models"), ("GET", "/v1/engine/live"), ("GET", "/no")]:
                    answer = await client.request(method, path, json=BODY, headers=headers)
                    refused = answer.status_code == 403
                    assert refused is (host in REBOUND)
                    assert not refused or answer.json()["error"]["code"] == "host_not_allowed"
            for path in ("/health", "/health/live", "/ping", "/"):
                assert (await client.get(path, headers={"host": raw})).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "192.168.1.7"},
        {"uds": "/tmp/socket"},
        {"api_key": ("secret",)},
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("https://evil.com:444",)},
    ],
)
async def test_names_do_not_matter_where_others_reach_the_server_or_it_has_keys(settings: dict[str, Any]) -> None:
    async with in_process(**settings) as client:
        answer = await client.post(PATH, json=BODY, headers={"host": "evil.com:8000", "x-api-key": "secret"})
        assert answer.status_code == 200
