"""The transform tier against engines that fail."""

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crystallite.serving import Limits, Refusal, transform
from crystallite.serving.cuts.calls import call_pieces
from crystallite.serving.engine import LocalEngine, Unreachable
from crystallite.serving.interface import NamedModel
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Inside, Network
from crystallite.serving.plan import arrange
from crystallite.serving.transform import Transform
from tests.helpers.artifacts import APART, network, small
from tests.helpers.tolerance import assert_close

LIMITS = Limits(attempts=3)
FAILED, LOST = ConnectionError("replica died"), Unreachable("no replica")


class Flaky:
    """An engine that loses some calls of some pieces."""

    def __init__(self, network, losses, error):
        self.engine, self.losses, self.error = LocalEngine(network.modules), dict(losses), error
        self.calls, self.finished = [], []

    async def run(self, piece, given):
        self.calls.append(piece)
        if self.losses.get(piece, 0):
            self.losses[piece] -= 1
            raise self.error
        answer = await self.engine.run(piece, given)
        self.finished.append(piece)
        return answer


@pytest.fixture(scope="module")
def cut():
    model = network()
    return model, arrange(small(model), 1, APART)[1]


def run(cut, losses, x, error=FAILED, limits=LIMITS):
    metrics = Metrics()

    async def scenario():
        engine = Flaky(cut, losses, error)
        try:
            answer = await Transform("small", cut, engine, limits, metrics).run({"input": x})
            return answer["output"], metrics, engine
        except Refusal as refusal:
            return refusal, metrics, engine
        finally:
            await engine.engine.close()

    return asyncio.run(scenario())


def test_pieces_together_are_the_model(cut, x):
    model, network = cut
    assert_close(run(network, {}, x)[0], model(x).detach())


@pytest.mark.parametrize("error", [FAILED, LOST])
def test_lost_calls_are_repeated(cut, x, error):
    model, network = cut
    y, metrics, _ = run(network, {"1.0": 2, "1.3": 1}, x, error)
    assert_close(y, model(x).detach())
    assert 'crystallite_retries_total{model="small",piece="1.0"} 2' in metrics.text({})


def test_a_piece_that_stays_lost_is_named_and_the_others_are_not_left_running(cut, x):
    refusal, _, engine = run(cut[1], {"1.2": 99}, x)
    assert re.match(r"piece 1\.2 of small failed 3 times.*replica died", str(refusal))
    assert refusal.status == 503
    assert refusal.retry_after
    assert sorted(engine.finished) == ["1.0", "1.1", "1.3"]


def test_a_piece_that_cannot_be_reached_is_asked_for_as_long_as_callers_wait(cut, x, monkeypatch):
    model, network = cut
    y, _, engine = run(network, {"1.1": 6}, x, LOST)
    assert_close(y, model(x).detach())
    assert engine.calls.count("1.1") == 7  # more than the attempts that a piece has which fails
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(transform, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    monkeypatch.setattr(
        transform, "time", SimpleNamespace(monotonic=lambda: sum(pauses), perf_counter=time.perf_counter)
    )
    refusal, _, engine = run(network, {"1.1": 10**6}, x, LOST, Limits(timeout=0.5))
    assert refusal.status == 503
    assert "no replica" in str(refusal)
    assert pauses == [0, 0.05, 0.1, 0.2]  # another of 0.4 would be too long
    assert engine.calls.count("1.1") == 5


def test_threads_of_the_process_stay_as_they_were(cut, x):
    before = torch.get_num_threads()
    run(cut[1], {}, x)
    assert torch.get_num_threads() == before


class Keeping(nn.Module):
    """Keeps its input on itself while a piece computes, as some models' code does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.kept = None

    def forward(self, x):
        self.kept = x
        call_pieces([("piece", {"input": x})])
        return self.kept * self.scale


class Locked(Keeping):
    """One that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Slow:
    """An engine that would take many batches at once, as a cluster does, and counts how many it had."""

    batches = 8

    def __init__(self):
        self.running = self.most = 0

    async def run(self, _piece, given):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        return given


@pytest.mark.parametrize(("kind", "at_once"), [(Keeping, 8), (Locked, 1)])
def test_batches_inside_a_model_do_not_see_each_other(kind, at_once):
    model, engine = kind(), Slow()
    inputs = [torch.full((3,), float(i)) for i in range(8)]

    async def scenario():
        tier = Transform("small", Network((Inside(NamedModel(model, ("input",))),), {}), engine, LIMITS, Metrics())
        try:
            answers = await asyncio.gather(*(tier.run({"input": x}) for x in inputs))
            return tier.batches, [answer["output"] for answer in answers]
        finally:
            await tier.close()

    batches, answers = asyncio.run(scenario())
    assert (batches, engine.most) == (at_once, at_once)
    for x, y in zip(inputs, answers, strict=True):
        assert torch.equal(y, 2 * x)
