"""Chromium, driven over W3C's WebDriver protocol (https://www.w3.org/TR/webdriver2/), which is JSON over HTTP."""

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

DRIVER, CHROMIUM = shutil.which("chromedriver"), shutil.which("chromium")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
KEYS = {
    name: chr(code)
    for name, code in {
        "Tab": 0xE004, "Enter": 0xE007, "Shift": 0xE008, "Control": 0xE009, "Escape": 0xE00C, "Space": 0xE00D,
        "End": 0xE010, "Home": 0xE011, "Left": 0xE012, "Up": 0xE013, "Right": 0xE014, "Down": 0xE015,
    }.items()
}  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
PATIENCE = 15.0
"""Seconds that a page has for anything."""


class Browser:
    """One window. Elements are named by CSS selectors; the first that matches is meant."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def _do(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self._session.request(method, path, json=body)
        value = response.json()["value"]
        if not response.is_success:
            raise AssertionError(f"{value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        self._do("POST", "url", {"url": url})

    def script(self, text: str, *arguments: Any) -> Any:
        """Run a function's body; a promise that it returns is waited for."""
        return self._do("POST", "execute/sync", {"script": text, "args": list(arguments)})

    def wait(self, condition: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """Until an expression is true; gives its value."""
        end = time.monotonic() + patience
        while not (value := self.script(f"return {condition}", *arguments)):
            assert time.monotonic() < end, (
                f"{condition} does not come true; the page says {self.text('body')[-1500:]!r}"
            )
            time.sleep(0.03)
        return value

    def wait_text(self, selector: str, text: str, patience: float = PATIENCE) -> None:
        condition = "[...document.querySelectorAll(arguments[0])].some(one => one.textContent.includes(arguments[1]))"
        self.wait(condition, selector, text, patience=patience)

    def text(self, selector: str) -> str:
        """As it is shown, without what is hidden."""
        return str(self._do("GET", f"element/{self._find(selector)}/text"))

    def _find(self, selector: str) -> str:
        return str(self._do("POST", "element", {"using": "css selector", "value": selector})[_ELEMENT])

    def click(self, selector: str) -> None:
        self._do("POST", f"element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        """In place of what is there."""
        element = self._find(selector)
        self._do("POST", f"element/{element}/clear", {})
        self._do("POST", f"element/{element}/value", {"text": text})

    def hover(self, selector: str, x: int = 0, y: int = 0) -> None:
        """`x` and `y` from the middle of the element."""
        move = {"type": "pointerMove", "duration": 0, "origin": {_ELEMENT: self._find(selector)}, "x": x, "y": y}
        self._do("POST", "actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def press(self, *keys: str, times: int = 1) -> None:
        """Keys by name or character, held down together, wherever the focus is."""
        down = [{"type": "keyDown", "value": KEYS.get(key, key)} for key in keys]
        up = [{"type": "keyUp", "value": KEYS.get(key, key)} for key in reversed(keys)]
        self._do("POST", "actions", {"actions": [{"type": "key", "id": "keys", "actions": [*down, *up] * times}]})

    def type(self, text: str) -> None:
        strokes = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        self._do("POST", "actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def protocol(self, command: str, **parameters: Any) -> Any:
        """Chromium's own protocol: https://chromedevtools.github.io/devtools-protocol/"""
        return self._do("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        self.protocol("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, **features: str) -> None:
        """Media features by name, such as color_scheme="dark"."""
        given = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.protocol("Emulation.setEmulatedMedia", features=given)

    def complaints(self) -> list[str]:
        """What the console has got since the last call, but for answers with a bad status."""
        entries = self._do("POST", "se/log", {"type": "browser"})
        return [one["message"] for one in entries if "Failed to load resource" not in one["message"]]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("GET", "screenshot")))


@contextlib.contextmanager
def opened_browser(profile: Path) -> Iterator[Browser]:
    """With a profile of its own, in `profile`."""
    assert DRIVER is not None
    assert CHROMIUM is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "started successfully on port" in line)
        port = started.rstrip().rstrip(".").rpartition(" ")[2]
        options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=60) as http:
            answer = http.post("session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in answer, answer
            session = f"http://127.0.0.1:{port}/session/{answer['sessionId']}"
            http.base_url = httpx.URL(f"{session}/")
            try:
                yield Browser(http)
            finally:
                http.delete(session)
    finally:
        driver.terminate()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()


def opened_page(browser: Browser, url: str) -> Browser:
    """Showing the page at `url`, which knows the model by then."""
    browser.open(url)
    browser.wait("document.getElementById('model-name').textContent")
    return browser
