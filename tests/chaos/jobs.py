"""Requests whose answers are known: made at random, and answered alone before the chaos begins."""

import random
import string
from dataclasses import dataclass, field
from typing import Any

MAX_MODEL_LEN = 384
"""Tokens of prompt and output; a character of ASCII is a token."""
LONG_PROMPT = 300
CHAT_OVERHEAD = 60

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "[a-z]{3,12}(-[0-9]{1,4}){2}"}},
    {"structured_outputs": {"choice": ["yes", "no", "perhaps tomorrow"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
]
NEVER = "\x00never\x00"
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {"40": 3, "50": -100}},
    {"bad_words": ["a", "e"]},
    {"min_tokens": 12},
]


@dataclass(frozen=True, eq=False)
class Job:
    """A request, less what does not change its answer: streaming, priority, a deadline."""

    name: str
    path: str
    body: dict[str, Any] = field(repr=False)

    @property
    def can_stream(self) -> bool:
        return self.path != "/v1/embeddings" and "use_beam_search" not in self.body

    @property
    def is_openai(self) -> bool:
        """Has the fields of completions and chats."""
        return self.path in ("/v1/completions", "/v1/chat/completions")

    @property
    def takes_stop_strings(self) -> bool:
        return self.is_openai and not {"echo", "use_beam_search"} & self.body.keys()


class JobMaker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prefixes = [self._text(length) for length in (17, 48, 90, 150)]

    def job(self, number: int) -> Job:
        kinds = (
            self._completion,
            self._chat,
            self._response,
            self._message,
            self._ollama,
            self._embedding,
            self._beams,
        )
        [kind] = self.rng.choices(kinds, (50, 20, 10, 8, 6, 3, 3))
        return kind(number)

    def _embedding(self, number: int) -> Job:
        return Job(f"{number} embedding", "/v1/embeddings", {"input": [self._prompt(number) for _ in range(2)]})

    def _beams(self, number: int) -> Job:
        body = {"prompt": self._prompt(number), "use_beam_search": True, "n": 3, "max_tokens": 6}
        return Job(f"{number} beams", "/v1/completions", body)

    def _response(self, number: int) -> Job:
        body = {"input": self._prompt(number)[: LONG_PROMPT - CHAT_OVERHEAD], "temperature": 0}
        return Job(f"{number} response", "/v1/responses", {**body, "max_output_tokens": self._length()})

    def _message(self, number: int) -> Job:
        content = self._prompt(number)[: LONG_PROMPT - CHAT_OVERHEAD]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": self._length()}
        return Job(f"{number} message", "/v1/messages", body)

    def _ollama(self, number: int) -> Job:
        prompt = self._prompt(number)[: LONG_PROMPT - CHAT_OVERHEAD]
        options = {"temperature": 0.8, "seed": number, "num_predict": self._length()}
        if self.rng.random() < 0.5:
            body = {"prompt": prompt, "raw": True, "options": options}
            return Job(f"{number} ollama generate", "/api/generate", body)
        return Job(
            f"{number} ollama chat",
            "/api/chat",
            {"messages": [{"role": "user", "content": prompt}], "options": options},
        )

    def _length(self) -> int:
        return self.rng.choice((1, 8, 20, 40, 80))

    def _completion(self, number: int) -> Job:
        prompts = [self._prompt(number) for _ in range(self.rng.choice((1, 1, 1, 1, 2, 3)))]
        body = {"prompt": prompts if len(prompts) > 1 else prompts[0], **self._fields(max(map(len, prompts)))}
        if self.rng.random() < 0.2:
            body["logprobs"] = 2
        if self.rng.random() < 0.1:
            body["echo"] = True
        return Job(f"{number} completion", "/v1/completions", body)

    def _chat(self, number: int) -> Job:
        prompt = self._prompt(number)[: LONG_PROMPT - CHAT_OVERHEAD]
        messages = [{"role": "user", "content": prompt}]
        if self.rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": self.prefixes[0]})
        body = {"messages": messages, **self._fields(len(prompt) + CHAT_OVERHEAD)}
        if self.rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        return Job(f"{number} chat", "/v1/chat/completions", body)

    def _fields(self, num_prompt_tokens: int) -> dict[str, Any]:
        rng = self.rng
        most = MAX_MODEL_LEN - num_prompt_tokens - 1
        fields: dict[str, Any] = {"max_tokens": min(most, rng.choice((1, 8, 20, 40, 80, 120, 200)))}
        if rng.random() < 0.35:
            fields |= {"temperature": rng.choice((0.3, 0.9)), "top_p": rng.choice((0.8, 1.0)), "top_k": 40}
            fields["seed"] = rng.randrange(2**31)
        else:
            fields["temperature"] = 0
        if rng.random() < 0.7:
            fields["return_token_ids"] = True
        if rng.random() < 0.25:
            fields["n"] = rng.choice((2, 3, 4))
        kind = rng.random()
        if kind < 0.15:
            fields |= {**rng.choice(STRUCTURED), "max_tokens": min(most, 60)}
        elif kind < 0.3:
            fields |= rng.choice(PENALTIES)
            fields["max_tokens"] = max(fields["max_tokens"], fields.get("min_tokens", 0))
        elif kind < 0.5:
            fields["ignore_eos"] = True
        return fields

    def _prompt(self, number: int) -> str:
        """No two are the same, so that no answer can stand for another; many begin alike."""
        rng = self.rng
        prefix = rng.choice(self.prefixes) if rng.random() < 0.6 else ""
        length = rng.choice((1, 5, 20, 40)) if rng.random() < 0.8 else LONG_PROMPT - len(prefix) - 10
        return f"{prefix}{number} {self._text(length)}"

    def _text(self, length: int) -> str:
        return "".join(self.rng.choices(string.ascii_letters + " .,", k=length))


def with_stop_string(rng: random.Random, job: Job, text: str) -> Job:
    """The same request, which ends where a piece of its answer `text` comes for the first time.

    Replacement characters are no part of it: a deadline cuts characters, and so makes some.
    """
    start = rng.randrange(len(text))
    stop = [text[start : start + rng.randint(1, 4)].strip("\ufffd") or NEVER, NEVER]
    return Job(f"{job.name} stop", job.path, {**job.body, "stop": stop})
