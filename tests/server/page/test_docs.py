"""The documentation at /docs in Chromium, where no other host can be reached."""

from tests.server.described import ROUTES
from tests.server.page.browser import Browser


def test_docs_show_every_route(browser: Browser, url: str) -> None:
    browser.open(f"{url}/docs")
    browser.wait("document.querySelectorAll('.opblock').length")
    assert browser.script("return document.querySelectorAll('.opblock').length") == len(ROUTES)
    loaded = browser.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert all(name.startswith((url, "data:")) for name in loaded)
    browser.open("about:blank")
