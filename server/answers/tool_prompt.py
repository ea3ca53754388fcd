"""Tools for chat templates that know none: described in the system message, called in the Hermes style."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = "You can call functions to help with the request. These are they, one JSON object a line:\n<tools>\n"
_FOOTER = (
    "\n</tools>\n\n"
    "To call a function, write its name and its arguments as a JSON object between these tags, "
    "one pair of tags for each call:\n"
    '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>\n'
    "You get each result between <tool_response> tags. Answer directly when no function helps."
)


def plain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, system_role: bool = True
) -> list[dict[str, Any]]:
    """The conversation in system, user and assistant messages with plain content, tools described at its beginning.

    `messages` and `tools` are as in a chat completion's request, content strings. Calls and results in the history
    become text in the format that the description teaches; results that follow each other are one user message.
    Without `system_role` the description stands in front of the first message. Without tools only the history is
    rewritten.
    """
    plain: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and in_results:
            plain[-1]["content"] += "\n" + _result(message)
        else:
            plain.append({"role": "user", "content": _result(message)} if is_result else _message(message))
        in_results = is_result
    return _describe(plain, tools, system_role=system_role) if tools else plain


def takes_system_messages(template: str) -> bool:
    """False for templates that say that they refuse a system message."""
    return "System role not supported" not in template


def _describe(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, system_role: bool
) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = _HEADER + lines + _FOOTER
    first = messages[0]["role"] if messages else ""
    if first == "system":
        content = messages[0]["content"]
        return [{**messages[0], "content": f"{content}\n\n{description}" if content else description}, *messages[1:]]
    if system_role or first != "user":
        return [{"role": "system", "content": description}, *messages]
    return [{**messages[0], "content": f"{description}\n\n{messages[0]['content']}"}, *messages[1:]]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    if calls:
        content = message.get("content")
        plain["content"] = "\n".join([*([content] if content else []), *map(_call, calls)])
    return plain


def _call(call: Mapping[str, Any]) -> str:
    """`arguments` are an object, or its JSON text."""
    name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {text}}}\n</tool_call>'


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
