"""The transform tier against engines that fail."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch

from crystallite.serving import Refusal
from crystallite.serving.engine import LocalEngine
from crystallite.serving.metrics import Metrics
from crystallite.serving.plan import arrange
from crystallite.serving.transform import Transform
from tests.operators.tolerance import assert_close
from tests.serving.artifacts import APART, network, small


class Flaky:
    """An engine that loses some calls of some pieces."""

    def __init__(self, network, losses):
        self.engine, self.losses, self.finished = LocalEngine(network.modules), dict(losses), []

    def submit(self, piece, x):
        if self.losses.get(piece, 0):
            self.losses[piece] -= 1
            lost = Future()
            lost.set_exception(ConnectionError("replica died"))
            return lost
        future = self.engine.submit(piece, x)
        future.add_done_callback(lambda _: self.finished.append(piece))
        return future


@pytest.fixture(scope="module")
def cut():
    model = network()
    return model, arrange(small(model), 1, APART)[1]


def run(cut, losses, x):
    engine, metrics = Flaky(cut, losses), Metrics()
    try:
        return asyncio.run(Transform("small", cut, engine, 3, metrics).run(x)), metrics
    finally:
        engine.engine.close()
        assert threading.active_count() < 50


def test_pieces_together_are_the_model(cut, x):
    model, network = cut
    assert_close(run(network, {}, x)[0], model(x).detach())


def test_lost_calls_are_repeated(cut, x):
    model, network = cut
    y, metrics = run(network, {"1.0": 2, "1.3": 1}, x)
    assert_close(y, model(x).detach())
    assert 'crystallite_retries_total{model="small",piece="1.0"} 2' in metrics.text({})


def test_a_piece_that_stays_lost_is_named_and_the_others_are_not_left_running(cut, x):
    _, network = cut
    engine = Flaky(network, {"1.2": 99})
    with pytest.raises(Refusal, match=r"piece 1\.2 of small failed 3 times.*replica died") as caught:
        asyncio.run(Transform("small", network, engine, 3, Metrics()).run(x))
    assert caught.value.status == 503
    assert caught.value.retry_after
    assert sorted(engine.finished) == ["1.0", "1.1", "1.3"]
    engine.engine.close()


def test_threads_of_the_process_stay_as_they_were(cut, x):
    before = torch.get_num_threads()
    run(cut[1], {}, x)
    assert torch.get_num_threads() == before
