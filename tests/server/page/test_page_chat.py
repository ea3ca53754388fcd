"""The page's chat in Chromium, in front of an engine whose answers are known."""

import json
import time
from pathlib import Path

import pytest

from configs.errors import Unavailable
from configs.settings import ServerConfig
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine
from tests.server.page.browser import Browser, opened_page

ANSWER = ".message.assistant:last-child .text"
IDLE = "!document.querySelector('[data-busy]')"
LONG_NAME = "a-model-whose-name-is-far-too-long-for-any-telephone-of-this-world-Q4_K_M"


def send(page: Browser, text: str, *, wait: bool = True) -> None:
    page.write("#prompt", text)
    page.press("Enter")
    page.wait("document.querySelector('.message.assistant')")
    if wait:
        page.wait(IDLE)


def wait_for_aborts(engine: FakeEngine, number: int) -> None:
    """The page is idle at once; the server learns of it when the connection closes."""
    deadline = time.monotonic() + 5
    while len(engine.aborted) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(engine.aborted) == number


def test_an_answer_with_its_figures(page: Browser, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 3
    send(page, "hello")
    assert page.text(ANSWER) == "<hello>"
    assert page.text(".message.user .text") == "hello"
    stats = page.text(".message.assistant .stats")
    for part in ("first token after", "tokens/s", "8 tokens", "prompt 5, 3 of them cached", "ended by itself"):
        assert part in stats
    assert page.script("return document.activeElement.id") == "prompt"
    assert page.script("return document.getElementById('prompt').value") == ""


def test_an_answer_comes_piece_by_piece_and_can_be_stopped(page: Browser, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "word " * 500
    engine.delay = 0.005
    send(page, "go", wait=False)
    page.wait("document.querySelector(arguments[0])?.textContent.length > 20", ANSWER)
    assert page.text("#halt") == "Stop"
    page.press("Escape")
    page.wait(IDLE)
    written = page.text(ANSWER)
    assert 20 < len(written) < 2500
    assert "stopped by you" in page.text(".message.assistant .stats")
    wait_for_aborts(engine, 1)
    send(page, "more", wait=False)
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    page.wait("document.querySelector(arguments[0])?.textContent.length > 0", ANSWER)
    page.click("#halt")
    page.wait(IDLE)
    wait_for_aborts(engine, 2)


def test_models_cannot_run_anything(page: Browser, engine: FakeEngine) -> None:
    evil = (
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
        " **<b>bold</b>** [link](javascript:hacked=1) `<i>`\n\n<iframe src='javascript:1'></iframe>"
    )
    engine.script = lambda prompt, params: evil
    page.click("#probabilities")
    send(page, "<img src=y onerror='window.hacked = 2'>")
    shown = page.text(ANSWER)
    for piece in ("<script>window.hacked = 1</script>", "<b>bold</b>", "[link](javascript:hacked=1)", "<iframe src="):
        assert piece in shown
    kinds = page.script("return [...document.querySelectorAll('#messages *')].map(one => one.tagName)")
    assert not {"SCRIPT", "IMG", "IFRAME", "A"} & set(kinds)
    assert page.script("return document.querySelectorAll('#messages .text b').length") == 0
    assert page.script("return typeof window.hacked") == "undefined"
    refused = "try { document.body.innerHTML = '<p>'; return 'taken' } catch (error) { return error.name }"
    assert page.script(refused) == "TypeError"
    assert any("TrustedHTML" in one for one in page.complaints())


def test_markdown(page: Browser, engine: FakeEngine) -> None:
    text = (
        "# Title\n\nOne **bold** and *slanted* `code` with 2 * 3 * 4 and snake_case_name.\nSecond line\n\n"
        "1. first\n2. second\n   - inner\n\n> said\n\n```python\ndef f():\n    return '**'\n```\nend"
    )
    engine.script = lambda prompt, params: text
    send(page, "x")
    outline = "return [...document.querySelector(arguments[0]).children].map(one => [one.tagName, one.textContent])"
    shown = page.script(outline, ANSWER)
    assert [tag for tag, _ in shown] == ["H3", "P", "OL", "BLOCKQUOTE", "PRE", "P"]
    assert shown[0][1] == "Title"
    assert shown[1][1] == "One bold and slanted code with 2 * 3 * 4 and snake_case_name.Second line"
    assert shown[4][1] == "def f():\n    return '**'Copy"
    inner = "return document.querySelector(arguments[0]).innerText"
    assert page.script(inner, f"{ANSWER} ol > li:nth-child(2) > ul > li") == "inner"
    for tag, content in {"strong": "bold", "em": "slanted", "code": "code"}.items():
        assert page.script(inner, f"{ANSWER} p {tag}") == content


def test_streamed_markdown_is_that_of_the_whole(page: Browser) -> None:
    """Drawn anew at each letter, and once."""
    source = (
        "A **b** `c`\n- x\n  y\n- z\n\n1. q\n\ntext\n```\nif a:\n\n  b\n```\n> q\n> r\n---\n## H ##\n*em* ***both***"
    )
    same = page.script(
        """return Promise.all([import("/page/message.js")]).then(([{ MessageView }]) => {
             const grown = { role: "assistant", content: "" };
             const view = new MessageView(grown, []);
             const differing = [];
             for (const letter of arguments[0]) {
               grown.content += letter;
               view.update(false);
               const whole = new MessageView({ role: "assistant", content: grown.content }, []);
               if (!view.text.isEqualNode(whole.text)) differing.push(grown.content);
             }
             return differing;
           })""",
        source,
    )
    assert same == []


def test_probabilities_of_a_token_on_hover_and_by_keyboard(page: Browser, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "abc ok"
    page.click("#probabilities")
    send(page, "x")
    assert engine.requests[-1][2].logprobs == 5
    tokens = page.script("return [...document.querySelectorAll('.token')].map(one => one.textContent)")
    assert tokens == list("abc ok")
    page.hover(".token:nth-child(2)")
    page.wait("!document.getElementById('tip').hidden")
    assert "60.7 %" in page.text("#tip")
    page.hover("#prompt")
    page.wait("document.getElementById('tip').hidden")
    page.script("document.querySelector('.token').focus()")
    page.press("Right", times=2)
    assert page.script("return document.activeElement.textContent") == "c"
    assert page.script("return document.activeElement.getAttribute('aria-describedby')") == "tip"
    assert page.text("#tip").startswith("c")
    page.press("Escape")
    assert page.script("return document.getElementById('tip').hidden")
    page.press("End")
    assert page.script("return document.activeElement.textContent") == "k"


def test_tokens_find_their_text(page: Browser) -> None:
    """Characters of several tokens, tokens that show nowhere, text that comes late."""
    found = page.script(
        """return import("/page/tokens.js").then(({ Alignment }) => {
             const bytes = text => new TextEncoder().encode(text);
             const emoji = bytes("🦄");
             const parts = [emoji.slice(0, 2), emoji.slice(2)];
             const tokens = ["<think>", " so", "</think>", "\\n\\n", "Hi", ...parts, " you", "<end>"];
             const alignment = new Alignment();
             const text = "so" + "Hi🦄 you";
             tokens.forEach((token, index) => {
               alignment.add([{ bytes: typeof token === "string" ? bytes(token) : token }]);
               alignment.advance(text.slice(0, Math.max(0, index - 1)), false);
             });
             alignment.advance(text, true);
             return alignment.pieces(0, text.length).map(({ start, end, tokens }) => [text.slice(start, end), tokens]);
           })"""
    )
    assert found == [["so", [1]], ["Hi", [4]], ["🦄", [5, 6]], [" you", [7]]]


def test_parameters_reach_the_engine_and_refusals_their_field(page: Browser, engine: FakeEngine) -> None:
    page.click("#parameters summary")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "max_tokens": "4"}.items():
        page.write(f"[name={name}]", value)
    page.write("[name=seed]", "11")
    page.write("#stop-strings", "zz\n\\n\\n")
    page.write("#system", "Be brief.")
    send(page, "hello")
    _, prompt, params, *_ = engine.requests[-1]
    assert bytes(prompt) == b"Be brief.|hello"
    given = (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens, params.seed)
    assert given == (0.5, 0.9, 7, 0.1, 4, 11)
    assert list(params.stop) == ["zz", "\n\n"]
    assert "cut at its limit" in page.text(".message.assistant .stats")
    page.write("[name=temperature]", "-1")
    send(page, "again")
    assert "temperature" in page.text(".message.assistant:last-child .problem")
    assert page.script("return document.activeElement.name") == "temperature"
    assert page.script("return document.activeElement.getAttribute('aria-invalid')") == "true"
    page.click("#defaults")
    assert page.text("#parameters-summary") == ""
    page.complaints()


def test_the_last_message_can_be_edited_and_answered_again(page: Browser, engine: FakeEngine) -> None:
    send(page, "one")
    send(page, "two")
    page.script("[...document.querySelectorAll('.assistant .again')].at(-1).click()")
    page.wait("document.querySelectorAll('.message').length === 4")
    page.wait(IDLE)
    page.script("[...document.querySelectorAll('.user .again')].at(-1).click()")
    assert page.script("return document.getElementById('prompt').value") == "two"
    page.write("#prompt", "three")
    page.press("Enter")
    page.wait_text(ANSWER, "three")
    page.wait(IDLE)
    prompts = [bytes(one[1]).decode() for one in engine.requests]
    assert prompts == ["one", "one|<one>|two", "one|<one>|two", "one|<one>|three"]
    shown = page.script("return [...document.querySelectorAll('.message .text')].map(one => one.textContent)")
    assert shown == ["one", "<one>", "three", "<one|<one>|three>"]


def test_the_conversation_outlives_a_visit(page: Browser, url: str) -> None:
    send(page, "remember me")
    page.click("#probabilities")
    opened_page(page, f"{url}/?again")
    assert page.text(ANSWER) == "<remember me>"
    assert page.script("return document.getElementById('probabilities').checked")
    page.click("#clear")
    assert page.text("#messages") == ""
    opened_page(page, f"{url}/")
    assert "What shall it write?" in page.text("#welcome")


def test_errors_can_be_read(page: Browser, engine: FakeEngine) -> None:
    engine.is_full = True
    send(page, "hi")
    assert page.text(".message.assistant .problem") == "no room Try again in 9 s."
    engine.is_full = False
    engine.script = lambda prompt, params: "abcdefgh"
    engine.fail_after = (3, Unavailable("<b>the engine has ended</b>"))
    send(page, "hi again")
    assert page.text(".message.assistant:last-child .problem") == "<b>the engine has ended</b>"
    assert page.text(ANSWER) == "abc"
    page.complaints()


def test_reasoning_is_kept_apart(browser: Browser, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "<think>let me see</think>It is 4."
    with running_server(engine, ServerConfig(reasoning_parser="think")) as url:
        page = opened_page(browser, url)
        page.click("#probabilities")
        send(page, "2 + 2?")
        assert page.text(ANSWER) == "It is 4."
        assert page.text(".assistant .reasoning summary") == "Reasoning, 3 words"
        assert not page.script("return document.querySelector('.assistant .reasoning').open")
        page.click(".assistant .reasoning summary")
        assert page.text(".assistant .reasoning-text") == "let me see"
        send(page, "sure?")
        assert b"let me see" not in bytes(engine.requests[-1][1])


def test_models_without_a_chat_template_go_on_with_the_text(page: Browser, engine: FakeEngine, url: str) -> None:
    engine.chat_template = None
    opened_page(page, f"{url}/?plain")
    page.click("#probabilities")
    send(page, "Once upon")
    assert bytes(one for one in engine.requests[-1][1] if one < 256) == b"Once upon"
    assert page.text(ANSWER) == "<Once upon>"
    assert page.script("return document.querySelectorAll('.token').length") == len("<Once upon>")


def test_a_key_is_asked_for_once(browser: Browser, engine: FakeEngine) -> None:
    with running_server(engine, ServerConfig(api_key=("s3cret",))) as url:
        browser.resize(1200, 800)
        browser.open(url)
        browser.wait("document.getElementById('key-dialog').open")
        browser.type("wrong")
        browser.press("Enter")
        browser.wait_text("#key-problem", "does not know this key")
        browser.type("s3cret")
        browser.press("Enter")
        browser.wait("document.getElementById('model-name').textContent === 'fake'")
        send(browser, "hi")
        assert browser.text(ANSWER) == "<hi>"
        kept = browser.script("return [JSON.stringify(sessionStorage), JSON.stringify(localStorage)]")
        assert "s3cret" in kept[0]
        assert "s3cret" not in kept[1]
        opened_page(browser, f"{url}/?again")
        assert not browser.script("return document.getElementById('key-dialog').open")


def test_everything_can_be_done_with_the_keyboard(page: Browser, engine: FakeEngine) -> None:
    page.script("document.body.tabIndex = -1; document.body.focus()")
    page.press("Tab")
    assert page.text(":focus") == "Skip to the prompt"
    page.press("Enter")
    page.type("first")
    page.press("Shift", "Enter")
    page.type("second")
    page.press("Enter")
    page.wait_text(ANSWER, "second>")
    page.wait(IDLE)
    assert page.text(ANSWER) == "<first\nsecond>"
    reached = set()
    for _ in range(40):
        page.press("Tab")
        reached.add(page.script("const at = document.activeElement; return at.id || at.dataset.show || at.textContent"))
        outline = page.script(
            "const one = getComputedStyle(document.activeElement);"
            "return one.outlineStyle !== 'none' || document.activeElement.matches('body, #prompt')"
        )
        assert outline, page.script("return document.activeElement.outerHTML")
    wanted = {"chat", "engine", "scroller", "prompt", "send", "probabilities", "clear", "Edit", "Again", "Copy"}
    assert wanted <= reached
    page.script("document.querySelector('[data-show=engine]').focus()")
    page.press("Enter")
    page.wait("document.body.dataset.view === 'engine'")


def test_readers_of_the_screen_hear_whole_sentences(page: Browser, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "One. Two! Three? Four"
    engine.delay = 0.01
    send(page, "x")
    told = page.script("return [...document.querySelectorAll('#announcer p')].map(one => one.textContent)")
    assert "".join(told) == "One. Two! Three? Four"
    assert all(one.rstrip()[-1] in ".!?" for one in told[:-1])
    assert len(told) > 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phones(browser: Browser, engine: FakeEngine, scheme: str) -> None:
    """Nothing is wider than 360 pixels, and what is pressed is large enough for fingers."""
    engine.script = lambda prompt, params: "long" * 100 + "\n\n```\n" + "code " * 60 + "\n```"
    browser.resize(360, 740, is_phone=True)
    browser.prefer(color_scheme=scheme)
    with running_server(engine, ServerConfig(), LONG_NAME) as url:
        page = opened_page(browser, url)
        page.click("#probabilities")
        send(page, "x" * 200)
        page.click("#parameters summary")
        for view in ("chat", "engine"):
            page.script("location.hash = arguments[0]", view)
            page.wait("document.body.dataset.view === arguments[0]", view)
            assert page.script("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
            small = page.script(
                "return [...document.querySelectorAll('button, input:not([type=checkbox]), select, summary')]"
                ".map(one => [one.textContent, one.getBoundingClientRect()]).filter(([, at]) => at.width)"
                ".map(([text, at]) => [text, at.height]).filter(([, height]) => height < 28)"
            )
            assert small == []
        assert page.script("return document.getElementById('send').getBoundingClientRect().bottom") <= 740


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(page: Browser, engine: FakeEngine, scheme: str) -> None:
    """The contrast of https://www.w3.org/TR/WCAG22/#contrast-minimum, of every text on what is behind it."""
    page.prefer(color_scheme=scheme)
    page.script("location.hash = 'both'")
    page.resize(1400, 900)
    page.click("#parameters summary")
    send(page, "hello")
    poor = page.script((Path(__file__).parent / "contrast.js").read_text())
    assert poor == [], json.dumps(poor, indent=1)


def test_stillness_is_kept_for_those_who_want_it(page: Browser) -> None:
    page.prefer(reduced_motion="reduce")
    moving = "return getComputedStyle(document.querySelector('.messages')).animationName"
    assert page.script(moving) == "none"
    assert page.script("return import('/page/dom.js').then(({ prefersStillness }) => prefersStillness())")
