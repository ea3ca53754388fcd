"""Where a request's time went, in sentences made by plain rules from its times and numbers."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from scheduler.timeline import Chunk
from server.metrics.records import Choice, RequestRecord
from server.metrics.watcher import Cause

NOTABLE_SECONDS, NOTABLE_SHARE = 0.01, 0.05
"""What is shorter than either, by itself or of the whole, is not worth a sentence."""
_CAUSES = {
    "blocks": "the KV cache had no room for it (--kv-cache-tokens)",
    "seats": "as many requests ran as may (--max-num-seqs)",
    "tokens": "the steps were full with others' tokens (--max-num-batched-tokens)",
}


def sentences(record: RequestRecord, causes: Iterable[Cause], now: float) -> list[str]:
    """Of the choice that took longest. `causes`: since when somebody waited for what, oldest first."""
    choice = record.slowest()
    if choice is None:
        return ["the engine was not asked"] if record.ended is not None else ["the engine has not been asked yet"]
    said = list(_of_choice(record, choice, list(causes), now)) or ["nothing held it up"]
    if record.num_choices > 1:
        said.insert(0, f"of its {record.num_choices} choices, {choice.request_id} took longest")
    return said


def _of_choice(record: RequestRecord, choice: Choice, causes: list[Cause], now: float) -> Iterator[str]:
    end = record.ended or now
    total = end - record.received
    phases = choice.phases(now)

    def notable(seconds: float) -> bool:
        return seconds >= NOTABLE_SECONDS and seconds >= NOTABLE_SHARE * total

    if notable(phases.prepare):
        yield f"{phases.prepare:.2f} s passed before the engine had it: its body, its tokens, or no engine was there"
    if choice.admitted is None and choice.ended is None:
        yield f"it has waited {phases.queue:.2f} s for its turn by now"
    elif notable(phases.queue):
        yield f"it waited {phases.queue:.2f} s for its turn"
    if notable(phases.queue):
        yield from _waits(choice, causes, choice.admitted or choice.ended or now)
    if notable(phases.prefill):
        yield _prefill(choice, phases.prefill)
    if choice.timeline is not None and choice.timeline.num_preemptions:
        yield _preemptions(choice.timeline.num_preemptions, choice.timeline.num_recomputed_tokens)
    if notable(phases.decode):
        yield _decode(choice, phases.decode)
    yield from _end(record, choice, now, notable_rest=notable(end - (choice.ended or end)))


def _waits(choice: Choice, causes: Sequence[Cause], until: float) -> Iterator[str]:
    since = choice.queued
    if choice.is_structured:
        yield "part of that may be its grammar, which is compiled before it may begin"
    for cause, why in _CAUSES.items():
        seconds = 0.0
        for (begin, one), (end, _) in pairwise([*causes, (until, None)]):
            if one == cause:
                seconds += max(0.0, min(end, until) - max(begin, since))
        if seconds >= NOTABLE_SECONDS:
            yield f"for {seconds:.2f} s of that, {why}"


def _prefill(choice: Choice, seconds: float) -> str:
    text = f"its prompt of {choice.num_prompt_tokens} tokens"
    if choice.num_cached_tokens:
        text += f", {choice.num_cached_tokens} of them cached,"
    text += f" took {seconds:.2f} s"
    chunks: list[Chunk] = choice.timeline.chunks if choice.timeline is not None else []
    if choice.timeline is None or not chunks:
        return text
    own, all_tokens = (
        sum(values) for values in zip(*[(one.num_tokens, one.num_step_tokens) for one in chunks], strict=True)
    )
    text += f" in {choice.timeline.num_chunks} step" + "s" * (choice.timeline.num_chunks > 1)
    return text + (f", of whose tokens {1 - own / all_tokens:.0%} were others'" if own < all_tokens else "")


def _preemptions(count: int, num_recomputed: int) -> str:
    times = "once" if count == 1 else f"{count} times"
    return f"it was preempted {times}, as the KV cache was full: {num_recomputed} tokens were computed again"


def _decode(choice: Choice, seconds: float) -> str:
    text = f"the tokens behind the first one took {seconds:.2f} s"
    if choice.time_per_output_token:
        each = choice.time_per_output_token * 1e3
        text = f"{choice.num_output_tokens - 1} {text.removeprefix('the ')}, {each:.1f} ms each"
    mean = choice.timeline.mean_step_requests if choice.timeline is not None else 0.0
    return text + (
        f", in steps of {mean:.1f} requests on average" if mean >= 1.05 else ", alone in its steps" if mean else ""
    )


def _end(record: RequestRecord, choice: Choice, now: float, *, notable_rest: bool) -> Iterator[str]:
    if choice.finish_reason == "timeout":
        yield "it ended because its time was over"
    elif choice.finish_reason == "abort":
        yield "it ended because the client went away"
    elif choice.finish_reason == "error":
        yield f"it failed: {record.error or 'see the log'}"
    if notable_rest and choice.ended is not None:
        yield f"{(record.ended or now) - choice.ended:.2f} s more passed until the client had taken the answer"
