"""One run: answers alone, then chaos."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tests.engine.tiny_models import write_tiny
from tests.server.test_live_server import LiveServer, live_server

from .answers import Answer
from .chaos import Chaos
from .clients import Clients
from .disturbances import Disturbances
from .jobs import MAX_MODEL_LEN, Job, JobMaker, with_stop_string
from .monkey import UNRESPONSIVE_TIMEOUT
from .plan import Plan
from .report import Report, judge_log

ALONE = ("--max-num-seqs", "1", "--no-enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN))
CROWDED = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-tokens", str(2 * MAX_MODEL_LEN)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--scheduling-policy", "priority"),
    *("--max-queued-requests", "48", "--client-timeout", "4", "--request-read-timeout", "3"),
    *("--restart-patience", "3", "--max-restarts", "1000", "--unresponsive-timeout", str(UNRESPONSIVE_TIMEOUT)),
    *("--max-kept-timelines", "100", "--max-stored-responses", "100"),
)


class Run:
    def __init__(self, plan: Plan, folder: Path) -> None:
        """`folder` is empty and stays when the run is over."""
        self.plan = plan
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.report = Report(plan.seed)

    def run(self) -> Report:
        model = self.plan.model or self._tiny_model()
        with self._server("alone", model, *ALONE) as server:
            solo = asyncio.run(self._answer_alone(server.port))
        with self._server("crowded", model, *CROWDED, *self.plan.flags) as server:
            chaos = Chaos(self.plan, server, solo, self.report)
            asyncio.run(chaos.run())
            judge_log(self.report, server.log, chaos.clients)
        self.report.violations += [f"left in TMPDIR: {path.name}" for path in self.temporary.iterdir()]
        return self.report

    def _tiny_model(self) -> str:
        folder = self.folder / "tiny"
        folder.mkdir()
        write_tiny(folder)
        return str(folder)

    @contextlib.contextmanager
    def _server(self, name: str, model: str, *flags: str) -> Iterator[LiveServer]:
        prefix = ("env", f"TMPDIR={self.temporary}")
        with live_server(self.folder / f"{name}.log", *flags, model=model, prefix=prefix) as server:
            server.wait_ready()
            yield server

    async def _answer_alone(self, port: int) -> dict[Job, Answer]:
        rng = self.plan.rng("jobs")
        maker = JobMaker(rng)
        clients = Clients(port, {}, Disturbances())
        solo: dict[Job, Answer] = {}
        begin = time.monotonic()
        for number in range(self.plan.num_jobs):
            job = maker.job(number)
            solo[job] = await clients.answer(job)
            text = solo[job].choices[0].text if 0 in solo[job].choices else ""
            if rng.random() < 0.3 and text and job.takes_stop_strings:
                stopping = with_stop_string(rng, job, text)
                solo[stopping] = await clients.answer(stopping)
        self.report.note(f"{len(solo)} requests answered alone in {time.monotonic() - begin:.1f} s")
        return solo
