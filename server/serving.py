"""What the routes work with: the engine as they see it, and the one served model."""

import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import Request

from configs.errors import EngineDead, InvalidRequest, ModelNotFound
from configs.sampling import SamplingParams
from configs.settings import ServerConfig
from engine.messages import CoreReady
from engine.outputs import OutputBatch, RequestOutput
from server.protocol.common import Model
from server.version import version


class TokenizerFace(Protocol):
    bos_token_id: int | None

    def token_bytes(self, token_id: int) -> bytes: ...


class EngineFace(Protocol):
    """The part of `AsyncEngine` that answers requests; its docstrings hold."""

    @property
    def info(self) -> CoreReady: ...
    @property
    def tokenizer(self) -> TokenizerFace: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def is_dead(self) -> bool: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]: ...

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None: ...

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def generate_many(
        self,
        choices: Sequence[tuple[list[int], SamplingParams]],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[OutputBatch, None]: ...


class Serving:
    """One engine under one name. Lives in `app.state.serving`."""

    def __init__(self, engine: EngineFace, config: ServerConfig, model_name: str) -> None:
        self.engine = engine
        self.config = config
        info = engine.info
        self.model = Model(id=model_name, created=int(time.time()), max_model_len=info.max_model_len)
        parts = (version(), model_name, info.architecture, info.dtype, info.device, info.attention_backend)
        self.system_fingerprint = "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        """Equal fingerprints, seeds and parameters give equal answers."""

    def check_alive(self) -> None:
        if self.engine.is_dead:
            raise EngineDead()

    def check_model(self, name: str | None) -> None:
        """None, a request that names no model, is answered by the served one."""
        if name is not None and name != self.model.id:
            raise ModelNotFound(f"the model {name!r} does not exist; this server serves {self.model.id!r}")


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def check_number_of_choices(num_prompts: int, n: int, config: ServerConfig) -> None:
    """Raises `InvalidRequest` before anything is made per choice."""
    if num_prompts * n > config.max_choices:
        message = f"a request may have {config.max_choices} choices; got {num_prompts} prompts with n = {n}"
        raise InvalidRequest(message, param="n" if n > 1 else "prompt")
