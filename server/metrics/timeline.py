"""GET /v1/requests/{id}: what happened to a request, and where its time went."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import RequestError, Unavailable, shown
from engine.messages import RequestSnapshot
from server.bodies import BodyRoute
from server.errors import ErrorResponse
from server.metrics.records import ChoiceRecord, RequestRecord, current_owner
from server.metrics.tracker import WaitCause
from server.serving import ServingOf

router = APIRouter(route_class=BodyRoute, tags=["Server"])

_CAUSES = {
    "blocks": "the KV cache had no room for it (--kv-cache-tokens)",
    "seats": "as many requests ran as may (--max-num-seqs)",
    "tokens": "the steps were full with others' tokens (--max-num-batched-tokens)",
}
_ENDS = {"timeout": "it ended because its time was over", "abort": "it ended because the client went away"}
_SHORT, _SMALL = 0.01, 0.05
"""What took fewer seconds, or a smaller share of the whole, gets no sentence."""
_ALWAYS = float("inf")


class PromptChunk(TypedDict):
    """A step that computed several tokens of a choice."""

    at: float
    num_tokens: int
    num_step_tokens: int
    """Tokens of all requests in the step."""
    num_step_requests: int


class ChoiceTimeline(TypedDict):
    """One continuation of one prompt. Times are seconds since the request's arrival, null while the thing has not
    happened."""

    id: str
    """The choice's id in the engine."""
    status: Literal["waiting", "running", "ended"]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    num_output_tokens: int
    num_blocks: int | None
    """Blocks of the KV cache that it holds now."""
    queued: float
    admitted: float | None
    """When its first step began."""
    first_token: float | None
    ended: float | None
    chunks: list[PromptChunk]
    """The first 64 of `num_chunks`."""
    num_chunks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_decode_steps: int
    """Steps of the engine behind the first token."""
    mean_step_requests: float
    """Requests in each of those steps, on average."""
    time_per_output_token: float
    """Seconds between two tokens, on average."""


class RequestTimeline(TypedDict):
    id: str
    """The X-Request-Id."""
    response_id: str | None
    method: str
    route: str
    model: str
    status: Literal["running", "ended"]
    http_status: int | None
    error: str | None
    """Code or type of the error that was the answer."""
    received_at: float
    """Seconds since 1970."""
    seconds: float
    """Until its end, or until now."""
    num_choices: int
    choices: list[ChoiceTimeline]
    """The first 64 of `num_choices`."""
    why: list[str]
    """Where the time went, in words."""


class RequestNotFound(RequestError):
    status = 404
    type = "invalid_request_error"


@router.get("/v1/requests/{request_id:path}", response_model=RequestTimeline, responses={404: {"model": ErrorResponse}})
async def request_timeline(request_id: str, request: Request, serving: ServingOf) -> Response:
    """What happened to a request, and why it took its time."""
    record = serving.requests.find(request_id, current_owner())
    if record is None:
        raise RequestNotFound(f"no request {shown(request_id)} runs or is among the latest (--max-kept-timelines)")
    snapshots: dict[str, RequestSnapshot] = {}
    if record.ended is None:
        with contextlib.suppress(Unavailable, TimeoutError):  # what the engine said before is better than nothing
            snapshots = {one.request_id: one for one in (await request.app.state.live.snapshot()).requests}
    now = time.monotonic()
    timeline = _filled(
        RequestTimeline,
        record,
        id=record.request_id,
        model=serving.model.id,
        status="running" if record.ended is None else "ended",
        http_status=record.status or None,
        received_at=round(record.received_at, 3),
        seconds=round((record.ended or now) - record.received, 6),
        choices=[_choice_timeline(choice, snapshots.get(choice.request_id)) for choice in record.choices],
        why=reasons(record, serving.requests.wait_causes, now),
    )
    return Response(msgspec.json.encode(timeline), media_type="application/json")


def _filled(form: Any, *sources: msgspec.Struct, **others: Any) -> dict[str, Any]:
    """A dictionary of this form, with what the sources have under the same names, and the others."""
    known = {name: value for source in sources for name, value in msgspec.structs.asdict(source).items()} | others
    return {name: known[name] for name in form.__annotations__}


