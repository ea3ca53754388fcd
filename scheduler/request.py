"""`Request`: one prompt with its output, as the scheduler keeps it."""

import enum

from configs.sampling import SamplingParams

from .timeline import Timeline


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; a preempted request goes back to WAITING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """State of one request. The scheduler changes it; everybody else reads.

    token_ids  |<- num_prompt_tokens ->|<- num_output_tokens ->|<- num_pending_tokens ->|
               |<-  num_computed_tokens  ->|<-          behind by              ->|

    The KV of the first `num_computed_tokens` tokens exists, or will once the steps that are under way have run; the
    request is *behind* by the rest. Pending tokens are chosen by such steps: their ids are not known here yet. All
    counts are in tokens. `block_ids`, `block_hashes`, `num_registered_blocks` and `num_released_blocks` belong to
    `KVCacheManager`.
    """

    __slots__ = (
        "admission",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "deadline",
        "eos_token_ids",
        "error",
        "extra_keys",
        "finish_reason",
        "needs_newest_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_ever_computed_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_released_blocks",
        "order",
        "priority",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "timeline",
        "token_ids",
        "wants_output",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        extra_keys: tuple[str, ...] = (),
        seed: int = 0,
        deadline: float | None = None,
    ) -> None:
        """`arrival_time` and `deadline` in seconds on the caller's clock; requests share cached blocks only with equal
        `extra_keys` (cache salt, adapter, …); `seed` goes to the sampler as it is."""
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.eos_token_ids = () if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(self.eos_token_ids).union(sampling_params.stop_token_ids)
        self.wants_output = sampling_params.max_tokens != 0
        # whether the host has to know the newest token before it can say how the next one is chosen
        self.needs_newest_token = (
            sampling_params.structured is not None
            or sampling_params.thinking is not None
            or any(len(sequence) > 1 for sequence in sampling_params.bad_sequences)
        )
        self.priority = priority
        self.extra_keys = extra_keys
        self.seed = seed
        self.deadline = deadline

        self.token_ids = list(prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_ever_computed_tokens = 0  # more than `num_computed_tokens` only after a preemption
        self.num_cached_tokens = 0  # prompt tokens that came from the prefix cache at the first admission
        self.timeline = Timeline(queued=arrival_time)

        self.status = RequestStatus.WAITING
        self.admission = -1  # serial number while running: steps of an earlier admission do not count any more
        self.finish_reason: str | None = None  # stop, complete, length, repetition, timeout, abort or error
        self.stop_reason: int | None = None  # the request's own stop id that matched; None for end-of-sequence
        self.error: str | None = None  # why, when finish_reason is error
        self.order: tuple[int, float, int] = (priority, arrival_time, 0)  # lower runs first; set when added

        self.block_ids: list[int] = []  # block table; 0 where the sliding window has moved on
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as they were needed
        self.num_registered_blocks = 0  # leading blocks that others can find in the prefix cache
        self.num_released_blocks = 0  # leading entries of the block table that are 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_behind(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position of the prompt has to be computed, cached or not: what is asked about the prompt
        leaves with the first output token or at the end, so a preempted request starts over until then."""
        params = self.sampling_params
        return self.num_output_tokens == 0 and (params.prompt_logprobs is not None or params.pooling == "mean")

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
