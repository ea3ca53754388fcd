"""When a request ends by its tokens. Stop *strings* are text: the API side finds them and aborts."""

from configs.sampling import RepetitionDetection

from .request import Request


def stop_cause(request: Request, max_total_tokens: int) -> tuple[str, int | None] | None:
    """(finish_reason, stop_reason) when the newest output token is the last one, or none is wanted, else None.

    A stop id counts only once `min_tokens` tokens came before it; it wins over a length that is reached with
    the same token. `max_total_tokens` limits prompt and output together. The stop reason is None for
    end-of-sequence ids, also where the request names the same id.
    """
    params = request.sampling_params
    token_id = request.token_ids[-1]
    num_output_tokens = request.num_output_tokens
    if token_id in request.stop_token_ids and num_output_tokens > params.min_tokens:
        return "stop", None if token_id in request.eos_token_ids else token_id
    if num_output_tokens == params.max_tokens or request.num_tokens >= max_total_tokens:
        return "length", None
    if params.repetition_detection is not None and _repeats(request, params.repetition_detection):
        return "repetition", None
    return None


def _repeats(request: Request, detection: RepetitionDetection) -> bool:
    """Whether the output ends with one pattern, often enough: such a list equals itself moved by the pattern's size."""
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        if size * detection.min_count > request.num_output_tokens:
            return False
        if request.token_ids[-1] == request.token_ids[-1 - size]:
            tail = request.token_ids[-size * detection.min_count :]
            if tail[size:] == tail[:-size]:
                return True
    return False
