"""Arguments of tool calls as objects, for protocols that do not send them as JSON text."""

import json
from typing import Any


def tool_input(arguments: str) -> dict[str, Any]:
    """The object that the model wrote. What is none, because the answer was cut or the model erred, is not lost:

    it stands as text under INVALID_JSON, the key that Anthropic's documentation has for it.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
