"""The page's live view in Chromium: what is drawn and told is what the engine says."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.messages import Snapshot
from server.metrics.live import INTERVAL
from tests.server.fake_engine import FakeEngine
from tests.server.page.browser import Browser, opened_page
from tests.server.page.scenes import request, scene
from tests.server.test_live_server import live_server

TWO = scene(
    request("chatcmpl-0123456789abcdef0123456789abcdef-0", [1, 2, 3, 4], computed=56),
    request("other", [1, 2, 7]),
    cached=[10, 11, 12],
    num_prefix_queries=64,
    num_prefix_hits=32,
)
FIRST, SECOND = (one.request_id for one in TWO.requests)

BLOCKS_SEEN = """
const canvas = document.getElementById("blocks");
const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(canvas, 0, 0);
const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
const seen = {};
for (let y = 2; y < canvas.height; y += 3) {
  for (let x = 2; x < canvas.width; x += 3) {
    const at = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + x, clientY: at.top + y }));
    const found = /^Block (\\d+): (.*)\\.$/.exec(document.getElementById("inspect").textContent);
    if (!found) continue;
    const block = (seen[found[1]] ??= { text: found[2], colours: {} });
    const offset = 4 * (y * canvas.width + x);
    const colour = pixels.slice(offset, offset + 3).join();
    block.colours[colour] = (block.colours[colour] ?? 0) + 1;
  }
}
canvas.dispatchEvent(new PointerEvent("pointerleave"));
return seen;
"""
PLATE = "27,24,21"


def show(page: Browser, engine: FakeEngine, snapshot: Snapshot) -> None:
    """Wait until the page has drawn it."""
    engine.look = lambda: snapshot
    time.sleep(INTERVAL)
    looks = engine.num_looks
    end = time.monotonic() + 5
    while engine.num_looks < looks + 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    page.wait("document.querySelectorAll('.requests > li').length === arguments[0]", len(snapshot.requests))


@pytest.fixture
def view(page: Browser) -> Browser:
    page.script("location.hash = 'engine'")
    page.wait("document.getElementById('counts').textContent")
    return page


def shades(seen: dict[str, Any], block: int) -> set[str]:
    return set(seen[str(block)]["colours"]) - {PLATE}


def colours(seen: dict[str, Any], block: int) -> set[str]:
    """All of a block's that are more than an edge or a letter."""
    counts = seen[str(block)]["colours"]
    return {colour for colour, count in counts.items() if count > 0.15 * sum(counts.values())} - {PLATE}


def test_figures_and_requests(view: Browser, engine: FakeEngine) -> None:
    show(view, engine, TWO)
    tiles = view.text("#tiles")
    for part in ("running\n2", "waiting\n0", "5 of 32 blocks", "prefix found\n50 %", "preemptions\n0"):
        assert part in tiles
    counts = view.script("return [...document.querySelectorAll('#counts td')].map(one => one.textContent)")
    assert counts == ["3", "2", "3", "24"]
    label = view.script("return document.getElementById('blocks').getAttribute('aria-label')")
    assert "3 held by one request, 2 shared, 3 free with content, 24 empty" in label
    assert view.text(".requests > li:first-child").startswith("chat 01234")
    assert "16 + 41 tokens · 4 blocks" in view.text(".requests > li:first-child")
    title = view.script("return document.querySelector('.requests button').title")
    assert title == FIRST


def test_every_block_is_drawn_as_what_it_is(view: Browser, engine: FakeEngine) -> None:
    show(view, engine, TWO)
    time.sleep(0.6)  # what is new has ceased to flash
    seen = view.script(BLOCKS_SEEN)
    assert set(map(int, seen)) == set(range(33))
    assert seen["0"]["text"] == "reserved, never handed out"
    assert seen["3"]["text"] == "chat 01234 (place 3 of 4, 16 of 16 tokens)"
    assert seen["4"]["text"] == "chat 01234 (place 4 of 4, 8 of 16 tokens)"
    assert seen["7"]["text"] == "other (place 3 of 3, 16 of 16 tokens)"
    assert seen["2"]["text"].startswith("shared by 2: chat 01234 (place 2 of 4")
    assert seen["11"]["text"] == "free; its content can be found again"
    assert seen["20"]["text"] == "free and empty"
    [mine], [other], [cached], [empty] = (colours(seen, block) for block in (3, 7, 11, 20))
    assert len({mine, other, cached, empty}) == 4
    for shared in (1, 2):
        assert {mine, other} <= shades(seen, shared)
    assert mine in colours(seen, 4)  # as full as it is, and pale above
    assert len(colours(seen, 4)) == 2
    assert all(colours(seen, block) == {empty} for block in (5, 6, 8, 9, 13, 32))
    assert all(colours(seen, block) == {cached} for block in (10, 11, 12))


