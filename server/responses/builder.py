"""`ResponseBuilder`: one response as it grows. Streamed or not, answers are made here, so they are the same."""

import time
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from configs.errors import InvalidRequest
from engine.outputs import RequestOutput
from server.answers.delta import DeltaMessage, DeltaToolCall
from server.chat import Answers
from server.errors import error_object
from server.generation import Generation
from server.logprobs import TokenLogprob, chat_logprobs, spelling
from server.protocol.response_events import ErrorEvent, Event, ResponseEvent
from server.protocol.response_items import NamespaceTool, OutputItem, Status, flat_name
from server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from server.responses.items import EventLog, OpenCall, OpenItem, OpenMessage, OpenReasoning


class ResponseBuilder:
    """One item is open at a time. Each call gives the events that it brings about."""

    def __init__(self, generation: Generation, answers: Answers, first: Response) -> None:
        self._generation = generation
        self._answers = answers
        self._tokenizer = generation.serving.engine.tokenizer
        self._spell = spelling(self._tokenizer, None)
        self._response = first
        self._log = EventLog()
        self.has_begun = False
        self._closed: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._namespaces = {
            flat_name(space.name, tool.name): (space.name, tool.name)
            for space in first.tools
            if isinstance(space, NamespaceTool)
            for tool in space.tools
        }
        """Namespace and name of functions, by the names that the model has for them."""
        self._num_undecided = 0
        """Tokens whose text means nothing yet, such as half a marker; and their logprobs."""
        self._undecided: list[TokenLogprob] = []
        self._num_reasoning = 0

    @property
    def response(self) -> Response:
        """As it is now."""
        if self._open is None:
            return self._response
        return replace(self._response, output=[*self._closed, self._open.item("in_progress")])

    def begin(self) -> list[Event]:
        self.has_begun = True
        self._tell("created")
        self._tell(self._response.status)
        return self._log.take()

    def push(self, output: RequestOutput) -> list[Event]:
        """With its finish reason, the last."""
        events = self._started()
        self._count(output)
        delta = self._answers.delta(0, output)
        if delta:
            self._add(delta)
        if output.finish_reason is not None:
            self._finish(_INCOMPLETE.get(output.finish_reason))
        return events + self._log.take()

    def fail(self, error: Exception) -> list[Event]:
        events = self._started()
        told = error_object(error)
        self._end("failed", "incomplete")
        code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        self._response = replace(self._response, error=ResponseError(code, told["message"]))
        self._log.add(ErrorEvent, "error", code=told["code"] or code, message=told["message"], param=told["param"])
        self._tell("failed")
        return events + self._log.take()

    def cancel(self) -> None:
        """Nobody is told: whoever asked knows, or has gone."""
        if not self._response.is_over:
            self._end("cancelled", "incomplete")
            self._log.take()

    def _started(self) -> list[Event]:
        events = [] if self.has_begun else self.begin()
        if self._response.status == "queued":
            self._response = replace(self._response, status="in_progress")
            self._tell("in_progress")
        return events

    def _tell(self, kind: str) -> None:
        self._log.add(ResponseEvent, f"response.{kind}", response=self.response)

    def _count(self, output: RequestOutput) -> None:
        self._num_undecided += output.num_output_tokens - self._generation.num_output_tokens
        self._generation.latest[0] = output
        if output.logprobs:
            self._undecided += chat_logprobs(self._spell, self._tokenizer, output.logprobs)["content"]

    def _add(self, delta: DeltaMessage) -> None:
        """A call that goes on comes first: content behind it ends it."""
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            self._add_call(calls[0])
            calls = calls[1:]
        if delta.reasoning:
            self._opened(OpenReasoning).add(delta.reasoning)
            self._num_reasoning += self._num_undecided
        if delta.content:
            is_new = not isinstance(self._open, OpenMessage)
            logprobs = _last_of(self._undecided, delta.content) if is_new else self._undecided
            self._opened(OpenMessage).add(delta.content, logprobs)
        for call in calls:
            self._add_call(call)
        self._num_undecided, self._undecided = 0, []

    def _add_call(self, piece: DeltaToolCall) -> None:
        if piece.id is not None:
            self._close("completed")
            namespace, name = self._namespaces.get(piece.name or "", (UNSET, piece.name or ""))
            self._open = OpenCall(self._log, len(self._closed), piece.id, name, namespace)
        assert isinstance(self._open, OpenCall), self._open
        if piece.arguments:
            self._open.add(piece.arguments)

    def _opened(self, kind: type[Any]) -> Any:
        """The open item where it is of this kind, else a new one."""
        if not isinstance(self._open, kind):
            self._close("completed")
            self._open = kind(self._log, len(self._closed))
        return self._open

    def _close(self, status: Status) -> None:
        if self._open is not None:
            self._closed.append(self._open.close(status))
            self._open = None

    def _finish(self, incomplete: str | None) -> None:
        """`incomplete`: why, if it is."""
        status: Status = "incomplete" if incomplete else "completed"
        if self._open is None:
            self._opened(OpenMessage)
        if isinstance(self._open, OpenReasoning):
            self._num_reasoning += self._num_undecided
        self._end(status, status, incomplete)
        self._tell(status)

    def _end(self, status: str, item_status: Status, incomplete: str | None = None) -> None:
        self._close(item_status)
        done = status == "completed"
        self._response = replace(
            self._response,
            status=status,
            output=self._closed,
            completed_at=int(time.time()) if done else None,
            incomplete_details=IncompleteDetails(incomplete) if incomplete else None,
            usage=self._usage(),
        )

    def _usage(self) -> ResponseUsage:
        generation = self._generation
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(generation.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(self._num_reasoning),
            total_tokens=num_input + num_output,
        )


_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}
"""By finish reason."""


def _last_of(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Those of the tokens that `text` came with, without what was before it, such as a marker."""
    missing, start = len(text.encode()), len(logprobs)
    while missing > 0 and start > 0:
        start -= 1
        missing -= len(logprobs[start]["bytes"])
    return logprobs[start:]
