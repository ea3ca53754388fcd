"""From Anthropic's requests to a `Chat`.

Every block becomes a message of its own, and neighbours of the same role are then joined; so turns that follow each
other with one role are one turn, as the API has it.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import StructuredOutput
from configs.settings import ServerConfig
from server.anthropic.models import CountTokensRequest, MessagesRequest, ToolChoice
from server.chat import Chat
from server.sampling import stop_strings
from server.structured import json_schema
from server.tools import arguments_in_history, offered, result_text, tool_choice


def chat_of(body: CountTokensRequest, config: ServerConfig) -> Chat:
    """Raises `InvalidRequest` naming the field."""
    passed_over: list[str] = []
    messages = conversation(body, passed_over)
    given: Any = body.tools
    choice, tools = tool_choice(
        _openai_choice(body.tool_choice), offered(given, _function, passed_over, types=(None, "custom"))
    )
    structured = _structured(body)
    with_format = {"structured": "output_format" if body.output_format else "output_config"} if structured else {}
    return Chat(
        messages=messages,
        sampling={**(_sampling(body, config) if isinstance(body, MessagesRequest) else {}), "structured": structured},
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        template_kwargs=_template_kwargs(body, messages[-1]),
        field_names={"prompt": "messages", **with_format},
        thinking_token_budget=body.thinking.budget_tokens if body.thinking else None,
        fit_max_tokens=True,
        timeout=body.timeout_s if isinstance(body, MessagesRequest) else None,
        passed_over=passed_over,
    )


def conversation(body: CountTokensRequest, passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them; what they leave out is added to `passed_over`.

    Raises `InvalidRequest` naming the block.
    """
    messages: list[Any] = body.messages
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    names = {block["id"]: block["name"] for blocks in contents for block in blocks if block["type"] == "tool_use"}
    turns = [*_turns("system", body.system, "system", names, passed_over)] if body.system else []
    for index, message in enumerate(messages):
        turns += _turns(message["role"], message["content"], f"messages[{index}].content", names, passed_over)
    if not turns:
        raise InvalidRequest("messages is empty", param="messages")
    return [*_joined(turns)]


def _turns(
    role: str, content: str | list[Any], where: str, names: dict[str, str], passed_over: list[str]
) -> Iterator[dict[str, Any]]:
    """`names` are those of tools, by the ids of their calls."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match role, block["type"]:
            case _, "text":
                yield {"role": role, "content": block["text"]}
            case "assistant", "thinking":
                yield {"role": role, "content": "", "reasoning_content": block["thinking"]}
            case "assistant", "redacted_thinking":
                pass
            case "assistant", "tool_use":
                arguments = arguments_in_history(block.get("input"), f"{place}.input", "messages")
                function = {"name": block["name"], "arguments": arguments}
                call = {"id": call_id(block["id"]), "type": "function", "function": function}
                yield {"role": role, "content": "", "tool_calls": [call]}
            case "user", "tool_result":
                yield _result(block, place, names, passed_over)
            case _, "thinking" | "redacted_thinking" | "tool_use" | "tool_result" as kind:
                raise InvalidRequest(f"{place}: messages of role {role} hold no {kind}", param="messages")
            case _, kind:
                passed_over.append(f"{place} {kind}")


def _result(block: dict[str, Any], where: str, names: dict[str, str], passed_over: list[str]) -> dict[str, Any]:
    use_id = block["tool_use_id"]
    if use_id not in names:
        raise InvalidRequest(f"{where}: no tool_use has the id {shown(use_id)}", param="messages")
    text = result_text(block.get("content"), f"{where}.content", "messages", passed_over)
    content = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "content": content, "tool_call_id": call_id(use_id), "name": names[use_id]}


def tool_use_id(call_id: str) -> str:
    """As the API has them: the model's own id, whose form its template may insist on, behind `toolu_`."""
    return "toolu_" + call_id.removeprefix("call_")


def call_id(tool_use_id: str) -> str:
    return tool_use_id.removeprefix("toolu_")


def _joined(turns: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Neighbours of one role as one message; results of tools stay apart."""
    for role, neighbours in groupby(turns, lambda turn: turn["role"]):
        if role == "tool":
            yield from neighbours
            continue
        parts = [*neighbours]
        message = {"role": role, "content": "\n".join(part["content"] for part in parts if part["content"])}
        if reasoning := "".join(part.get("reasoning_content", "") for part in parts):
            message["reasoning_content"] = reasoning
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            message["tool_calls"] = calls
        yield message


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """As templates print it."""
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": {**function, "strict": True} if tool.get("strict") else function}


def _openai_choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return choice and choice.type
    return "required" if choice.type == "any" else {"type": "function", "name": choice.name}


def _sampling(body: MessagesRequest, config: ServerConfig) -> dict[str, Any]:
    same = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    stop = stop_strings(body.stop_sequences, config, "stop_sequences")
    return {**{name: value for name, value in same.items() if value is not None}, "stop": stop}


def _structured(body: CountTokensRequest) -> StructuredOutput | None:
    form = body.output_config and body.output_config.format
    if form and body.output_format:
        raise InvalidRequest("output_config.format and output_format exclude each other", param="output_format")
    form = form or body.output_format
    return json_schema(form["schema"]) if form else None


def _template_kwargs(body: CountTokensRequest, last: dict[str, Any]) -> dict[str, Any]:
    continued = last["role"] == "assistant"
    if continued and "tool_calls" in last:
        raise InvalidRequest("a tool_use needs a tool_result behind it", param="messages")
    kwargs: dict[str, Any] = {"add_generation_prompt": not continued, "continue_final_message": continued}
    if body.thinking:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config and body.output_config.effort:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs
