"""A model beside its original on live requests: who answers, what is compared, what is caught, and switching over."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmarks.serving_forms import FORMS, save_form
from torch import nn

import crystallite as cx
from crystallite.models.manifest import read_manifest
from crystallite.serving import Limits, Listener, Service, TrialOptions, live_trial
from crystallite.serving.interface import only
from crystallite.validation import Rules
from tests.helpers.artifacts import APART, TOGETHER, network, saved, small
from tests.helpers.http_client import Slow, answer, call, infer, request
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for

TRIAL = "/v2/models/small/trial"


class Planted(nn.Module):
    """Wrong for some inputs only: where the first one is larger than 2, its answers come in another order."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = only(self.inner({"input": x}))
        return torch.where(x[:, :1] > 2, y.flip(1), y)


@pytest.fixture
def tried(model, tmp_path):
    """A service in a trial, and its server; the model has no verdict of its own."""
    path = saved(model, tmp_path / "small", passed=None)
    options = TrialOptions(model, requests=20, rules=Rules(max_drop=None, min_agreement=0.8), attach=True)
    with Service.load(path, machine=TOGETHER, trial=options) as service, Listener(service, port=0) as listener:
        yield service, listener.url, path


def ask(url, inputs, **more):
    return [infer(url, x[None], **more) for x in inputs]


def until(service, requests):
    trial = service.trial_of("small")
    wait_for(lambda: sum(trial.summary()[name] for name in ("requests", "failed")) >= requests)
    return trial.summary()


def test_the_original_answers_and_both_are_compared(tried, model):
    service, url, _ = tried
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(0))
    for x, (status, _, body) in zip(inputs, ask(url, inputs), strict=True):
        assert status == 200
        assert body["model_version"] == service.trial_of("small").original.version
        assert_close(answer(body), model(x[None]).detach())
    found = until(service, 20)
    assert (found["requests"], found["dropped"], found["failed"]) == (20, 0, 0)
    assert found["agreement"] == 1
    assert found["worst_deviation"] < 1e-5
    assert all(seconds > 0 for seconds in found["seconds"])
    assert sum(window["requests"] for window in found["over_time"]) == 20
    text = call(url, "/metrics")[2]
    assert 'crystallite_trial_requests_total{model="small",outcome="compared"} 20' in text
    assert 'crystallite_trial_decisions_total{model="small",outcome="same"} 20' in text
    assert 'crystallite_trial_seconds_count{model="small",system="reorganized"} 20' in text
    assert call(url, "/v2/models")[2]["models"][0]["trial"] is True


def test_a_planted_bad_slice_is_caught_live(tried, model):
    service, url, path = tried
    pieces = service.models["small"].engine._pieces
    pieces["model"] = Planted(pieces["model"])
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9)
    inputs[[3, 11, 17], 0] = 2.5
    for i, x in enumerate(inputs):
        assert_close(answer(infer(url, x[None], id=f"request-{i}")[2]), model(x[None]).detach())  # clients never see it
    found = until(service, 20)
    assert found["agreement"] < 1
    caught = {case["request_id"] for case in found["worst"] if case["deviation"] > 0.1}
    assert caught == {"request-3", "request-11", "request-17"}
    assert all(case["inputs"]["input"][0] == 2.5 for case in found["worst"] if case["deviation"] > 0.1)
    assert found["verdict"]["passed"] is False
    assert "relative deviation" in " ".join(found["verdict"]["reasons"])
    wait_for(lambda: read_manifest(path)["verdict"] is not None)
    assert read_manifest(path)["verdict"]["passed"] is False
    status, _, body = call(url, TRIAL, json.dumps({"answer_from": "reorganized"}))
    assert status == 409
    assert "the trial failed" in body["error"]
    assert service.trial_of("small").answer_from == "original"


def test_switching_over_and_back_loses_no_request(tried, model):
    service, url, path = tried
    status, _, body = call(url, TRIAL, json.dumps({"answer_from": "reorganized"}))
    assert status == 409
    assert "never validated" in body["error"]
    ask(url, torch.randn(20, 12))
    wait_for(lambda: read_manifest(path)["verdict"] is not None)
    assert read_manifest(path)["verdict"]["passed"]
    x, stop, seen = torch.randn(1, 12), threading.Event(), []
    versions = service.models["small"].versions

    def load():
        while not stop.is_set():
            seen.append(infer(url, x))

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        for system in ["reorganized", "original"] * 3 + ["reorganized"]:
            before = len(seen)
            status, _, body = call(url, TRIAL, json.dumps({"answer_from": system}))
            assert (status, body["answer_from"]) == (200, system)
            wait_for(lambda before=before: len(seen) >= before + 8)
        stop.set()
        for done in loads:
            done.result()
    assert {status for status, _, _ in seen} == {200}
    assert {body["model_version"] for _, _, body in seen} == set(versions)
    for _, _, body in seen:
        assert_close(answer(body), model(x).detach())
    for version in versions:  # and who names one gets that one
        assert infer(url, x, f"/v2/models/small/versions/{version}/infer")[2]["model_version"] == version


