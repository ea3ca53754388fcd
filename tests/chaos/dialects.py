"""How each route writes its answers: a document into an `Answer`, be it the whole or one event."""

import json
from collections.abc import Callable
from typing import Any

from .answers import Answer, Violation

Document = dict[str, Any]


def read_whole(path: str, answer: Answer, content: bytes) -> None:
    READERS[path](answer, json.loads(content))
    answer.is_whole = True
    if answer.status != 200 and answer.error is None:
        raise Violation(f"status {answer.status} without an error: {content[:200]!r}")


def read_event(path: str, answer: Answer, data: bytes) -> None:
    """Comments, which keep the connection alive, say nothing. Raises `Violation` for what comes behind the end."""
    if data.startswith(b":"):
        return
    if answer.is_whole:
        raise Violation(f"behind the end of the stream: {data!r}")
    if data == b"[DONE]":
        answer.is_whole = True
    else:
        READERS[path](answer, json.loads(data))


def openai(answer: Answer, document: Document) -> None:
    """/v1/completions, /v1/chat/completions, /v1/embeddings."""
    answer.error = document.get("error")
    answer.is_whole = answer.error is not None
    if usage := document.get("usage"):
        answer.counts = (usage["prompt_tokens"], usage.get("completion_tokens", 0))
    if document.get("object") == "list":
        answer.embeddings = [one["embedding"] for one in document["data"]]
    for part in document.get("choices", ()):
        choice = answer.choice(part["index"])
        message = part.get("delta") or part.get("message") or part
        text = message.get("text") or message.get("content") or ""
        choice.add(text, part.get("finish_reason"), part.get("stop_reason"))
        if (token_ids := part.get("token_ids")) is not None:
            choice.token_ids = (choice.token_ids or []) + token_ids
        logprobs = part.get("logprobs") or {}
        listed = logprobs.get("content") or ()
        choice.tokens += logprobs.get("tokens") or [one["token"] for one in listed]
        choice.logprobs += logprobs.get("token_logprobs") or [one["logprob"] for one in listed]


def messages(answer: Answer, document: Document) -> None:
    """Anthropic's."""
    kind = document["type"]
    if kind == "error":
        answer.error, answer.is_whole = document["error"], True
    elif kind == "message":
        text = "".join(block["text"] for block in document["content"])
        answer.choice().add(text, document["stop_reason"], document["stop_sequence"])
        answer.counts = _messages_counts(document["usage"])
    elif kind == "content_block_delta":
        answer.choice().add(document["delta"]["text"])
    elif kind == "message_delta":
        answer.choice().add("", document["delta"]["stop_reason"], document["delta"]["stop_sequence"])
        answer.counts = _messages_counts(document["usage"])
    elif kind == "message_stop":
        answer.is_whole = True


def _messages_counts(usage: dict[str, int]) -> tuple[int, int]:
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached, usage["output_tokens"]


def responses(answer: Answer, document: Document) -> None:
    """OpenAI's newer route."""
    if document.get("object") == "response":
        _response(answer, document)
        return
    kind = document.get("type")
    if kind == "response.output_text.delta":
        answer.choice().add(document["delta"])
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        told = answer.choices.pop(0).text if answer.choices else ""
        _response(answer, document["response"])
        if (text := answer.choice().text) != told:
            raise Violation(f"the response is {text!r}, its events were {told!r}")
        answer.is_whole = True
    elif kind is None:
        answer.error = document.get("error")


def _response(answer: Answer, document: Document) -> None:
    answer.id = document["id"]
    answer.error = document["error"]
    text = "".join(part["text"] for item in document["output"] for part in item["content"])
    reason = (document["incomplete_details"] or {}).get("reason") or document["status"]
    is_over = document["status"] in ("completed", "incomplete")
    answer.choice().add(text, reason if is_over else None)
    if is_over:
        answer.counts = (document["usage"]["input_tokens"], document["usage"]["output_tokens"])


def ollama(answer: Answer, document: Document) -> None:
    if "error" in document:
        error = document["error"]
        answer.error, answer.is_whole = error if isinstance(error, dict) else {"message": error}, True
        return
    text = document["response"] if "response" in document else document["message"]["content"]
    answer.choice().add(text, document.get("done_reason"))
    if document["done"]:
        answer.is_whole = True
        answer.counts = (document["prompt_eval_count"], document["eval_count"])


READERS: dict[str, Callable[[Answer, Document], None]] = {
    "/v1/completions": openai,
    "/v1/chat/completions": openai,
    "/v1/embeddings": openai,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/api/chat": ollama,
    "/api/generate": ollama,
}
