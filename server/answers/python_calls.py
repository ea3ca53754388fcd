"""Calls as Python writes them: `[get_weather(city="Paris", days=3), now()]`."""

import json
import re

from server.answers.call_reader import CallReader
from server.answers.reader import Wait
from server.answers.values import PYTHON, copy_value, literal_as_json

_NAME = re.compile(r"[\w.-]+")


class PythonCalls(CallReader):
    """Arguments are keywords with literals; one leaves when it is complete. Llama 3.2 and 4, OLMo, LFM2."""

    markers = ("[", "<function_calls>", "<|python_tag|>", "<|python_start|>", "<|tool_call_start|>")
    bare = ("[",)
    closing = ("</function_calls>", "<|python_end|>", "<|tool_call_end|>")

    def read_calls(self, marker: str) -> Wait[bool]:
        reader = self.reader
        if marker not in self.bare:
            reader.take(len(marker))
            yield from reader.spaces()
        in_list = yield from reader.literal("[")
        while True:
            yield from reader.spaces()
            if not (yield from self._read_call(marker)):
                return False
            reader.hold()
            yield from reader.spaces()
            yield from reader.literal(",", ";")
            yield from reader.spaces()
            bracket = in_list and (yield from reader.literal("]"))
            if bracket and marker in self.bare:
                return True
            if bracket:
                yield from reader.spaces()
            if (yield from reader.closing(*self.closing)) or bracket:
                return True

    def _read_call(self, marker: str) -> Wait[bool]:
        """Whether a call is complete. It begins with its first argument, or its end when it has none."""
        reader = self.reader
        name = yield from reader.word(_NAME)
        opened = yield from reader.literal("(")
        if not opened or not self.is_offered(name, marker):
            return False
        num_arguments = 0
        yield from reader.spaces()
        while not (yield from reader.literal(")")):
            argument = yield from self._read_argument()
            if not argument:
                return False
            if not num_arguments:
                self.begin(name)
            self.writer.add_arguments((", " if num_arguments else "{") + argument)
            num_arguments += 1
        if not num_arguments:
            self.begin(name)
        self.writer.add_arguments("}" if num_arguments else "{}")
        return True

    def _read_argument(self) -> Wait[str]:
        """One keyword as a member of a JSON object, with the comma behind it; "" where it is none."""
        reader = self.reader
        keyword = yield from reader.word(_NAME)
        yield from reader.spaces()
        equals = yield from reader.literal("=")
        yield from reader.spaces()
        value: list[str] = []
        if not keyword or not equals or not (yield from copy_value(reader, value.append, PYTHON)):
            return ""
        yield from reader.spaces()
        if not (yield from reader.literal(",")) and (yield from reader.peek()) != ")":
            return ""
        yield from reader.spaces()
        try:
            return f"{json.dumps(keyword, ensure_ascii=False)}: {literal_as_json(''.join(value))}"
        except ValueError:
            return ""
