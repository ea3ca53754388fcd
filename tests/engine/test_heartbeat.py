"""The page of shared memory, with a writer in this process and one in another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.heartbeat import Heartbeat, Monitor

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time
from engine.heartbeat import Heartbeat
heartbeat = Heartbeat(sys.argv[1])
heartbeat.start()
print("beats", flush=True)
time.sleep(60)
"""


def writer(path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"beats\n"
    return process


def test_turns_are_counted_and_timed(tmp_path):
    path = str(tmp_path / "page")
    monitor = Monitor(path)
    heartbeat = Heartbeat(path)
    for count in range(3):
        assert monitor.look(os.getpid())[1:] == (0.0, count)
        heartbeat.begin()
        time.sleep(0.01)
        assert 0.01 <= monitor.look(os.getpid()).turn_age < 1
        heartbeat.end()


def test_a_page_that_was_removed_still_connects_both(tmp_path):
    path = tmp_path / "page"
    monitor = Monitor(str(path))
    heartbeat = Heartbeat(str(path))
    path.unlink()
    heartbeat.begin()
    heartbeat.end()
    assert monitor.look(os.getpid()).num_turns == 1


def test_a_process_that_is_stopped_does_not_beat(tmp_path):
    path = str(tmp_path / "page")
    monitor = Monitor(path)
    process = writer(path)
    try:
        time.sleep(0.6)
        assert monitor.look(process.pid).beat_age < 0.5
        process.send_signal(signal.SIGSTOP)
        ages = []
        for _ in range(16):
            time.sleep(0.1)
            ages.append(monitor.look(process.pid).beat_age)
        assert ages == sorted(ages)
        assert ages[-1] > 1.5
        process.send_signal(signal.SIGCONT)
        time.sleep(0.6)
        assert monitor.look(process.pid).beat_age < 0.5
    finally:
        process.kill()
        process.communicate()


def test_a_process_ends_with_its_parent_whatever_it_does(tmp_path):
    path = str(tmp_path / "page")
    Monitor(path)
    process = writer(path)
    process.stdin.close()
    assert process.wait(5) == 0
    process.stdout.close()
