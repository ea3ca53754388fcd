"""Ollama's API: /api/chat, /api/generate and what tells of the model.

Options of a request stay a plain object here; `server/convert/ollama.py` reads them. What requests leave out comes
from the checkpoint's generation config, not from Ollama's own defaults.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from server.logprobs import TokenLogprob
from server.protocol.common import Int64, ModelRequest, Timeout


class OllamaBody(ModelRequest, kw_only=True):
    any_content_type: ClassVar[bool] = True
    """Clients say what their HTTP library says of its own accord, as curl does in Ollama's examples."""


class OllamaRequest(OllamaBody, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "_debug_render_only": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"keep_alive"})
    """The model stays loaded."""

    stream: bool | None = None
    """Left out, it is true."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    """Whether the template lets the model think; a text is also its `reasoning_effort`."""
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    truncate: bool | None = None
    """False: refuse what the context does not hold. Else a chat loses its oldest messages, a prompt its beginning."""
    shift: bool | None = None
    """True, to drop the beginning when the answer fills the context, is passed over: the answer ends there."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is; the server may have a bound of its own."""


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    """One that ends with an assistant's text is continued by the answer. Without any, nothing is generated."""
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaRequest.unsupported,
        "height": (0,),
        "images": ([],),
        "steps": (0,),
        "template": ("",),  # Go's language
        "width": (0,),
    }

    prompt: str | None = None
    """Of the user. Without one, nothing is generated."""
    suffix: str | None = None
    """What comes behind the answer, for models that can fill in the middle; they get no chat template."""
    system: str | None = None
    raw: bool | None = None
    """The prompt goes to the model without a chat template."""
    context: tuple[Int64, ...] | None = None
    """Token ids that an earlier answer gave, to be continued."""


class EmbeddingBody(OllamaBody, kw_only=True):
    without_effect: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})

    timeout_s: Timeout | None = None
    """Seconds until the request fails with 408; the server may have a bound of its own."""


class EmbedRequest(EmbeddingBody, kw_only=True):
    input: str | list[str] | None = None
    """Without any, nothing is embedded."""
    truncate: bool | None = None
    """False: refuse what the context does not hold. Else the end of each text is cut off."""
    dimensions: Int64 | None = None
    """Keep only this many numbers of each embedding, the first; they are scaled to length 1 again. 0 keeps all."""


class SingleEmbeddingRequest(EmbeddingBody, kw_only=True):
    prompt: str | None = None
    """Without one, nothing is embedded. What the context does not hold is cut off."""


class PullRequest(OllamaBody, kw_only=True):
    without_effect: ClassVar[frozenset[str]] = frozenset({"insecure", "username", "password"})

    name: str | None = None
    """The older name of `model`."""
    stream: bool | None = None
    """Left out, it is true."""


class ShowRequest(OllamaBody, kw_only=True):
    without_effect: ClassVar[frozenset[str]] = frozenset({"verbose"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"options": ({},), "system": ("",), "template": ("",)}

    name: str | None = None
    """The older name of `model`."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Those that change an answer."""

    num_predict: Int64 | None = None
    """Most tokens to generate; -1 and -2 are as many as the context holds."""
    num_ctx: Int64 | None = None
    """The context is always the server's; more than that cannot be had."""
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    """-1 stands for none."""
    stop: str | tuple[str, ...] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Int64 | None = None
    """Penalties look at all tokens, which is -1, or at none, which is 0; others are served as -1."""


OPTIONS_WITHOUT_EFFECT = frozenset(
    {
        "draft_num_predict",
        "f16_kv",
        "low_vram",
        "main_gpu",
        "mirostat_eta",
        "mirostat_tau",
        "num_batch",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
    }
)
"""Hints about resources, and what only counts together with an option that is passed over."""
PASSED_OVER: dict[str, tuple[Any, ...]] = {
    "embedding_only": (False,),
    "logits_all": (False,),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "vocab_only": (False,),
}
"""Options that Ollama's engine has given up as well, with the values that ask for nothing."""


class OllamaError(msgspec.Struct, frozen=True):
    error: str


class EmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float] | str]
    """Scaled to (Euclidean) length 1."""
    total_duration: int
    """Nanoseconds."""
    load_duration: int = 0
    """The model was there already."""
    prompt_eval_count: int


class SingleEmbedding(msgspec.Struct, frozen=True):
    embedding: list[float] | str


class PullStatus(msgspec.Struct, frozen=True):
    status: str = "success"


class OllamaFunction(msgspec.Struct, frozen=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True):
    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds, and tokens. The three parts make up the total."""

    total_duration: int
    load_duration: int
    """Until the engine had the prompt; the model was there already."""
    prompt_eval_count: int
    prompt_eval_duration: int
    """Until the first token."""
    eval_count: int
    eval_duration: int
    """From the first token to the last."""


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str
    """gguf or safetensors."""
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int
    """Bytes of the parameters, about."""
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, frozen=True):
    models: list[OllamaModel]


class ShowResponse(msgspec.Struct, frozen=True, kw_only=True):
    modelfile: str = ""
    parameters: str
    """Sampling defaults, a name and a value in each line."""
    template: str
    """The chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


Logprobs = list[TokenLogprob] | UnsetType


class Version(msgspec.Struct, frozen=True):
    version: str
