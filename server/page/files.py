"""The page's files with the headers that they are served with."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
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


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str

    @property
    def headers(self) -> dict[str, str]:
        """Browsers keep the file, and ask each time whether it is still the same."""
        return {
            "etag": f'"{hashlib.sha256(self.content).hexdigest()[:32]}"',
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }


def read_files() -> dict[str, PageFile]:
    """By name. Raises OSError."""
    found = [path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES]
    return {path.name: PageFile(path.read_bytes(), TYPES[path.suffix]) for path in found}
