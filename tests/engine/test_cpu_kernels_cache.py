"""Where the compiled CPU kernels are kept, and what becomes of them where nothing can be written."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu import build

assert torch.__version__, "the kernels share its threads"
COMPILER = """#!/bin/sh
# gives back what was compiled before; on a full disk, complains as g++ does
for last; do :; done
case "$last" in {full}*) echo "Fatal error: can't write to $last: 'No space left on device'" >&2; exit 1;; esac
cp {library} "$last"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Takes no time; makes files anywhere but in the folder `full`."""
    library = build.load_library()._name
    script = tmp_path / "g++"
    script.write_text(COMPILER.format(library=library, full=tmp_path / "full"))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))


@pytest.fixture
def cache(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def flag(request):
    """Another one for each test, since what was loaded is remembered."""
    return f"-D{request.node.name.upper()}"


def test_they_are_kept(cache, flag):
    library = build.load_library(flag)
    assert Path(library._name).parent == cache / "octavo"
    assert [path.suffix for path in (cache / "octavo").iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_costs_a_compilation_each_time(cache, flag, capfd):
    cache.write_text("a file")
    library = build.load_library(flag)
    assert not Path(library._name).exists()
    assert f"cannot be kept in {cache}/octavo: Not a directory" in capfd.readouterr().err


def test_a_disk_that_is_full_while_the_compiler_writes(tmp_path, cache, flag, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    library = build.load_library(flag)
    assert not Path(library._name).is_relative_to(tmp_path)
    assert "No space left on device" in capfd.readouterr().err
    assert list((tmp_path / "full" / "octavo").iterdir()) == []


def test_a_disk_that_is_full_everywhere(tmp_path, flag, compiler, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    with pytest.raises(build.KernelsUnavailable, match=r"no place.*No space left on device; elsewhere: No"):
        build.load_library(flag)


def test_little_room_is_noticed_before_anything_is_compiled(tmp_path, flag, cache, monkeypatch):
    monkeypatch.setattr(build, "_ROOM", 2**70)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(build.KernelsUnavailable, match=os.strerror(errno.ENOSPC)):
        build.load_library(flag)
