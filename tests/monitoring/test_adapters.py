"""The monitor inside training frameworks and in front of TensorBoard."""

import importlib.util
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.core.errors import CrystalliteError
from crystallite.monitoring import StructureMonitor
from crystallite.monitoring.journal import read_journal


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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with StructureMonitor(nn.Linear(4, 3), batch=torch.randn(30, 4), every=1, tensorboard=tmp_path) as monitor:
        rows = [monitor.step(step)[0] for step in (0, 5)]
    events = EventAccumulator(str(tmp_path)).Reload()
    kept = events.Scalars("structure/kept_share/weight")
    assert [(event.step, event.value) for event in kept] == [
        (step, pytest.approx(row["kept_share"])) for step, row in zip((0, 5), rows, strict=True)
    ]
    assert len(events.Images("structure/functional map")) == 2


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


class Sentence(torch.utils.data.Dataset):
    """Numbers whose sum is asked for."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True)}


class Regression(nn.Module):
    """A model as the `Trainer` takes it: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": None if labels is None else nn.functional.mse_loss(y, labels), "logits": y}


def regression():
    torch.manual_seed(0)
    return Regression()


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_inside_the_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    results = []
    for watched in (False, True):
        model = regression()
        callbacks = []
        if watched:
            batch = {"x": torch.randn(20, 4, generator=torch.Generator().manual_seed(1))}
            monitor = StructureMonitor(model, batch=batch, every=3, path=tmp_path / "structure.jsonl")
            callbacks = [monitor.trainer_callback()]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_steps=9, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=Sentence(), callbacks=callbacks).train()
        results.append(model.state_dict())
    assert [row["step"] for row in monitor.rows if row["layer"] == "(model)"] == [3, 6, 9]  # optimizer steps
    assert len(read_journal(tmp_path / "structure.jsonl")) == len(monitor.rows) == 6
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())  # nothing is disturbed


def test_inside_the_lightning_trainer(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = regression()

        def training_step(self, batch, _):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    monitor = StructureMonitor(module.net, every=4, path=tmp_path / "structure.jsonl")
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[monitor.lightning_callback()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with warnings.catch_warnings():  # Lightning's own, about loader workers and what others have deprecated
        warnings.simplefilter("ignore")
        trainer.fit(module, torch.utils.data.DataLoader(Sentence(), batch_size=8))
    assert [row["step"] for row in monitor.rows if row["layer"] == "(model)"] == [4, 8, 12]
    assert len(read_journal(tmp_path / "structure.jsonl")) == 6


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")), reason="Lightning is there"
)
def test_a_missing_lightning_is_named():
    with pytest.raises(CrystalliteError, match="pip install lightning"):
        StructureMonitor(nn.Linear(4, 3)).lightning_callback()
