"""What the routes work with: the engine as they see it, and the one served model."""

import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

from starlette.requests import Request

from configs.errors import EngineDead, InvalidRequest, ModelNotFound
from configs.sampling import SamplingParams
from configs.settings import ServerConfig
from engine.input_processor import RenderedChat
from engine.messages import CoreReady
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.protocol.common import Model
from server.version import version


class TokenizerFace(Protocol):
    bos_token_id: int | None
    special_tokens: dict[str, str]

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_id(self, text: str) -> int | None: ...

    def token(self, token_id: int) -> str: ...


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

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    async def render_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> RenderedChat: ...

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
        interval: int = 1,
    ) -> AsyncGenerator[OutputBatch, None]: ...

    async def embed(
        self,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        pooling: Literal["last", "mean"],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[list[float]]: ...

    async def beam_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        length_penalty: float,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[CompletionOutput]: ...


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
        self.num_running = 0
        """Requests with a body that are being answered."""

    def check_alive(self) -> None:
        if self.engine.is_dead:
            raise EngineDead()

    def check_model(self, name: str | None) -> None:
        """None, a request that names no model, is answered by the served one."""
        if name is not None and name != self.model.id:
            raise ModelNotFound(f"the model {name!r} does not exist; this server serves {self.model.id!r}")

    def check_number_of_choices(self, num_prompts: int, n: int) -> None:
        """Raises `InvalidRequest` before anything is made per choice."""
        limit = self.config.max_choices
        if num_prompts * n > limit:
            message = f"a request may have {limit} choices; got {num_prompts} prompts with n = {n}"
            raise InvalidRequest(message, param="n" if n > 1 else "prompt")


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
