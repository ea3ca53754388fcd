"""From the fields of /inference/v1/generate to a `Generation`."""

from configs.errors import InvalidRequest
from server.convert.sampling import beam_length_penalty, check_stream_options, given_fields, sampling_params
from server.convert.structured import structured_outputs
from server.field_names import naming
from server.generation import Generation, Prompt
from server.protocol.token_generation import TokenGenerationRequest
from server.serving import Serving


async def token_generation(serving: Serving, body: TokenGenerationRequest) -> Generation:
    """Raises `InvalidRequest`."""
    check_stream_options(body.stream_options, body.stream)
    fields = body.sampling_params
    if fields.detokenize is False and (fields.stop or body.output_mode == "text"):
        raise InvalidRequest("stop and output_mode text need detokenize", param="sampling_params")
    given = given_fields(fields, serving.config)
    given["logprobs"] = fields.logprobs
    given["max_tokens"] = fields.max_tokens
    given["structured"] = structured_outputs(fields.structured_outputs) if fields.structured_outputs else None
    names = {"prompt": "token_ids", "structured": "structured_outputs"}
    with naming(names):
        params = sampling_params(given, serving.engine.default_sampling)
        serving.check_number_of_choices(1, params.n)
        serving.engine.validate(body.token_ids, params)
    return Generation(
        serving,
        [Prompt(body.token_ids, params)],
        id_prefix="" if body.request_id else "generate-",
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
        field_names=names,
        beam_length_penalty=beam_length_penalty(fields, body.stream),
    )
