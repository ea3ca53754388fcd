"""What the routes work with: the engine as they see it, and the one served model."""

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Depends
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.types import Scope

from configs.errors import EngineDead, InvalidRequest, ModelNotFound, ShuttingDown, shown
from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server import version
from server.metrics.prometheus import EngineMetrics
from server.metrics.records import current_owner
from server.metrics.tracker import RequestTracker
from server.preparation import Preparation


class Model(BaseModel):
    """What OpenAI's clients read of a model, and what Anthropic's do."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds."""
    owned_by: str = "octavo"
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """The same moment as `created`."""
    lifecycle: str = "active"


class Serving:
    """One engine, under the names of its model. Lives in `app.state.serving`."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, model_name: str) -> None:
        self.engine = engine
        self.config = config
        info = engine.info
        names = dict.fromkeys([model_name, *filter(None, config.served_model_name or ())])
        self.models = {name: _model(name, int(time.time()), info.max_model_len) for name in names}
        """The one that is served, by each of its names."""
        self.model = self.models[model_name]
        parts = (version(), model_name, info.architecture, info.dtype, info.device, info.attention_backend)
        self.system_fingerprint = "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        """Equal fingerprints, seeds and parameters give equal answers."""
        self.num_running = 0
        """Requests with a body that are being answered, and responses in the background."""
        self.drained_by: float | None = None
        """While the server finishes what runs and takes nothing more: when it ends, on the monotonic clock."""
        self.preparation = Preparation(config.max_body_bytes)
        self.metrics = EngineMetrics(engine, config, model_name, lambda: self.num_running)
        self.requests = engine.observer = RequestTracker(self.metrics, config, model_name)

    def check_alive(self) -> None:
        """Raise `ShuttingDown` or `EngineDead` where nothing that comes now will be answered."""
        if self.drained_by is not None:
            raise self.shutting_down()
        if self.engine.is_dead:
            raise EngineDead()

    def shutting_down(self) -> ShuttingDown:
        assert self.drained_by is not None
        return ShuttingDown(retry_after=max(1, math.ceil(self.drained_by - time.monotonic())))

    @contextlib.contextmanager
    def working(self, scope: Scope | None = None) -> Iterator[None]:
        """Around what has to be finished before the server ends: a request, or other work."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if scope is not None:
                self.preparation.release(scope)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work`, which has to be finished too."""
        working = contextlib.ExitStack()
        working.enter_context(self.working())
        working.callback(self.requests.keep_open())
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: working.close())
        return task

    def deadline(self, timeout: float | None) -> float | None:
        """On the monotonic clock, of a request that asks for `timeout` seconds: the server's own bound holds too."""
        bounds = [seconds for seconds in (timeout, self.config.request_timeout) if seconds]
        return time.monotonic() + min(bounds) if bounds else None

    def check_model(self, name: str | None) -> Model:
        """The model by one of its names, with or without Ollama's tag `latest`; no name stands for the first.

        Raises `ModelNotFound`.
        """
        if not name:
            return self.model
        found = self.models.get(name) or self.models.get(name.removesuffix(":latest"))
        if found is None:
            served = " and ".join(map(repr, self.models))
            raise ModelNotFound(f"the model {shown(name)} does not exist; this server serves {served}")
        return found

    def check_number_of_choices(self, num_prompts: int, n: int) -> None:
        """Raises `InvalidRequest` before anything is made per choice."""
        limit = self.config.max_choices
        if num_prompts * n > limit:
            message = f"a request may have {limit} choices; got {num_prompts} prompts with {n} each"
            raise InvalidRequest(message, param="n" if n > 1 else "prompt")


def _model(name: str, created: int, max_model_len: int) -> Model:
    moment = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return Model(id=name, display_name=name, created=created, created_at=moment, max_model_len=max_model_len)


def own_cache_salt(given: str | None) -> str | None:
    """Prompts of different keys share no cached prefix, which `usage` would tell of, unless both name the same salt."""
    return (current_owner() or None) if given is None else given


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


async def _serving(request: Request) -> Serving:
    """FastAPI would call a plain function in a thread."""
    return serving_of(request)


ServingOf = Annotated[Serving, Depends(_serving)]
