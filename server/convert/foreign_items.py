"""Items that OpenAI's own tools leave in a history: calls that the client ran are told as calls of functions; what the
server ran, or only it can read, is passed over."""

from typing import Any

from server.convert.tool_input import json_text
from server.convert.tool_results import result_text

OF_SERVERS = frozenset(
    (
        *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
        *("compaction", "compaction_summary", "compaction_trigger", "context_compaction", "program", "program_output"),
    )
)
_ABOUT_ITEMS = {"type", "id", "call_id", "status", "namespace", "caller", "created_by", "agent"}
"""Fields that are no arguments."""


def is_of_server(item: dict[str, Any]) -> bool:
    return str(item.get("type")) in OF_SERVERS


def as_function_item(item: dict[str, Any], where: str, passed_over: list[str]) -> dict[str, Any]:
    """Calls of client's tools, of whatever kind, as calls of functions: local_shell_call as one of `local_shell`."""
    kind, call_id = str(item.get("type")), item.get("call_id")
    if kind.endswith("_output"):
        return _output(item, kind, where, passed_over)
    if kind == "function_call":
        arguments = item.get("arguments")
    elif kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    elif kind.endswith("_call") and isinstance(call_id, str):
        arguments = {name: value for name, value in item.items() if name not in _ABOUT_ITEMS}
        item = {"name": kind.removesuffix("_call"), "id": item.get("id"), "call_id": call_id}
    else:
        return item
    text = arguments if isinstance(arguments, str) else json_text(arguments, where, "input")
    return {**item, "type": "function_call", "arguments": text}


def _output(item: dict[str, Any], kind: str, where: str, passed_over: list[str]) -> dict[str, Any]:
    """The result of a call as a function's result. An item without `call_id` names its call by its own id."""
    output = item.get("output")
    parts = [output] if isinstance(output, dict) else output
    if isinstance(parts, list) and not all(
        isinstance(part, dict) and part.get("type") == "input_text" for part in parts
    ):
        if kind in ("function_call_output", "custom_tool_call_output") or _is_typed(parts):
            output = result_text(parts, f"{where}.output", "input", passed_over)
        else:  # of a shell, say
            output = json_text(output, f"{where}.output", "input")
    call = {name: item[name] for name in ("id", "call_id") if item.get(name) is not None}
    return {"call_id": item.get("id"), **call, "type": "function_call_output", "output": output}


def _is_typed(parts: list[Any]) -> bool:
    return all(isinstance(part, dict) and "type" in part for part in parts)
