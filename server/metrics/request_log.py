"""One line per request: what it was, how it ended, and where its time went."""

import logging
from typing import Any

from server.metrics.records import RequestRecord

logger = logging.getLogger("octavo.requests")


def log_request(record: RequestRecord, model: str) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s %s %d", record.method, record.route, record.status, extra={"fields": fields(record, model)})


def fields(record: RequestRecord, model: str) -> dict[str, Any]:
    """Times in seconds, of the choice that took longest; tokens of all choices."""
    assert record.ended is not None
    shown: dict[str, Any] = {
        "request_id": record.name,
        "response_id": record.response_id,
        "model": model,
        "error": record.error,
        "e2e": round(record.ended - record.received, 4),
    }
    if (slowest := record.slowest()) is not None:
        choices = record.choices
        phases = slowest.phases(record.ended)
        shown |= {
            "choices": record.num_choices,
            "finish_reason": slowest.finish_reason,
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices[:: record.n]),
            "cached_tokens": sum(choice.num_cached_tokens for choice in choices[:: record.n]),
            "output_tokens": sum(choice.num_output_tokens for choice in choices),
            "queue": round(phases.queue, 4),
            "ttft": None if slowest.first_token is None else round(slowest.first_token - record.received, 4),
            "itl": round(slowest.time_per_output_token, 5) or None,
            "preemptions": sum(choice.timeline.num_preemptions for choice in choices if choice.timeline),
        }
    return {name: value for name, value in shown.items() if value is not None}