def test_second_answers_wait_and_are_dropped_rather_than_delay(tried, model, x):
    service, url, _ = tried
    pieces = service.models["small"].engine._pieces
    pieces["model"] = piece = Slow(pieces["model"])
    try:
        for _ in range(live_trial._MOST_WAITING + 20):
            assert infer(url, x)[0] == 200  # though the other system does not answer at all
        wait_for(lambda: piece.calls == 1)
        found = service.trial_of("small").summary()
        assert found["requests"] == 0
        assert 15 <= found["dropped"] <= 20
    finally:
        piece.gate.set()
    until(service, live_trial._MOST_WAITING)


def test_a_system_that_fails_is_no_error_of_the_client_s(tried, x):
    service, url, _ = tried

    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("unlucky")

    service.models["small"].engine._pieces["model"] = Broken()
    assert {status for status, _, _ in ask(url, torch.randn(5, 12))} == {200}
    found = until(service, 5)
    assert (found["requests"], found["failed"]) == (0, 5)
    assert "unlucky" in found["last_failure"]
    status, _, body = call(url, TRIAL, json.dumps({"answer_from": "reorganized"}))
    assert (status, "5 requests" in body["error"]) == (409, True)


def test_a_verdict_that_is_not_asked_for_is_not_written(model, tmp_path):
    path = saved(model, tmp_path / "small", passed=None)
    with Service.load(path, trial=TrialOptions(model, requests=3)) as service:
        for x in torch.randn(3, 1, 12):
            service.infer(x)
        wait_for(lambda: service.trial_of("small").verdict is not None)
        assert service.trial_of("small").verdict.passed
        service.trial_of("small").switch("reorganized")
    assert read_manifest(path)["verdict"] is None


def test_what_cannot_be_tried(model, folder, tmp_path):
    with pytest.raises(cx.InvalidOption, match="evaluation mode"):
        Service.load(folder, trial=copy.deepcopy(model).train())
    with pytest.raises(cx.InvalidOption, match="at least 1"):
        TrialOptions(model, requests=0)
    path = cx.save(small(model), tmp_path / "small", source=model)
    with pytest.raises(cx.InvalidOption, match="made from a model with the hash"):
        Service.load(path, trial=network(seed=3))
    with pytest.raises(cx.InvalidOption, match="serve it alone"):
        Service.load({"a": folder, "b": folder}, trial=model)
    with pytest.raises(cx.InvalidOption, match="expected an original that"):
        Service.load(folder, trial=network((12, 24, 6), 2))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"answer_from": 3}', b'{"answer_from": "original", "more": 1}'])
def test_bad_requests_to_switch(tried, url, body):
    _, own, _ = tried
    assert call(own, TRIAL, body, "POST")[0] == 400
    assert call(url, TRIAL)[0] == 404  # in no trial


def test_requests_that_wait_are_seen_and_answered_at_the_end(model, tmp_path):
    path = saved(model, tmp_path / "small")
    limits = Limits(max_wait=PATIENCE, timeout=PATIENCE)
    with Service.load(path, trial=model, limits=limits) as service, ThreadPoolExecutor(3) as pool:
        x = torch.randn(1, 12)
        accepted = [pool.submit(service.infer, x) for _ in range(3)]
        wait_for(lambda: service.models["small"].waiting == 3)
        service.run(service.flush())
        for done in accepted:
            assert_close(done.result(), model(x).detach())


def test_the_whole_request_is_compared(tried):
    service, url, _ = tried
    assert call(url, "/v2/models/small/infer", request(torch.randn(7, 12)))[0] == 200
    assert until(service, 1)["samples"] == 7


def test_a_model_that_is_cut_is_tried_with_all_that_it_computes(tmp_path):
    form = FORMS["encoder"]
    original, path = form.build(), save_form("encoder", tmp_path / "small")
    options = TrialOptions(original, requests=5)
    with Service.load(path, into=form.build(), machine=APART, trial=options) as service:
        assert len(service.models["small"].plan.pieces) == form.pieces
        for samples in range(1, 6):
            given = form.inputs(samples)
            assert_close(service.infer(given), original(*given.values()).detach())
        verdict = until(service, 5)["verdict"]
    assert verdict["passed"]
    dense, blocks = 2 * 16 * 32, 2 * 16 * 32 // 4
    per_token = verdict["macs"][0] // 7
    assert verdict["macs"][1] // 7 == per_token - dense + blocks
