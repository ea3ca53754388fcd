"""What a core would tell of the requests of a `FakeEngine`: statistics, timelines, and all that an observer hears."""

import time
from collections.abc import Sequence
from typing import Any

from configs.sampling import SamplingParams
from engine.messages import AddRequest, StepStats, TokenOutput
from engine.observer import Observer
from engine.outputs import RequestOutput
from scheduler.timeline import Chunk, Counters, Timeline


class FakeCore:
    """Every request is admitted at once, holds one block, and shares its steps with all others of its call."""

    def __init__(self) -> None:
        self.observer = Observer()
        self.counters = Counters()
        self.begun: dict[str, Any] = {}
        """What the observer knows them by, and"""
        self.timelines: dict[str, Timeline] = {}
        """those of the requests that run."""
        self.wait_cause: str | None = None
        self.num_waiting = 0

    def begin(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        now = time.monotonic()
        self.counters.num_prefix_queries += len(token_ids)
        self.timelines[request_id] = Timeline(queued=now, admitted=now)
        self.timelines[request_id].add_chunk(Chunk(now, len(token_ids), len(token_ids), 1))
        request = AddRequest(request_id=request_id, prompt_token_ids=token_ids, sampling_params=params)
        self.begun[request_id] = self.observer.began(request)

    def step(self, outputs: Sequence[tuple[str, RequestOutput]]) -> None:
        now = time.monotonic()
        self.counters.num_steps += 1
        self.counters.num_step_requests += len(outputs)
        self.counters.num_step_tokens += len(outputs)
        told = []
        for request_id, output in outputs:
            timeline = self.timelines[request_id]
            is_first = timeline.first_token is None
            if is_first:
                timeline.note_first_token(now, self.counters)
            if output.finish_reason is not None:
                timeline.note_end(now, self.counters)
            told.append(
                TokenOutput(
                    request_id=request_id,
                    new_token_ids=output.token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                    timeline=timeline if is_first or output.finish_reason is not None else None,
                )
            )
        self.observer.stepped(told, self.stats(now, len(outputs)))
        for request_id, output in outputs:
            if output.finish_reason is not None:
                timeline = self.timelines.pop(request_id)
                begun = self.begun.pop(request_id)
                self.observer.ended(begun, output.finish_reason, output.num_output_tokens, timeline)

    def end(self, request_id: str, reason: str, num_output_tokens: int) -> None:
        """Here, and not in the core."""
        del self.timelines[request_id]
        self.observer.ended(self.begun.pop(request_id), reason, num_output_tokens, None)

    def stats(self, now: float = 0.0, step_tokens: int = 0) -> StepStats:
        num_running = len(self.timelines)
        return StepStats(
            *(now, num_running, self.num_waiting, num_running),
            *(0.004, step_tokens, self.wait_cause, self.counters),
        )
