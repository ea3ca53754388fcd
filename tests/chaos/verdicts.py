"""Whether what a client got is one of the few things that it may get."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from .answers import Answer, Choice, Violation
from .disturbances import Disturbances
from .jobs import Job

Manner = Literal["read", "slow", "leave", "poll"]
"""Of a client: as fast as it can; with pauses; only for a while; not at all, but asking for the answer later."""

DEAD_WITHIN = 2.0
"""Seconds from a kill until those whose requests it has ended know."""
TIMEOUT_WITHIN = 0.5
"""Seconds behind a deadline until its answer is there."""
SLACK = 2.0
"""Seconds that this process, the server and the core may wait for one of the machine's processors."""
MOST_RETRY_AFTER = 60
LOGPROB_TOLERANCE = 1e-3
EMBEDDING_TOLERANCE = 1e-4


@dataclass
class Attempt:
    """One request that is sent, and what came of it."""

    id: str
    job: Job
    manner: Manner = "read"
    stream: bool = False
    timeout: float | None = None
    """Its `timeout_s`."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More that does not change the answer."""
    answer: Answer = field(default_factory=Answer)
    began: float = 0.0
    ended: float = 0.0
    has_left: bool = False
    """The client has closed the connection, or cancelled the response, before the answer was whole."""

    def __str__(self) -> str:
        answer = self.answer
        texts = {index: (choice.text[-40:], choice.finish_reason) for index, choice in answer.choices.items()}
        began, ended = self.began % 10**4, time.monotonic() % 10**4
        return (
            f"{self.id} ({self.manner}, {began:.2f} to {ended:.2f} s): {self.job.path} {self.body}:"
            f" {answer.status}, {answer.error or texts}"
        )

    @property
    def body(self) -> dict[str, Any]:
        body = {**self.job.body, **self.fields}
        if self.job.can_stream:
            body["stream"] = self.stream
        return body if self.timeout is None else {**body, "timeout_s": self.timeout}

    def is_late(self, choice: Choice, expected: Choice) -> bool:
        """Whether the choice was cut at the deadline. Anthropic's protocol has no word of its own for that."""
        if self.job.path == "/v1/messages" and self.timeout is not None and choice.finish_reason == "max_tokens":
            return (choice.text, choice.finish_reason) != (expected.text, expected.finish_reason)
        return choice.finish_reason == "timeout"


def judge(attempt: Attempt, solo: Answer, disturbances: Disturbances) -> str:
    """How it has ended. Raises `Violation` where it may not have ended so."""
    answer = attempt.answer
    if not answer.choices.keys() <= solo.choices.keys():
        raise Violation(f"choices {sorted(answer.choices)}, not {sorted(solo.choices)}")
    late = {index for index, choice in answer.choices.items() if attempt.is_late(choice, solo.choices[index])}
    for index, choice in answer.choices.items():
        _check_prefix(choice, solo.choices[index], was_cut=index in late or choice.finish_reason is None)
    if attempt.has_left:
        return "left"
    if not answer.is_whole:
        raise Violation("the answer ended before it was whole")
    if attempt.timeout is not None and attempt.manner == "read":
        check_bound("deadline", attempt.ended - attempt.began - attempt.timeout, TIMEOUT_WITHIN)
    if answer.error is not None:
        return _excuse(attempt, disturbances)
    if late and attempt.timeout is None:
        raise Violation("a timeout that nobody has asked for")
    _check_equal(answer, solo, late)
    return "timeout" if late else "equal"


def _excuse(attempt: Attempt, disturbances: Disturbances) -> str:
    """Why there is an error."""
    answer, life = attempt.answer, (attempt.began, attempt.ended)
    status, code = answer.status, answer.error_code
    if (status, code) == (408, "timeout") and attempt.timeout is not None and not attempt.job.can_stream:
        return "timeout"
    if status == 200 and (answer.choices or attempt.manner == "poll"):  # the error is the end of what had begun
        status = 503
    if (status, code) in ((503, "engine_dead"), (503, "engine_restarting")):
        if not disturbances.killed(*life):
            raise Violation(f"{code}, though no core has been killed")
        if code == "engine_dead" and attempt.manner == "read":
            check_bound("end of a core", disturbances.seconds_since_kill(attempt.ended), DEAD_WITHIN)
    elif (status, code) == (503, "engine_frozen"):
        if not disturbances.stopped(*life):
            raise Violation(f"{code}, though no core has been frozen")
    elif (status, code) != (429, "queue_full"):
        raise Violation(f"status {status}: {answer.error}")
    if answer.status != 200 and not 1 <= int(answer.headers.get("retry-after", 0)) <= MOST_RETRY_AFTER:
        raise Violation(f"status {answer.status} with Retry-After {answer.headers.get('retry-after')}")
    return str(code)


def check_bound(name: str, seconds: float, bound: float) -> None:
    if seconds > bound + SLACK:
        raise Violation(f"{seconds:.2f} s behind the {name} it was told, {bound} s are promised")


def _check_equal(answer: Answer, solo: Answer, late: set[int]) -> None:
    """Choices whose time was over apart."""
    if answer.choices.keys() != solo.choices.keys():
        raise Violation(f"choices {sorted(answer.choices)}, not {sorted(solo.choices)}")
    for index in answer.choices.keys() - late:
        choice, expected = answer.choices[index], solo.choices[index]
        for name in ("finish_reason", "stop_reason", "text", "token_ids", "tokens"):
            found, wanted = getattr(choice, name), getattr(expected, name)
            if found != wanted:
                raise Violation(f"choice {index}: {name} {found!r}, not {wanted!r}")
        _check_close(choice.logprobs, expected.logprobs, LOGPROB_TOLERANCE)
    for embedding, expected_embedding in zip(answer.embeddings or [], solo.embeddings or [], strict=True):
        _check_close(embedding, expected_embedding, EMBEDDING_TOLERANCE)
    if answer.counts is not None and not late and answer.counts != solo.counts:
        raise Violation(f"tokens of prompt and output: {answer.counts}, not {solo.counts}")


def _check_prefix(choice: Choice, expected: Choice, *, was_cut: bool) -> None:
    """A character that was cut comes as a replacement; a stop string may have been cut too, and its beginning told."""
    whole = expected.text + (expected.stop_reason if isinstance(expected.stop_reason, str) else "")
    text = choice.text.rstrip("\ufffd") if was_cut else choice.text
    if not whole.startswith(text):
        raise Violation(f"{text!r} is no beginning of {whole!r}")
    for found, wanted in ((choice.token_ids, expected.token_ids), (choice.tokens, expected.tokens)):
        if (found or []) != (wanted or [])[: len(found or [])]:
            raise Violation(f"{found} are no beginning of {wanted}")


def _check_close(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    if len(found) != len(wanted):
        raise Violation(f"{len(found)} numbers, not {len(wanted)}")
    for one, other in zip(found, wanted, strict=True):
        if (one is None) is not (other is None) or (one is not None and abs(one - other) > tolerance):
            raise Violation(f"{one}, not {other}")
