"""A Chromium for all tests of the page, and an engine whose answers are known."""

from collections.abc import Iterator

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.page.browser import CHROMIUM, DRIVER, Browser, opened_browser, opened_page


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromium-driver are not installed")
    with opened_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window as it was; what runs in it may not complain."""
    window.resize(800, 700)
    window.prefer()
    window.complaints()
    yield window
    assert window.complaints() == []


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=5000)
    engine.chat_template = "{{ messages }}"
    return engine


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Browser]:
    yield opened_page(browser, url)
    browser.open("about:blank")  # the server ends sooner without connections
