"""Paths as clients write them: with slashes at the end, with and without `/v1`, and routes that there are not."""

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.described import ROUTES
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES

GETS = [one.path for one in ROUTES if one.method == "GET" and "{" not in one.path]


@pytest.mark.parametrize("path", BODIES)
async def test_a_slash_at_the_end_means_nothing(client: httpx.AsyncClient, path: str) -> None:
    for one in (path + "/", path + "//"):
        assert (await client.post(one, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize("path", [path for path in GETS if path not in ("/", "/v1/engine/live")])
async def test_a_slash_behind_what_is_read(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (await client.get(path + "/")).status_code == answer.status_code == 200


VERSIONED = [
    *("/chat/completions", "/completions", "/embeddings", "/responses", "/messages", "/messages/count_tokens"),
    *("/score", "/rerank"),
]


@pytest.mark.parametrize("path", VERSIONED)
async def test_v1_may_be_left_out_or_said_twice(client: httpx.AsyncClient, path: str) -> None:
    for one in (path, path + "/", "/v1/v1" + path):
        response = await client.post(one, json=BODIES["/v1" + path])
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", "/pooling"])
async def test_v1_may_stand_before_what_is_not_openais(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post("/v1" + path, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models", "/models/fake", "/v1/models/", "/v1/models/fake/", "/v1/health", "/health/"]
)
async def test_what_is_read_has_those_paths_too(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/responses/compact", "/v1/conversations", "/v1/responses/a/b", "/v1/models/fake", "/responses/compact"]
)
async def test_posting_to_no_route_is_not_told_of_methods(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={})
    assert response.status_code == 404
    assert "POST" in response.json()["error"]["message"]
    assert path.removeprefix("/v1") in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"), [("/metrics", 401), ("/v1/metrics/", 401), ("/v1/health/", 200), ("/models", 401)]
)
async def test_keys_hold_for_every_way_to_write_a_path(path: str, status: int) -> None:
    app = create_app(FakeEngine(), ServerConfig(api_key=("secret",)), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get(path)).status_code == status
