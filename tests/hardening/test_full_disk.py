"""Where nothing can be written any more, every verb says so, and leaves nothing half-written."""

import resource
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.manifest import attach_verdict
from crystallite.statistics.checkpoints import Checkpoints, State

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


@contextmanager
def full_disk(size=300):
    """Files may grow up to so many bytes: what writes more gets the error that a full disk gives."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def small():
    return nn.Sequential(cx.LowRankLinear(nn.Linear(8, 2, bias=False), nn.Linear(2, 8)), dense())


WRITERS = {
    "save": lambda path: cx.save(small(), path / "model"),
    "report": lambda path: cx.report(dense(), path / "page.html"),
    "figures": lambda path: cx.report(dense()).figures(path / "figures"),
    "plot": lambda path: cx.decompose(torch.eye(4)).plot(torch.eye(4)).save(path / "plot.svg"),
    "training state": lambda path: Checkpoints(path / "state", {}).write(1, State({"w": X}, {})),
    "export": lambda path: cx.export(dense(), path / "model.onnx", X),
    "upgrade": lambda path: cx.upgrade(dense(), data=X, blocks=2, epochs=1, level=0.3, checkpoint=path / "state"),
    "compress": lambda path: cx.compress(dense(), X, budget=0.6, polish_steps=3, checkpoint=path / "state"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(tmp_path, name):
    WRITERS[name](tmp_path / "first")  # compiles, and shows that it works
    (tmp_path / "full").mkdir()
    with full_disk(), pytest.raises(cx.CrystalliteError, match=r"File too large|cannot be written as ONNX"):
        WRITERS[name](tmp_path / "full")
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_is_no_folder(tmp_path, name):
    (tmp_path / "file").write_text("x")
    with pytest.raises(cx.CrystalliteError, match=r"Not a directory|File exists"):
        WRITERS[name](tmp_path / "file")
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_what_was_there_stays(tmp_path):
    folder = cx.save(small(), tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with full_disk(), pytest.raises(cx.WriteError, match="File too large"):
        attach_verdict(folder, {"passed": True})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    cx.load(folder)


def test_a_resume_file_that_cannot_grow(tmp_path):
    torch.save({f"{i}.weight": torch.randn(9, 9) for i in range(3)}, tmp_path / "w.pt")
    with full_disk(), pytest.raises(cx.WriteError, match="done: expected a place"):
        cx.analyze(tmp_path / "w.pt", resume=tmp_path / "done")
    whole = cx.analyze(tmp_path / "w.pt", resume=tmp_path / "done")
    assert whole.rows == cx.analyze(tmp_path / "w.pt").rows
