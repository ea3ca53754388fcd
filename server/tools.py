"""Tools as all chat protocols have them: which are offered, what calls were given, and what they gave."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import msgspec

from configs.errors import InvalidRequest, shown
from server.answers.reader import json_text
from server.bodies import Hint

_HINTS = {
    "allowed_callers": Hint((["direct"],)),
    "async": Hint((False,)),
    "defer_loading": Hint((False,)),
    "eager_input_streaming": Hint((False,)),
    "input_examples": Hint(([],)),
    "output_schema": Hint(),
}
"""Fields of a tool that change no call of it: every tool is loaded at once, and the model calls it."""

Tools = list[dict[str, Any]]
"""As chat templates print them: {"type": "function", "function": {"name", "description", "parameters"}}."""


def offered(
    given: Sequence[Mapping[str, Any]] | None,
    passed_over: list[str],
    convert: Callable[[Any, str], dict[str, Any]] = lambda tool, place: tool,
    *,
    types: Sequence[str | None] = ("function",),
    where: str = "tools",
) -> Tools:
    """The tools of these types, as `convert` makes them of each tool and its place in the request.

    What is left out is added to `passed_over`. Raises `InvalidRequest` as `convert` does.
    """
    tools = []
    for index, tool in enumerate(given or []):
        place, kind = f"{where}[{index}]", tool.get("type")
        if isinstance(kind, str) and kind not in types:
            passed_over.append(f"{place} {kind}")
            continue
        tools.append(convert(tool, place))
        passed_over += [f"{place}.{name}" for name, hint in _HINTS.items() if hint.is_ignored(tool.get(name))]
    return tools


CallMode = Literal["auto", "required", "one"]
"""Whether calls are left to the model; one is a single call of whatever tool there is."""


def tool_choice(given: str | Mapping[str, Any] | None, tools: Tools) -> tuple[CallMode, Tools]:
    """OpenAI's tool_choice, and the tools that it leaves.

    Raises `InvalidRequest`, also where it names a tool that is passed over.
    """
    if isinstance(given, dict) and given["type"] == "allowed_tools":
        given, tools = _allowed(given.get("allowed_tools", given), tools)
    if isinstance(given, dict):
        name = _chosen(given, {tool["function"]["name"] for tool in tools})
        return "one", [tool for tool in tools if tool["function"]["name"] == name]
    if given == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    return "required" if given == "required" else "auto", [] if given == "none" else tools


def _allowed(given: Any, tools: Tools) -> tuple[str, Tools]:
    """The mode, and the tools that are named; those that are passed over cannot be called anyway."""
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequest("allowed_tools needs a mode, auto or required, and tools", param="tool_choice")
    names = {tool["function"]["name"] for tool in tools}
    named = [one if isinstance(one, dict) else {"name": one} for one in listed]
    allowed = {_chosen(one, names) for one in named if one.get("type", "function") == "function"}
    return mode, [tool for tool in tools if tool["function"]["name"] in allowed]


def _chosen(given: dict[str, Any], names: Container[str]) -> str:
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else given.get("name")
    if isinstance(given.get("namespace"), str):
        name = flat_name(given["namespace"], str(name))
    if given.get("type") != "function" or not isinstance(name, str) or name not in names:
        raise InvalidRequest(f"tool_choice names no function of tools: {shown(name)}", param="tool_choice")
    return name


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function of a namespace for templates, which know no namespaces."""
    return f"{namespace}__{name}" if namespace else name


MAX_DEPTH = 100
"""How deep arrays and objects may lie within each other; templates and JSON encoders recurse into what they print."""


def tool_input(arguments: str) -> dict[str, Any]:
    """The object that the text denotes.

    A text that denotes none, because an answer was cut or its model erred, stands as it is under INVALID_JSON, the key
    that Anthropic's documentation has for it.
    """
    try:
        value = msgspec.json.decode(arguments)
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
    text = given if isinstance(given, str) else checked_json(given, where, param)
    return tool_input(text) if text else {}


def checked_json(value: Any, where: str, param: str) -> str:
    """The value as JSON text. Raises `InvalidRequest` naming it where it is nested too deeply."""
    if _is_too_deep(value):
        raise InvalidRequest(f"{where} is nested too deeply", param=param)
    return json_text(value)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        within = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for values in within for inner in values]
        if not level:
            return False
    return True


NOT_TEXT = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "input_video", "video_url"), "video"),
    **dict.fromkeys(("resource", "resource_link", "tool_reference", "container_upload"), "resource"),
}
"""Types of parts that a model of texts cannot read, and the word that the model reads in place of each."""


def result_text(content: Any, where: str, param: str, passed_over: list[str]) -> str:
    """The text, or the texts of all parts joined by line breaks.

    Parts that are no text leave a word in their place, and are added to `passed_over`. Raises `InvalidRequest` naming
    the part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=param)
    return "\n".join(_text(part, f"{where}[{index}]", param, passed_over) for index, part in enumerate(content))


def _text(part: Any, where: str, param: str, passed_over: list[str]) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "search_result", "content": [*blocks]}:
            return "\n".join(str(block.get("text")) for block in blocks if isinstance(block, dict))
        case {"type": "document", "source": {"type": "text", "data": data}}:
            return str(data)
        case {"type": str(kind)} if kind in NOT_TEXT:
            passed_over.append(f"{where} {kind}")
            return f"[{NOT_TEXT[kind]} left out: this model reads only text]"
    given = str(part.get("type")) if isinstance(part, dict) else "None"
    raise InvalidRequest(f"{where}: parts of type {shown(given)} are not supported; only text", param=param)
