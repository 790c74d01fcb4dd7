"""Services in process: the same answers as the model, many callers at once, verdicts, new versions."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.serving import Refusal, Service
from tests.helpers.artifacts import APART, TOGETHER, network, saved
from tests.helpers.block_models import Gated, block_convolution, block_linear
from tests.helpers.http_client import Slow
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import wait_for


@pytest.mark.parametrize("machine", [APART, TOGETHER])
@pytest.mark.parametrize("batch", [1, 64])
def test_answers_are_the_model_s(folder, model, machine, batch):
    x = torch.randn(batch, 12)
    with Service.load(folder, machine=machine) as service:
        assert_close(service.infer(x), model(x).detach())
        assert_close(service.infer(x.numpy()), model(x).detach())


def test_many_callers_get_their_own_answers(service, model):
    inputs = torch.randn(40, 3, 12)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(service.infer, inputs))
    for x, y in zip(inputs, answers, strict=True):
        assert_close(y, model(x).detach())


def test_requests_that_wait_are_computed_together(folder, model):
    """20 callers of batch 1. Alone, each call reads all weights; together, they are read once for all."""
    inputs = torch.randn(20, 1, 12)
    with Service.load(folder, machine=TOGETHER) as service, ThreadPoolExecutor(20) as pool:
        served = service.models["small"]
        served.engine._pieces["model"] = piece = Slow(served.engine._pieces["model"])
        first = pool.submit(service.infer, inputs[0])
        wait_for(lambda: piece.calls == 1)
        others = [pool.submit(service.infer, x) for x in inputs[1:]]
        wait_for(lambda: served.batcher.waiting == 19)
        piece.gate.set()
        for x, answer in zip(inputs, [first, *others], strict=True):
            assert_close(answer.result(), model(x).detach())
        assert piece.calls == 2


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 11), r"expected shape \[samples, 12\], got \[2, 11\]"),
        (torch.zeros(12), "expected shape"),
        (torch.zeros(2, 1, 12), "expected shape"),
        (torch.zeros(0, 12), "expected shape"),
        (torch.tensor(1.0), "expected shape"),
        (torch.zeros(2, 12, dtype=torch.float64), "expected datatype FP32, got FP64"),
        (torch.zeros(2, 12, dtype=torch.bool), "expected datatype FP32, got BOOL"),
        (torch.full((2, 12), torch.nan), "finite"),
        (np.full((2, 12), np.inf, np.float32), "finite"),
    ],
)
def test_bad_inputs_are_refused_before_anything_is_computed(service, x, message):
    with pytest.raises(Refusal, match=message) as caught:
        service.infer(x)
    assert caught.value.status == 400


def test_models_need_a_verdict(tmp_path):
    unknown, failed = (
        saved(network(), tmp_path / name, passed) for name, passed in [("unknown", None), ("bad", False)]
    )
    with pytest.raises(cx.InvalidOption, match=r"never validated.*unvalidated=True"):
        Service.load(unknown)
    with pytest.raises(cx.InvalidOption, match=r"failed its validation \(planted\)"):
        Service.load(failed)
    with Service.load(failed, unvalidated=True) as service:
        assert list(service.models) == ["bad"]


def test_a_real_verdict_opens_the_door(tmp_path):
    model = network()
    path = saved(model, tmp_path / "small", passed=None)
    assert cx.validate(model, path, torch.randn(64, 12)).passed
    with Service.load(path) as service:
        assert len(service.infer(torch.zeros(1, 12))) == 1


def test_several_models(folder, model, tmp_path):
    other = network((6, 12, 4), 2, torch.float64, seed=3)
    with Service.load({"first": folder, "second": saved(other, tmp_path / "other")}) as service:
        x = torch.randn(2, 6, dtype=torch.float64)
        assert_close(service.infer(x, "second"), other(x).detach())
        with pytest.raises(cx.InvalidOption, match="first, second"):
            service.infer(x)
        with pytest.raises(Refusal, match="no model 'third'") as caught:
            service.infer(x, "third")
        assert caught.value.status == 404


def test_closed_services_refuse(folder):
    service = Service.load(folder)
    service.close()
    service.close()
    with pytest.raises(Refusal, match="closed"):
        service.infer(torch.zeros(1, 12))


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ü", "x" * 101])
def test_names(folder, name):
    with pytest.raises(cx.InvalidOption, match="model name"):
        Service.load({name: folder})


def test_shapes_that_the_first_layer_does_not_say(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(block_convolution(nn.Conv2d, 8, 8, 4, 1), nn.Flatten(), nn.Linear(8 * 4, 3)).eval()
    path = saved(model, tmp_path / "images")
    with pytest.raises(cx.InvalidOption, match="shape"):
        Service.load(path)
    with pytest.raises(cx.InvalidOption, match="does not take samples of shape"):
        Service.load(path, shape=(8, 9, 9))
    with Service.load(path, shape=(8, 4, 4)) as service:
        x = torch.randn(2, 8, 4, 4)
        assert_close(service.infer(x), model(x).detach())


def test_tokens(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), block_linear(8, 8, 2, 1)).eval()
    with Service.load(saved(model, tmp_path / "tokens"), shape=(5,)) as service:
        x = torch.randint(10, (3, 5))
        assert_close(service.infer(x), model(x).detach())
        with pytest.raises(Refusal, match="from 0 to 9"):
            service.infer(x + 10)


def test_a_model_with_code_of_its_own(tmp_path):
    torch.manual_seed(0)
    model = Gated().eval()
    path = saved(model, tmp_path / "gated")
    with Service.load(path, into=model, shape=(16,)) as service:
        x = torch.randn(3, 16)
        assert_close(service.infer(x), model(x).detach())


def test_outputs_that_are_no_tensor(tmp_path):
    torch.manual_seed(0)
    from tests.helpers.block_models import block_recurrent

    model = nn.Sequential(block_recurrent(nn.GRU, 8, 8, 2, batch_first=True)).eval()
    path = saved(model, tmp_path / "sequences")
    with pytest.raises(cx.InvalidOption, match=r"output\[1\].*choose others, outputs="):
        Service.load(path, shape=(5, 8))
    with Service.load(path, shape=(-1, 8), outputs=["output[0]"]) as service:
        x = torch.randn(2, 7, 8)
        assert_close(service.infer(x), model(x)[0].detach())


def switch(link, target):
    fresh = link.with_name("fresh")
    fresh.symlink_to(target)
    fresh.replace(link)


def test_a_new_version_takes_over_without_a_lost_request(tmp_path):
    versions = [network(seed=seed, head=False) for seed in (0, 1)]
    paths = [saved(model, tmp_path / f"v{i}") for i, model in enumerate(versions)]
    link = tmp_path / "current"
    link.symlink_to(paths[0])
    x = torch.randn(1, 12)
    expected = [model(x).detach() for model in versions]
    answers, stop = [], threading.Event()

    def call():
        while not stop.is_set():
            answers.append(service.infer(x))

    with Service.load(link, machine=APART) as service:
        before = service.models["current"].version
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call) for _ in range(4)]
            for path in [paths[1], paths[0]] * 3 + [paths[1]]:
                switch(link, path)
                service.reload("current")
            stop.set()
            for done in calls:
                done.result()
        assert service.models["current"].version != before
        assert_close(service.infer(x), expected[1])
    seen = {i for y in answers for i in (0, 1) if torch.allclose(y, expected[i], atol=1e-5)}
    assert seen == {0, 1}
    assert all(any(torch.allclose(y, e, atol=1e-5) for e in expected) for y in answers)


def test_a_version_that_may_not_be_served_changes_nothing(tmp_path):
    model = network()
    link = tmp_path / "current"
    link.symlink_to(saved(model, tmp_path / "good"))
    bad = saved(network(seed=1), tmp_path / "bad", passed=False)
    broken = tmp_path / "broken"
    broken.mkdir()
    x = torch.randn(2, 12)
    with Service.load(link) as service:
        for path, message in [(bad, "failed its validation"), (broken, "found no manifest")]:
            switch(link, path)
            with pytest.raises(cx.CrystalliteError, match=message):
                service.reload("current")
            assert_close(service.infer(x), model(x).detach())
        assert 'outcome="refused"} 2' in service.metrics.text({})


def test_engines(folder):
    with pytest.raises(cx.InvalidOption, match="engine must be one of local, ray, got 'dask'"):
        Service.load(folder, engine="dask")


def test_ray_is_asked_for_by_name(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(cx.InvalidOption, match=r"crystallite\[ray\]"):
        Service.load(folder, engine="ray")
