"""The in-process engine: batches at the same time where they take long, and what they may not see of each other."""

import asyncio
import threading
import time

import pytest
import torch
from torch import nn

from crystallite.serving import engine
from crystallite.serving.copies import copy_sharing_weights
from crystallite.serving.engine import LocalEngine


class Keeping(nn.Module):
    """Keeps its input on itself while it runs, as some models' code does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.kept = None

    def forward(self, x):
        self.kept = x
        time.sleep(0.02)
        return self.kept * self.scale


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(engine, "usable_cores", lambda: 2 * torch.get_num_threads())


def asked(pieces, inputs):
    async def run():
        local = LocalEngine(pieces)
        first = local.batches
        await local.run("piece", {"input": inputs[0]})
        at_once = local.batches
        answers = await asyncio.gather(*(local.run("piece", {"input": x}) for x in inputs))
        await local.close()
        return first, at_once, [answer["output"] for answer in answers]

    return asyncio.run(run())


@pytest.mark.usefixtures("cores")
def test_batches_that_run_at_once_do_not_see_each_other():
    model, inputs = Keeping(), [torch.full((3,), float(i)) for i in range(20)]
    first, at_once, answers = asked({"piece": model}, inputs)
    assert (first, at_once) == (1, 2)
    assert model.kept is None  # threads have modules of their own …
    for x, y in zip(inputs, answers, strict=True):
        assert torch.equal(y, 2 * x)
    with torch.no_grad():
        model.scale.fill_(3.0)  # … and one weight
    assert torch.equal(copy_sharing_weights(model)(inputs[1]), 3 * inputs[1])


@pytest.mark.usefixtures("cores")
def test_what_cannot_be_copied_runs_alone():
    class Locked(Keeping):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    inputs = [torch.ones(3) * i for i in range(6)]
    first, at_once, answers = asked({"piece": Locked()}, inputs)
    assert (first, at_once) == (1, 1)
    for x, y in zip(inputs, answers, strict=True):
        assert torch.equal(y, 2 * x)


@pytest.mark.usefixtures("cores")
def test_short_batches_are_one():
    assert asked({"piece": nn.Identity()}, [torch.ones(1)])[:2] == (1, 1)