def test_preemption_is_seen_and_told(view: Browser, engine: FakeEngine) -> None:
    show(view, engine, TWO)
    after = scene(
        TWO.requests[0], request("other", [], preempted=1), cached=[7], num_preemptions=1, num_recomputed_tokens=0
    )
    show(view, engine, after)
    assert "other is preempted and gives up 3 blocks" in view.text("#log li:first-child")
    red = view.script(
        """const overlay = document.getElementById("overlay");
           const { data } = overlay.getContext("2d").getImageData(0, 0, overlay.width, overlay.height);
           let red = 0;
           for (let at = 0; at < data.length; at += 4) if (data[at] > 200 && data[at + 1] < 120 && data[at + 3]) red++;
           return red"""
    )
    assert red > 50
    assert view.script("return document.querySelector('.requests > li:last-child').className").startswith("waiting")
    assert "preempted" in view.text(".requests > li:last-child")
    assert "waiting\n1\nfor free blocks" in view.text("#tiles")
    assert "preemptions\n1" in view.text("#tiles")
    back = scene(TWO.requests[0], request("other", [1, 2, 7], preempted=1), num_preemptions=1)
    show(view, engine, back)
    assert "other runs, with 3 blocks, 2 shared with others, 1 found in the cache" in view.text("#log")
    show(view, engine, scene())
    assert "has ended; 4 blocks let go" in view.text("#log")


def test_nothing_flashes_for_those_who_want_stillness(view: Browser, engine: FakeEngine) -> None:
    view.prefer(reduced_motion="reduce")
    show(view, engine, TWO)
    show(view, engine, scene(TWO.requests[0], request("other", [], preempted=1), num_preemptions=1))
    drawn = view.script(
        """const overlay = document.getElementById("overlay");
           return overlay.getContext("2d").getImageData(0, 0, overlay.width, overlay.height).data.some(Boolean)"""
    )
    assert not drawn
    assert "preempted" in view.text("#log")


def test_a_request_can_be_followed(view: Browser, engine: FakeEngine) -> None:
    show(view, engine, TWO)
    view.click(".requests > li:last-child button")
    pressed = "[...document.querySelectorAll('.requests button')].map(one => one.getAttribute('aria-pressed')).join()"
    view.wait(f"{pressed} === 'false,true'")
    time.sleep(0.7)
    seen = view.script(BLOCKS_SEEN)
    view.press("Escape")
    view.wait(f"{pressed} === 'false,false'")
    before = view.script(BLOCKS_SEEN)
    for block in range(1, 33):
        is_mine = block in (1, 2, 7)
        assert (shades(seen, block) & shades(before, block) != set()) == is_mine, block


def test_blocks_by_keyboard(view: Browser, engine: FakeEngine) -> None:
    show(view, engine, TWO)
    view.script("document.getElementById('blocks').focus()")
    assert view.text("#inspect").startswith("Block 0: reserved")
    view.press("Right", times=7)
    assert view.text("#inspect").startswith("Block 7: other")
    view.press("Enter")
    view.wait("document.querySelector('[aria-pressed=true]')?.title === 'other'")
    view.press("End")
    assert view.text("#inspect") == "Block 32: free and empty."
    view.press("Escape")
    view.wait("!document.querySelector('[aria-pressed=true]')")


def test_ids_are_only_text(view: Browser, engine: FakeEngine) -> None:
    evil = "<img src=x onerror='window.hacked=1'>"
    show(view, engine, scene(request(evil, [1, 2])))
    show(view, engine, scene(request(evil, [], preempted=1)))
    assert view.script("return document.querySelector('.requests button').title") == evil
    assert view.script("return document.querySelectorAll('img').length") == 0
    assert view.script("return typeof window.hacked") == "undefined"


def test_the_state_of_the_engine(view: Browser, engine: FakeEngine) -> None:
    engine.status = "restarting"
    view.wait("document.getElementById('engine-notice').textContent === 'it is restarting'")
    assert view.script("return document.getElementById('status').dataset.status") == "restarting"
    engine.status = "ok"
    view.wait("document.getElementById('engine-notice').hidden")
    assert view.script("return document.getElementById('status').dataset.status") == "ok"


