"""`OutputProcessor`: one request's tokens to text, stop strings and counts. Imports no torch."""

from collections.abc import Sequence

import configs.errors
from configs.sampling import SamplingParams

from .messages import TokenOutput
from .outputs import RequestOutput
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, params)
        self._num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0

    def process(self, output: TokenOutput) -> RequestOutput:
        """What the caller sees of `output`.

        Its `finish_reason` is `stop` when a stop string has matched; the core does not know of that and has
        to be told. Raises the `RequestError` that the core has named.
        """
        if output.finish_reason == "error":
            raise getattr(configs.errors, output.error_type)(output.error, param=output.error_param)
        delta = self._detokenizer.push(output.new_token_ids, output.finish_reason)
        self.num_output_tokens += delta.num_tokens
        stopped = delta.stop_string is not None
        return RequestOutput(
            text=delta.text,
            token_ids=output.new_token_ids[: delta.num_tokens],
            logprobs=output.logprobs[: delta.num_tokens] if output.logprobs is not None else None,
            finish_reason="stop" if stopped or output.finish_reason == "complete" else output.finish_reason,
            stop_reason=delta.stop_string if stopped else output.stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
        )
