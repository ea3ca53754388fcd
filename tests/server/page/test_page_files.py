"""The page's files as they are served, and what may not be in them."""

import re
from pathlib import Path

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from server.page import FOLDER, INDEX, TYPES
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine

NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
TEXTS = {name: (FOLDER / name).read_text() for name in NAMES}
SCRIPTS = "\n".join(text for name, text in TEXTS.items() if name.endswith(".js"))


def path_of(name: str) -> str:
    return "/" if name == INDEX else f"/page/{name}"


def client_of(config: ServerConfig) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(FakeEngine(), config, MODEL), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize("name", NAMES)
async def test_files_are_served_as_they_are(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(path_of(name), headers=BROWSER)
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[Path(name).suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    again = await client.get(path_of(name), headers={**BROWSER, "if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == response.headers["etag"]
    changed = await client.get(path_of(name), headers={**BROWSER, "if-none-match": '"of another version"'})
    assert changed.status_code == 200


async def test_files_are_counted_under_one_route(client: httpx.AsyncClient) -> None:
    await client.get("/page/main.js")
    assert 'route="/page/{file}",status="200"} 1.0' in (await client.get("/metrics")).text


async def test_every_file_has_a_tag_of_its_own(client: httpx.AsyncClient) -> None:
    tags = {(await client.get(path_of(name), headers=BROWSER)).headers["etag"] for name in NAMES}
    assert len(tags) == len(NAMES)


@pytest.mark.parametrize("name", [INDEX, "main.js"])
async def test_browsers_are_told_to_run_nothing_else(client: httpx.AsyncClient, name: str) -> None:
    policy = (await client.get(path_of(name), headers=BROWSER)).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'none'", "'self'"}
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"


async def test_programs_that_look_at_the_root_get_json(client: httpx.AsyncClient) -> None:
    for accept in ("application/json", "*/*", "text/plain"):
        response = await client.get("/", headers={"accept": accept})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert "Accept" in response.headers["vary"]
        for path in (response.json()["openapi"], response.json()["health"]):
            assert (await client.get(path)).status_code == 200
    head = await client.head("/")  # what Ollama's command line sends to see that somebody is there
    assert head.status_code == 200


async def test_the_page_is_for_everybody_and_what_it_shows_is_not() -> None:
    async with client_of(ServerConfig(api_key=("secret",), served_model_name=("hush",))) as client:
        for name in NAMES:
            assert (await client.get(path_of(name), headers=BROWSER)).status_code == 200
        entrance = await client.get("/")
        assert entrance.status_code == 200
        assert MODEL not in entrance.text.replace("Octavo", "")
        for path in ("/v1/engine/live", "/server_info", "/tokenizer_info"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200


async def test_a_server_can_do_without_the_page() -> None:
    async with client_of(ServerConfig(page=False)) as client:
        response = await client.get("/", headers=BROWSER)
        assert response.headers["content-type"] == "application/json"
        assert (await client.get("/page/main.js")).status_code == 404


async def test_nothing_but_the_files_can_be_had(client: httpx.AsyncClient) -> None:
    for path in ("/page/", "/page", "/page/files.py", "/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert (await client.get(path, headers=BROWSER)).status_code == 404
    assert (await client.post("/page/main.js")).status_code == 405


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_place(name: str) -> None:
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", TEXTS[name])
    assert [one for one in addresses if not one.startswith("http://www.w3.org/2000/svg")] == []
    assert not re.search(r"@import|\bfonts?\.|\bcdn\b|data:\w+/", TEXTS[name])


def test_text_never_becomes_markup() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc|\.html\("
    assert not re.search(unsafe, SCRIPTS)
    assert not re.search(r"""setAttribute\(["'](style|href|src|on)""", SCRIPTS)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", TEXTS[INDEX])


def test_scripts_and_document_fit_each_other() -> None:
    ids = re.findall(r'\bid="([\w-]+)"', TEXTS[INDEX])
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([\w-]+)"\)', SCRIPTS)) <= set(ids)
    pointed_at = re.findall(r'(?:aria-labelledby|aria-describedby|for|href)="#?([\w -]+)"', TEXTS[INDEX])
    assert {one for several in pointed_at for one in several.split()} <= set(ids)
    imported = set(re.findall(r'from "\./([\w.]+)"', SCRIPTS)) | set(re.findall(r'"/page/([\w.]+)"', TEXTS[INDEX]))
    assert imported == set(NAMES) - {INDEX}


def test_the_page_is_small_and_its_files_readable() -> None:
    assert sum(len(text.encode()) for text in TEXTS.values()) < 120_000
    for name, text in TEXTS.items():
        assert len(text.splitlines()) <= 400, name
        assert max(map(len, text.splitlines())) <= 120, name
