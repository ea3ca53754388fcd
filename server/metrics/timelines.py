"""A request's record as the world sees it."""

import time
from collections.abc import Iterable, Mapping
from typing import Literal

from engine.messages import RequestSnapshot
from scheduler.timeline import Timeline
from server.metrics.records import Choice, RequestRecord
from server.metrics.watcher import Cause
from server.metrics.why import sentences
from server.protocol.timelines import ChoiceTimeline, PromptChunk, RequestTimeline


def timeline_of(
    record: RequestRecord, model: str, snapshots: Mapping[str, RequestSnapshot], causes: Iterable[Cause]
) -> RequestTimeline:
    """`snapshots`: what the engine says of choices that run, by their ids; may lack any."""
    for choice in record.choices:
        if choice.ended is None and (snapshot := snapshots.get(choice.request_id)):
            choice.timeline = snapshot.timeline
    now = time.monotonic()
    return RequestTimeline(
        id=record.name,
        response_id=record.response_id,
        method=record.method,
        route=record.route,
        model=model,
        status="running" if record.ended is None else "ended",
        http_status=record.status or None,
        error=record.error,
        received_at=round(record.received_at, 3),
        seconds=round((record.ended or now) - record.received, 6),
        num_choices=record.num_choices,
        choices=[_choice(choice, snapshots.get(choice.request_id)) for choice in record.choices],
        why=sentences(record, causes, now),
    )


def _choice(choice: Choice, snapshot: RequestSnapshot | None) -> ChoiceTimeline:
    timeline = choice.timeline or Timeline(queued=choice.began)
    has_ended = choice.ended is not None
    num_output = choice.num_output_tokens
    if snapshot is not None and not has_ended:
        num_output = snapshot.num_tokens - snapshot.num_prompt_tokens

    def at(moment: float | None) -> float | None:
        return None if moment is None else round(moment - choice.received, 6)

    return ChoiceTimeline(
        id=choice.request_id,
        status=_status(choice, snapshot),
        finish_reason=choice.finish_reason,
        num_prompt_tokens=choice.num_prompt_tokens,
        num_cached_tokens=choice.num_cached_tokens,
        num_output_tokens=num_output,
        num_blocks=0 if has_ended else None if snapshot is None else sum(map(bool, snapshot.block_ids)),
        queued=round(timeline.queued - choice.received, 6),
        admitted=at(timeline.admitted),
        first_token=at(choice.first_token),
        ended=at(choice.ended),
        chunks=[
            PromptChunk(
                round(one.time - choice.received, 6), one.num_tokens, one.num_step_tokens, one.num_step_requests
            )
            for one in timeline.chunks
        ],
        num_chunks=timeline.num_chunks,
        num_preemptions=timeline.num_preemptions,
        num_recomputed_tokens=timeline.num_recomputed_tokens,
        num_decode_steps=timeline.num_decode_steps,
        mean_step_requests=round(timeline.mean_step_requests, 2),
        time_per_output_token=round(choice.time_per_output_token, 6),
    )


def _status(choice: Choice, snapshot: RequestSnapshot | None) -> Literal["waiting", "running", "ended"]:
    if choice.ended is not None:
        return "ended"
    is_running = choice.admitted is not None if snapshot is None else snapshot.is_running
    return "running" if is_running else "waiting"