def _choice_timeline(choice: ChoiceRecord, snapshot: RequestSnapshot | None) -> dict[str, Any]:
    """The snapshot is there for a choice that runs, unless the engine has not answered."""
    state: dict[str, Any] = {"status": "waiting" if choice.admitted is None else "running", "num_blocks": None}
    if choice.ended is not None:
        state = {"status": "ended", "num_blocks": 0}
    elif snapshot is not None:
        choice.timeline = snapshot.timeline
        state["status"] = "running" if snapshot.is_running else "waiting"
        state["num_output_tokens"] = snapshot.num_tokens - snapshot.num_prompt_tokens
        state["num_blocks"] = sum(map(bool, snapshot.block_ids))

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - choice.received, 6)

    timeline = choice.timeline
    return _filled(
        ChoiceTimeline,
        timeline,
        choice,
        id=choice.request_id,
        queued=since(timeline.queued),
        admitted=since(timeline.admitted),
        first_token=since(choice.first_token),
        ended=since(choice.ended),
        chunks=[_filled(PromptChunk, chunk, at=since(chunk.time)) for chunk in timeline.chunks],
        mean_step_requests=round(timeline.mean_step_requests, 2),
        time_per_output_token=round(choice.time_per_output_token, 6),
        **state,
    )


def reasons(record: RequestRecord, causes: Iterable[WaitCause], now: float) -> list[str]:
    """Where the time of the slowest choice went. `causes`: since when somebody waited for what, oldest first."""
    choice, end = record.slowest(), record.ended or now
    if choice is None:
        return ["the engine was not asked" if record.ended is not None else "the engine has not been asked yet"]
    timeline = choice.timeline
    prepare, queue, prefill, decode = choice.phases(now)
    behind = end - (choice.ended or end)
    least = max(_SHORT, _SMALL * (end - record.received))
    waited = (queue, f"it waited {queue:.2f} s for its turn")
    if choice.admitted is None and choice.ended is None:
        waited = (_ALWAYS, f"it has waited {queue:.2f} s for its turn by now")
    times = "once" if timeline.num_preemptions == 1 else f"{timeline.num_preemptions} times"
    recomputed = f"{timeline.num_recomputed_tokens} tokens were computed again"
    bad_end = {**_ENDS, "error": f"it failed: {record.error or 'see the log'}"}.get(choice.finish_reason or "")
    parts = (
        (prepare, f"{prepare:.2f} s passed before the engine had it: its body, its tokens, or no engine was there"),
        waited,
        *(_waits(choice, causes, timeline.queued + queue) if queue >= least else ()),
        (prefill, _prefill(choice, prefill)),
        (timeline.num_preemptions and _ALWAYS, f"it was preempted {times}, as the KV cache was full: {recomputed}"),
        (decode, _decode(choice, decode)),
        (bad_end and _ALWAYS, bad_end),
        (behind, f"{behind:.2f} s more passed until the client had taken the answer"),
    )
    sentences = [text for seconds, text in parts if seconds and seconds >= least] or ["nothing held it up"]
    if record.num_choices > 1:
        sentences.insert(0, f"of its {record.num_choices} choices, {choice.request_id} took longest")
    return sentences


def _waits(choice: ChoiceRecord, causes: Iterable[WaitCause], until: float) -> Iterator[tuple[float, str]]:
    if choice.is_structured:
        yield _ALWAYS, "part of that may be its grammar, which is compiled before it may begin"
    seconds = dict.fromkeys(_CAUSES, 0.0)
    for (begin, cause), (end, _) in pairwise([*causes, (until, None)]):
        if cause is not None:
            seconds[cause] += max(0.0, min(end, until) - max(begin, choice.timeline.queued))
    for cause, why in _CAUSES.items():
        if seconds[cause] >= _SHORT:
            yield _ALWAYS, f"for {seconds[cause]:.2f} s of that, {why}"


def _prefill(choice: ChoiceRecord, seconds: float) -> str:
    timeline = choice.timeline
    cached = f", {choice.num_cached_tokens} of them cached," if choice.num_cached_tokens else ""
    text = f"its prompt of {choice.num_prompt_tokens} tokens{cached} took {seconds:.2f} s"
    if timeline.chunks:
        text += f" in {timeline.num_chunks} step" + "s" * (timeline.num_chunks > 1)
    own = sum(one.num_tokens for one in timeline.chunks)
    everybody = sum(one.num_step_tokens for one in timeline.chunks)
    return text + (f", of whose tokens {1 - own / everybody:.0%} were others'" if own < everybody else "")


def _decode(choice: ChoiceRecord, seconds: float) -> str:
    text = f"the tokens behind the first one took {seconds:.2f} s"
    if each := choice.time_per_output_token:
        text = f"{choice.num_output_tokens - 1} {text.removeprefix('the ')}, {each * 1e3:.1f} ms each"
    if mean := choice.timeline.mean_step_requests:
        text += f", in steps of {mean:.1f} requests on average" if mean >= 1.05 else ", alone in its steps"
    return text
