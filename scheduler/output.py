"""What the scheduler tells the engine: `SchedulerOutput`, one per step.

Units: every `num_*_tokens` counts tokens, `block_ids` are indices into the KV cache's blocks. A request's
data is sent whole once (`NewRequest`), later steps carry only what changed. There is no prefill or decode
flag: a request is *behind* by `num_scheduled_tokens`; a decode is 1.
"""

import msgspec

from configs.sampling import SamplingParams


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the engine keeps of a request, sent when it is admitted or comes back from preemption."""

    request_id: str
    token_ids: list[int]
    """Prompt, then the output that was generated before a preemption."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    """Ids that end the request (end-of-sequence and stop ids); masked until `min_tokens`."""
    seed: int
    admission: int
    """Serial number: an id comes back after a preemption, or with another request, this does not."""


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of the step.

    |<- num_computed_tokens ->|<- num_scheduled_tokens ->|<- later ->|
    |   KV exists             |   computed in this step  |           |
    """

    request_id: str
    admission: int
    """See `NewRequest`."""
    num_computed_tokens: int
    """Tokens whose KV exists before this step (cached prefix included), once the steps under way have run."""
    num_scheduled_tokens: int
    new_block_ids: list[int]
    """Appended to the request's block table; for a `NewRequest` the whole table."""
    needs_sample: bool
    """True when the step reaches the last known token, so that the next one can be sampled, and one is wanted."""


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `scheduled` names each served request once, those of `new_requests` included and last."""

    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    dropped_request_ids: list[str]
    """Finished, aborted or preempted since the last step: the engine forgets their rows, and does so before it
    looks at `new_requests`, since an id may be in both."""
    num_scheduled_tokens: int
    """Sum over `scheduled`."""
