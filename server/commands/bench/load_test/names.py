"""Names that flags, requests and figures share."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

GENERATED, FILE = ("random", "prefix_repetition", "multi_turn"), "custom"
"""Data sets: made here, and read from lines of JSON."""

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
OBJECTIVES = ("ttft", "tpot", "e2el")
"""Metrics of a request that a service level objective can limit."""
