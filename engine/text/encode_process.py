"""Very long texts are encoded by a process of their own: it can be ended at any time, and gives its memory back.

`python -m engine.text.encode_process MODEL SPECIAL` writes the token ids of its standard input to standard output.
"""

import asyncio
import contextlib
import os
import signal
import sys
from array import array
from asyncio.subprocess import PIPE

from configs.errors import Unavailable
from engine.machine import module_environment

_PIECE = 100_000
"""Ids; the interpreter's lock is held for a millisecond while so many become Python's."""


async def encode_in_process(model: str, text: str, *, add_special_tokens: bool) -> list[int]:
    """As `Tokenizer.encode`. Cancelling ends the process. Raises `Unavailable` when the system has ended it."""
    command = [sys.executable, "-P", "-m", __name__, model, "special" if add_special_tokens else ""]
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=module_environment({}))
    except OSError as error:
        raise _no_memory() from error
    try:
        output, _ = await process.communicate(text.encode("utf-8", "surrogatepass"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode != 0:
        raise _no_memory()
    ids: list[int] = []
    for start in range(0, len(output), 4 * _PIECE):
        ids += array("i", output[start : start + 4 * _PIECE])
    return ids


def _no_memory() -> Unavailable:
    return Unavailable("the text could not be encoded: the system may be out of memory", retry_after=10)


def main() -> None:
    from engine.bundled import locate_model
    from engine.checkpoints import open_checkpoint
    from engine.text.tokenizer import load_tokenizer

    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # streams come first
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # rather this one than those that serve others
    model, special = sys.argv[1:]
    text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    tokenizer = load_tokenizer(open_checkpoint(locate_model(model)))
    array("i", tokenizer.encode(text, bool(special))).tofile(sys.stdout.buffer)


if __name__ == "__main__":
    main()
