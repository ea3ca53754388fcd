"""Clients of all manners, each of which sends one request after the other and judges what it gets."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator

from .answers import Answer, Events, Violation
from .connection import Connection, ConnectionLost
from .dialects import read_event, read_whole
from .disturbances import Disturbances
from .jobs import Job
from .verdicts import Attempt, judge

MOST_SECONDS = 60.0
"""Of one request: one that takes longer hangs."""
FORGOTTEN_WITHIN = 2.0
"""Seconds from a client's leave until nothing runs for it any more."""
REQUEST_ID = "X-Request-Id"


class Clients:
    """Many that share the jobs and the server, and what has come of both."""

    def __init__(self, port: int, solo: dict[Job, Answer], disturbances: Disturbances) -> None:
        self.port = port
        self.solo = solo
        self.jobs = list(solo)
        self.disturbances = disturbances
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.answered: set[str] = set()
        """Ids of the requests that got an answer, whole or not."""
        self.sent: dict[str, None] = {}
        """Ids of all requests, in their order."""
        self.latest_ends: dict[str, float] = {"engine_dead": 0.0, "timeout": 0.0}
        """Seconds from a kill, or a deadline, until the last one knew of it."""
        self._left: dict[str, float] = {}
        """When a client went away from a request with an id of its own."""
        self._is_over = False

    def stop(self) -> None:
        """Every client ends with the request that it is at."""
        self._is_over = True

    async def answer(self, job: Job) -> Answer:
        """Undisturbed. Raises `Violation` for an error."""
        attempt = Attempt(f"alone-{job.name}".replace(" ", "-"), job)
        async with asyncio.timeout(MOST_SECONDS):
            self._close(await self._exchange(attempt, None, random.Random()))
        if attempt.answer.status != 200:
            raise Violation(f"{job.body}: {attempt.answer.error}")
        return attempt.answer

    async def client(self, name: str, rng: random.Random) -> None:
        connection = None
        count = 0
        while not self._is_over:
            count += 1
            attempt = self.attempt(f"chaos-{name}-{count}", rng)
            if attempt.job.is_openai and rng.random() < 0.2:
                attempt.fields["request_id"] = f"of-{name}"
            connection = await self.make(attempt, connection, rng)
            await asyncio.sleep(rng.choice((0, 0, 0, 0.01, 0.1, 0.5)))
        self._close(connection)

    async def crowd(self, name: str, size: int, rng: random.Random) -> None:
        """All at the same moment."""

        attempts = [self.attempt(f"chaos-{name}-{number}", rng) for number in range(size)]
        await asyncio.gather(*(self.once(attempt, rng) for attempt in attempts))

    async def once(self, attempt: Attempt, rng: random.Random) -> None:
        """On a connection of its own."""
        self._close(await self.make(attempt, None, rng))

    def attempt(self, attempt_id: str, rng: random.Random) -> Attempt:
        attempt = Attempt(attempt_id, rng.choice(self.jobs))
        job, fields = attempt.job, attempt.fields
        attempt.manner = rng.choices(("read", "slow", "leave"), (70, 8, 22))[0]
        if rng.random() < 0.1:
            attempt.timeout = rng.choice((0.02, 0.2, 0.5, 1.0))
        if rng.random() < 0.15 and job.is_openai:
            fields["priority"] = -1
        if job.path == "/v1/responses" and rng.random() < 0.4:
            attempt.manner, fields["background"] = "poll", True
        elif job.can_stream and (attempt.manner == "slow" or rng.random() < 0.6):
            attempt.stream = True
            if job.is_openai:
                fields["stream_interval"] = rng.choice((1, 1, 5, 50))
                fields["stream_options"] = {"include_usage": True}
        return attempt

    async def make(self, attempt: Attempt, connection: Connection | None, rng: random.Random) -> Connection | None:
        """Send it and judge its answer; returns the connection if it can be used again."""
        attempt.began = time.monotonic()
        with self.noting(attempt):
            try:
                async with asyncio.timeout(MOST_SECONDS):
                    connection = await self._exchange(attempt, connection, rng)
            except TimeoutError as error:
                raise Violation(f"no end within {MOST_SECONDS} s") from error
            except (ConnectionLost, OSError) as error:
                raise Violation(f"the connection was lost: {error}") from error
            attempt.ended = time.monotonic()
            if attempt.answer.error is not None:  # whoever is the cause of it notes so a moment later
                await asyncio.sleep(0.2)
            outcome = self._judge(attempt)
            self.outcomes[outcome] += 1
            self._measure(attempt, outcome)
            return connection
        return None

    @contextlib.contextmanager
    def noting(self, attempt: Attempt) -> Iterator[None]:
        """What goes wrong."""
        self.sent[attempt.id] = None
        try:
            yield
        except Violation as violation:
            self.violations.append(f"{violation}; {attempt}")
        if attempt.answer.status:
            self.answered.add(attempt.id)

    async def _exchange(self, attempt: Attempt, connection: Connection | None, rng: random.Random) -> Connection | None:
        """Leaves on its own account where that is the client's manner."""
        is_slow = attempt.manner == "slow"
        patience = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5)) * rng.random() if attempt.manner == "leave" else None
        try:
            async with asyncio.timeout(patience):
                if connection is None or is_slow or not connection.can_stay:
                    self._close(connection)
                    connection = await Connection.open(self.port, small=is_slow)
                connection.send("POST", attempt.job.path, attempt.body, {REQUEST_ID: attempt.id})
                await self._read(attempt, connection, pause=rng.uniform(0.002, 0.03) if is_slow else 0.0)
                if attempt.manner == "poll" and attempt.answer.status == 200:
                    await self._poll(attempt, connection, rng)
        except TimeoutError:
            attempt.has_left = not attempt.answer.is_whole
            self._close(connection, abruptly=rng.random() < 0.5)
            return None
        except BaseException:
            self._close(connection)
            raise
        if connection.can_stay and not is_slow:
            return connection
        connection.close()
        return None

    def _close(self, connection: Connection | None, *, abruptly: bool = False) -> None:
        if connection is not None:
            connection.close(abruptly=abruptly)

    async def _read(self, attempt: Attempt, connection: Connection, pause: float) -> None:
        answer, head = attempt.answer, await connection.head()
        if head.headers.get(REQUEST_ID.lower()) != attempt.id:
            raise Violation(f"the answer to {head.headers.get(REQUEST_ID.lower())}")
        answer.status, answer.headers = head.status, head.headers
        path, media_type = attempt.job.path, head.headers["content-type"].partition(";")[0]
        if media_type == "application/json":
            read_whole(path, answer, await connection.body(head))
            return
        events = Events(b"\n" if media_type == "application/x-ndjson" else b"\n\n")
        async for piece in connection.pieces(head):
            for event in events.push(piece):
                read_event(path, answer, event)
            if pause:
                await asyncio.sleep(pause)
        if events.rest:
            raise Violation(f"half an event: {events.rest!r}")

    async def _poll(self, attempt: Attempt, connection: Connection, rng: random.Random) -> None:
        """Ask for the answer until it is there; a part of the clients loses patience and cancels it."""
        place = f"{attempt.job.path}/{attempt.answer.id}"
        patience = rng.randrange(4) if rng.random() < 0.2 else None
        for count in itertools.count():
            await asyncio.sleep(0.05)
            if patience == count:
                connection.send("POST", f"{place}/cancel")
            else:
                connection.send("GET", place)
            head = await connection.head()
            attempt.answer = answer = Answer(head.status, head.headers)
            read_whole(attempt.job.path, answer, await connection.body(head))
            if patience == count:
                attempt.has_left = answer.choice().finish_reason is None
            if answer.error is not None or answer.choice().finish_reason is not None or attempt.has_left:
                return

    def _judge(self, attempt: Attempt) -> str:
        """A request that its client has left may go on for a moment, and so its id be in use."""
        error, own_id = attempt.answer.error, attempt.fields.get("request_id", "")
        if (
            error
            and error.get("param") == "request_id"
            and attempt.began - self._left.get(own_id, 0.0) < FORGOTTEN_WITHIN
        ):
            return "id_in_use"
        outcome = judge(attempt, self.solo[attempt.job], self.disturbances)
        if outcome == "left":
            self._left[own_id] = attempt.ended
        return outcome

    def _measure(self, attempt: Attempt, outcome: str) -> None:
        if attempt.manner != "read":
            return
        if outcome == "engine_dead":
            seconds = self.disturbances.seconds_since_kill(attempt.ended)
        elif outcome == "timeout" and attempt.timeout is not None:
            seconds = attempt.ended - attempt.began - attempt.timeout
        else:
            return
        self.latest_ends[outcome] = max(self.latest_ends[outcome], seconds)
