"""JavaScript clients: ollama, openai, @anthropic-ai/sdk and the AI SDK with its providers, see js/clients.test.js."""

import shutil
from pathlib import Path

import pytest
from conftest import run

JS = Path(__file__).with_name("js")


@pytest.mark.skipif(not (JS / "node_modules").is_dir(), reason="npm, which installs these clients, is not there")
def test_javascript_clients(url: str) -> None:
    run([shutil.which("npm") or "npm", "test"], cwd=JS, OCTAVO_URL=url, AI_SDK_LOG_WARNINGS="false")
