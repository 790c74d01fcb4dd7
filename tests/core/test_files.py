"""Written whole or not at all: kills, full disks, and folders that nobody may write to."""

import os
import signal
import subprocess
import sys
import time

import pytest

from crystallite.core.errors import CrystalliteError, WriteError
from crystallite.core.files import new_folder, write_file
from tests.helpers.waiting import wait_for

HOLD = """
import sys, time
from crystallite.core.files import new_folder
with new_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of writing a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "model")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_left_overs_of_a_killed_writer_are_swept_by_the_next(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    others = [tmp_path / ".model.backup", tmp_path / f".other.{'0' * 32}", tmp_path / f".model.{'0' * 31}"]
    for other in others:
        other.mkdir()
    assert len(list(tmp_path.iterdir())) == 4  # the half one, and what only looks like it
    with new_folder(tmp_path / "model") as folder:
        (folder / "whole").write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model"])
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_what_somebody_is_still_writing_is_left_alone(tmp_path, writer):
    (unfinished,) = tmp_path.iterdir()
    with new_folder(tmp_path / "model"):
        pass
    assert (unfinished / "half").read_text() == "half"
    assert writer.poll() is None


def test_contents_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """In this order: every file, every folder, the name."""
    done = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def record(what, call):
        def recorded(first, *more):
            done.append((what, os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)))
            return call(first, *more)

        return recorded

    monkeypatch.setattr(os, "fsync", record("sync", sync))
    monkeypatch.setattr(os, "rename", record("rename", rename))
    monkeypatch.setattr(os, "replace", record("rename", replace))
    with new_folder(tmp_path / "model") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        expected = {str(folder / "inner" / "file"), str(folder / "inner"), str(folder)}
    named = next(i for i, (what, _) in enumerate(done) if what == "rename")
    assert {path for what, path in done[:named] if what == "sync"} == expected
    assert done[named + 1] == ("sync", str(tmp_path))
    done.clear()
    write_file(tmp_path / "file", b"x")
    assert [what for what, _ in done] == ["sync", "rename", "sync"]


def test_an_error_leaves_nothing_and_keeps_what_was_there(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    begun = new_folder(tmp_path / "model")
    (begun.__enter__() / "new").write_text("new")
    assert not begun.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


@pytest.mark.parametrize("place", ["file/model", "file", "/proc/model", "/dev/null/model"])
def test_places_that_cannot_be_written_to(tmp_path, place):
    (tmp_path / "file").write_text("x")
    for write in (lambda path: write_file(path / "x", b"x"), lambda path: new_folder(path / "x").__enter__()):
        with pytest.raises(WriteError, match="expected a place that can be written to, got: ") as caught:
            write(tmp_path / place)
        assert isinstance(caught.value, CrystalliteError)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    script = (
        "import sys\nfrom crystallite.core.files import new_folder, write_file\nprint('begun', flush=True)\n"
        "for i in range(10**6):\n"
        "    with new_folder(sys.argv[1] + '/model') as folder:\n"
        "        for name in 'ab': (folder / name).write_text(str(i) * 2000)\n"
        "    write_file(sys.argv[1] + '/file', (str(i) * 2000).encode())\n"
    )
    for moment in (0.01, 0.05, 0.11):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        wait_for(lambda: (tmp_path / "file").exists())
        time.sleep(moment)
        process.kill()
        process.wait()
        process.stdout.close()
        found = [path for path in (tmp_path / "model", tmp_path / "model.old") if path.is_dir()]
        for folder in found:
            first, second = ((folder / name).read_text() for name in "ab")
            assert first == second
            assert len(first) >= 2000
        assert found
        assert len((tmp_path / "file").read_text()) % 2000 == 0
