"""The monitor inside training frameworks and in front of TensorBoard."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.errors import CrystalliteError
from crystallite.monitoring import StructureMonitor


class Writer:
    """Notes what a `SummaryWriter` would write."""

    def __init__(self):
        self.scalars, self.images, self.closed = {}, {}, False

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def add_image(self, name, image, step):
        self.images[name, step] = image

    def close(self):
        self.closed = True


def test_an_open_writer_gets_scalars_and_the_map_and_stays_open():
    model = nn.Linear(4, 3)
    writer = Writer()
    with StructureMonitor(model, batch=torch.randn(30, 4), every=1, tensorboard=writer) as monitor:
        weight, whole = monitor.step(7)
    assert writer.scalars["structure/kept_share/weight", 7] == weight["kept_share"]
    assert writer.scalars["structure/sigma/2", 7] == whole["sigma"][1]
    picture = writer.images["structure/functional map", 7]
    assert picture.shape == (1, 3, 4)
    assert np.max(picture) == 1
    assert not writer.closed


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_a_folder_gets_an_event_file(tmp_path):
    with StructureMonitor(nn.Linear(4, 3), every=1, tensorboard=tmp_path) as monitor:
        monitor.step(0)
    assert list(tmp_path.glob("events*"))


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is there")
def test_a_missing_tensorboard_is_named(tmp_path):
    with pytest.raises(CrystalliteError, match="pip install tensorboard"):
        StructureMonitor(nn.Linear(4, 3), tensorboard=tmp_path)


def test_trainer_callback():
    transformers = pytest.importorskip("transformers")
    monitor = StructureMonitor(nn.Linear(4, 3), every=2)
    callback = monitor.trainer_callback()
    assert isinstance(callback, transformers.TrainerCallback)
    arguments, control = SimpleNamespace(), transformers.TrainerControl()
    for step in (1, 2, 3, 4):
        state = transformers.TrainerState(global_step=step, is_world_process_zero=step != 4)
        callback.on_step_end(arguments, state, control, model=monitor.model)
    callback.on_train_end(arguments, state, control)
    assert {row["step"] for row in monitor.rows} == {2}  # step 4 was on another process


def test_lightning_callback():
    lightning = pytest.importorskip("lightning.pytorch")
    monitor = StructureMonitor(nn.Linear(4, 3), every=1)
    callback = monitor.lightning_callback()
    assert isinstance(callback, lightning.Callback)
    callback.on_train_batch_end(SimpleNamespace(is_global_zero=True, global_step=5), None, None, None, 0)
    assert {row["step"] for row in monitor.rows} == {5}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")), reason="Lightning is there"
)
def test_a_missing_lightning_is_named():
    with pytest.raises(CrystalliteError, match="pip install lightning"):
        StructureMonitor(nn.Linear(4, 3)).lightning_callback()
