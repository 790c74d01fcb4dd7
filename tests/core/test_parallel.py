"""Kernels compile where nothing can be cached, and work is dealt out and gathered in order."""

import multiprocessing

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.core import parallel
from crystallite.core.parallel import compiled, over_tasks
from crystallite.operators.runtime import engine


def test_kernels_compile_without_a_place_for_a_cache():
    """Read-only packages and no home folder: numba would refuse. Code without a file has no such place either."""
    names = {}
    exec("def double(x):\n    return 2 * x", names)
    assert compiled(names["double"])(np.float32(3)) == 6


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 11])
def test_results_come_in_the_order_of_the_tasks(threads, count):
    assert over_tasks(threads, range(count), lambda task: task * task) == [task * task for task in range(count)]


@pytest.mark.parametrize("bad", range(4))
def test_a_failing_task_is_raised_whoever_ran_it(bad):
    def work(task):
        if task == bad:
            raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match=f"task {bad}"):
        over_tasks(2, range(4), work)


def _network():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    for layer in layers:
        layer.weight.data *= torch.block_diag(torch.ones(32, 32), torch.ones(32, 32))
    return cx.BlockChain.from_dense(layers, [nn.ReLU(), nn.ReLU()]), torch.randn(40, 64)


def _answer(pipe):
    torch.set_num_threads(2)
    chain, x = _network()
    with torch.no_grad():
        pipe.send(chain(x).sum().item())


@pytest.mark.parametrize("has_openmp", [True, False])
def test_a_team_with_and_without_the_threads_of_pytorch(has_openmp, monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_A_TEAM", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if has_openmp:
        assert parallel._openmp() is not None
    else:
        monkeypatch.setattr(parallel, "_openmp", lambda: None)
    chain, x = _network()
    expected = chain(x).detach()  # with gradients: by PyTorch
    with torch.no_grad():
        for _ in range(50):
            torch.testing.assert_close(chain(x), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_team_in_a_forked_process(monkeypatch):
    """OpenMP's threads are gone there; a team of them would never come."""
    monkeypatch.setattr(engine, "_WORTH_A_TEAM", 0.0)
    chain, x = _network()
    with torch.no_grad():
        expected = chain(x).sum().item()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there,))
    process.start()
    try:
        assert here.poll(60), "no answer"
        assert here.recv() == pytest.approx(expected)
    finally:
        process.kill()
        process.join()
