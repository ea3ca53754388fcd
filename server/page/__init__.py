"""The page's files, with the headers that keep it to itself."""

from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text never becomes markup: browsers refuse innerHTML and its kin
    )
)
"""https://www.w3.org/TR/CSP3/: the page loads and reaches nothing but this server, and runs nothing but its files."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Browsers keep the files, and ask each time whether they are still the same."""


class PageFiles(StaticFiles):
    """Everybody may have them: they know nothing of what is served."""

    def lookup_path(self, path: str) -> tuple[str, Any]:
        return super().lookup_path(path) if Path(path).suffix in TYPES else ("", None)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        if "content-type" in response.headers:
            response.headers["content-type"] = TYPES[Path(args[0]).suffix]
        return response


PAGE = PageFiles(directory=FOLDER)
