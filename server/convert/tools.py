"""The tools of OpenAI's protocols: functions are offered, and what only OpenAI's own servers run is passed over."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from configs.errors import InvalidRequest, shown
from server.protocol.unsupported import asks_for_nothing

HINTS = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "eager_input_streaming": (False,),
    "input_examples": ([],),
    "output_schema": (),
}
"""Fields of a tool that change no call of it, with the values that ask for nothing: every tool is loaded at once, and
the model calls it."""

Tool = TypeVar("Tool")


def offered(
    given: list[dict[str, Any]] | None,
    convert: Callable[[dict[str, Any], str], Tool],
    passed_over: list[str],
    *,
    types: Sequence[str | None] = ("function",),
    where: str = "tools",
) -> list[Tool]:
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
        hints = (name for name in HINTS if not asks_for_nothing(HINTS, name, tool.get(name)))
        passed_over += [f"{place}.{name}" for name in hints]
    return tools


def tool_of(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """The tool, which is a function of a chat as templates print it. Raises `InvalidRequest` naming what is wrong."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where} must have a type and a function", param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name must be a string", param="tools")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", param="tools")
    return tool


def tool_choice(given: str | dict[str, Any] | None, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """auto, none, required, or `=` and the name of a function; and the tools that it leaves, as templates print them.

    Raises `InvalidRequest`, also where it names a tool that is passed over.
    """
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return _allowed(given.get("allowed_tools", given), tools)
    if isinstance(given, dict):
        return f"={_chosen(given, _names(tools))}", tools
    if given not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            f"tool_choice must be auto, none, required or a function; got {shown(given)}", param="tool_choice"
        )
    if given == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    return given or "auto", tools


def _allowed(given: Any, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequest("allowed_tools needs a mode, auto or required, and tools", param="tool_choice")
    named = [one if isinstance(one, dict) else {"name": one} for one in listed]
    # those that are passed over cannot be called anyway
    names = _names(tools)
    allowed = {_chosen(one, names) for one in named if one.get("type", "function") == "function"}
    return tool_choice(mode, [tool for tool in tools if tool["function"]["name"] in allowed])


def _names(tools: list[dict[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def _chosen(given: dict[str, Any], names: set[str]) -> str:
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else given.get("name")
    if isinstance(given.get("namespace"), str):
        name = flat_name(given["namespace"], str(name))
    if given.get("type") != "function" or not isinstance(name, str) or name not in names:
        raise InvalidRequest(f"tool_choice names no function of tools: {shown(name)}", param="tool_choice")
    return name


def flat_name(namespace: str | None, name: str) -> str:
    """The function's name where there are no namespaces."""
    return f"{namespace}__{name}" if namespace else name