def test_nobody_is_asked_while_nobody_looks(view: Browser, engine: FakeEngine) -> None:
    def looks_within(seconds: float) -> int:
        before = engine.num_looks
        time.sleep(seconds)
        return engine.num_looks - before

    assert looks_within(3 * INTERVAL) > 0
    view.script("location.hash = 'chat'")
    time.sleep(2 * INTERVAL)
    assert looks_within(3 * INTERVAL) == 0
    for name in ("engine", "chat", "engine"):
        view.script("location.hash = arguments[0]; return new Promise(requestAnimationFrame)", name)
    time.sleep(INTERVAL)
    assert looks_within(3 * INTERVAL) > 0


def test_large_caches_are_drawn_in_time(view: Browser, engine: FakeEngine) -> None:
    num_blocks = 70_000
    tables = [list(range(first, num_blocks, 97)) for first in range(1, 60)]
    show(view, engine, scene(*(request(f"r{i}", table) for i, table in enumerate(tables)), num_blocks=num_blocks))
    view.wait("document.getElementById('inspect') && document.getElementById('blocks').height > 1000")
    box = view.script("return document.getElementById('map').getBoundingClientRect().height / innerHeight")
    assert box < 0.7
    milliseconds = view.script(
        """return Promise.all([import("/page/blocks.js"), import("/page/requests.js")])
             .then(([{ BlockMap }, { Hues }]) => {
               const holders = [];
               const request = { id: "a", ids: [] };
               for (let id = 1; id < 70000; id += 2) holders[id] = [{ request, position: 0, level: 1 }];
               const hues = new Hues();
               hues.update(["a"]);
               const own = document.createElement("div");
               const canvas = own.appendChild(document.createElement("canvas"));
               document.getElementById("engine").append(own);
               const overlay = own.appendChild(document.createElement("canvas"));
               const map = new BlockMap(canvas, overlay, {});
               const states = new Uint8Array(70000).map((_, id) => id % 2);
               const times = [1, 2].map(() => {
                 const begin = performance.now();
                 map.update({ states, holders, requests: [request], hues });
                 return performance.now() - begin;
               });
               own.remove();
               return times;
             })"""
    )
    assert milliseconds[0] < 2000
    assert milliseconds[1] < 300


def test_a_lost_server_is_told_and_found_again(view: Browser, engine: FakeEngine) -> None:
    view.script("window.kept = fetch; window.fetch = () => Promise.reject(new TypeError('no network'))")
    engine.is_dead = True  # which ends the stream
    view.wait("document.getElementById('engine-notice').textContent === 'The server cannot be reached.'")
    assert view.script("return document.getElementById('status').dataset.status") == "unreachable"
    engine.is_dead = False
    engine.look = lambda: TWO
    view.script("window.fetch = kept")
    view.wait("document.querySelectorAll('.requests > li').length === 2")
    assert view.script("return document.getElementById('engine-notice').hidden")
    assert view.script("return document.getElementById('status').dataset.status") == "ok"


def test_paging_sharing_and_preemption_of_the_real_engine(browser: Browser, tmp_path: Path, smollm2_path: Path) -> None:
    """Four requests with one prefix, more than a cache of 16 blocks can hold to their ends."""
    browser.resize(1400, 1000)
    with live_server(tmp_path / "log", "--kv-cache-tokens", "256") as server:
        server.wait_ready()
        page = opened_page(browser, server.url)
        page.click("#probabilities")
        page.write("#prompt", "What is the capital of France?")
        page.press("Enter")
        page.wait("document.querySelectorAll('.token').length > 3", patience=30)
        page.write("#traffic-count", "4")
        page.write("#traffic-tokens", "40")
        page.click("#traffic-start")
        page.wait("Number(document.querySelectorAll('#counts td')[1]?.textContent) > 0", patience=30)
        live = httpx.get(f"{server.url}/v1/engine/live", timeout=10).json()["engine"]
        assert {one["id"].rpartition("-")[0] for one in live["requests"] if one["id"].startswith("cmpl-")}
        page.wait_text("#log .preempted", "is preempted", patience=60)
        page.wait_text("#traffic-state", "4 of 4 answered", patience=90)
        page.wait("document.querySelectorAll('.requests > li').length === 0")
        happened = page.text("#log")
        assert "shared with others" in happened
        assert happened.count("has ended") >= 4
        cells = page.script("return [...document.querySelectorAll('#counts td')].map(one => Number(one.textContent))")
        assert cells[:2] == [0, 0]
        assert cells[2] > 0
        assert sum(cells) == 16
        last = httpx.get(f"{server.url}/v1/engine/live", timeout=10).json()["engine"]
        assert last["used_blocks"] == 0
        assert last["preemptions"] > 0
        assert f"preemptions\n{last['preemptions']}" in page.text("#tiles")
        browser.open("about:blank")
