"""Arguments of tool calls as the objects that protocols and chat templates want, whatever a model wrote."""

import json
from typing import Any

from configs.errors import InvalidRequest

MAX_DEPTH = 100
"""How deep arrays and objects may lie within each other; templates and JSON encoders recurse into what they print."""


def tool_input(arguments: str) -> dict[str, Any]:
    """The object that the text denotes.

    A text that denotes none, because an answer was cut or its model erred, stands as it is under INVALID_JSON, the key
    that Anthropic's documentation has for it.
    """
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) and not _is_too_deep(value) else {"INVALID_JSON": arguments}


def arguments_in_history(given: Any, where: str, param: str) -> dict[str, Any]:
    """The arguments of a call that a request tells of, as text or as a value; nothing and null are no arguments.

    A client sends back what a model wrote, so nothing that can be printed is refused.
    """
    if isinstance(given, dict) and not _is_too_deep(given):
        return given
    text = given if isinstance(given, str) else json_text(given, where, param)
    return tool_input(text) if text else {}


def json_text(value: Any, where: str, param: str) -> str:
    """The value as JSON text. Raises `InvalidRequest` naming it where it is nested too deeply."""
    if _is_too_deep(value):
        raise InvalidRequest(f"{where} is nested too deeply", param=param)
    return json.dumps(value, ensure_ascii=False)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for outer in children for inner in outer]
        if not level:
            return False
    return True
