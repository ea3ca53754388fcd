"""generate and chat, with a scripted engine."""

import asyncio
import builtins
from collections.abc import Iterator

import pytest

from configs.errors import EngineDead, UsageError
from configs.sampling import SamplingParams
from server import cli
from server.commands.terminal import Conversation, converse, generate, params_from_flags
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as opened:
        yield opened


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    waiting = iter(lines)

    def read(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)


def test_chat_keeps_the_history(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    type_lines(monkeypatch, "a", "  ", "b", "/exit")
    converse(runner, Conversation(engine, SamplingParams(max_tokens=None)))
    assert capsys.readouterr().out == "<a>\n<a|<a>|b>\n"
    assert [message["role"] for message in engine.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_chat_ends_without_exit(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    type_lines(monkeypatch, end)
    converse(runner, Conversation(FakeEngine(), SamplingParams()))


def test_an_interrupted_answer_stays_as_far_as_it_came(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    engine.fail_after = (2, KeyboardInterrupt())  # type: ignore[assignment]
    type_lines(monkeypatch, "abc", "/exit")
    conversation = Conversation(engine, SamplingParams(max_tokens=None))
    converse(runner, conversation)
    assert conversation.messages[-1] == {"role": "assistant", "content": "<a"}
    assert "[stopped]" in capsys.readouterr().out
    assert len(engine.aborted) == 1


def test_a_message_that_does_not_fit_is_forgotten(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(FakeEngine(max_model_len=20), SamplingParams(max_tokens=None))
    type_lines(monkeypatch, "x" * 30, "y", "/exit")
    converse(runner, conversation)
    assert "context" in capsys.readouterr().out
    assert [message["content"] for message in conversation.messages] == ["y", "<y>"]


def test_chat_ends_with_the_engine(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.is_dead = True
    engine.fail_after = (0, EngineDead())
    type_lines(monkeypatch, "a")
    with pytest.raises(UsageError, match="engine"):
        converse(runner, Conversation(engine, SamplingParams()))


async def test_generate_prints_prompt_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    await generate(FakeEngine(), ["ab", "c"], SamplingParams())
    assert capsys.readouterr().out == "ab<ab>\nc<c>\n"


def test_sampling_flags() -> None:
    parser, _ = cli.build_parser()
    flags = ["--temperature", "0", "--top-k", "3", "--stop", "a", "--stop", "b"]
    arguments = parser.parse_args(["chat", *flags])
    params = params_from_flags(arguments, {"temperature": 0.7, "top_p": 0.9})
    assert params == SamplingParams(temperature=0, top_k=3, top_p=0.9, stop=("a", "b"), max_tokens=None)
    with pytest.raises(UsageError, match="top_p"):
        params_from_flags(parser.parse_args(["chat", "--top-p", "2"]), {})
