"""What operators ask of a service beside answers: lists, statistics, loading and unloading, examples, spans."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from crystallite.serving import Listener, Service
from crystallite.serving.usage import curl, example_request
from tests.helpers.artifacts import APART, TOGETHER, network, saved
from tests.helpers.http_client import TOKEN, Slow, answer, call, infer, request
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two models behind both ports."""
    pytest.importorskip("grpc", reason="needs grpcio")
    folder = tmp_path_factory.mktemp("two")
    models = {"first": network(), "second": network(seed=1)}
    paths = {name: saved(model, folder / name) for name, model in models.items()}
    with Service.load(paths, machine=APART) as service, Listener(service, port=0, grpc_port=0) as listener:
        yield service, listener, models


def unload(url, name):
    return call(url, f"/v2/repository/models/{name}/unload", b"")


def load(url, name):
    return call(url, f"/v2/repository/models/{name}/load", b"")


def test_a_model_is_unloaded_and_loaded_again(two, x):
    service, listener, models = two
    url = listener.url
    assert unload(url, "second")[0] == 200
    assert list(service.models) == ["first"]
    for path, body in [("", None), ("/ready", None), ("/infer", request(x)), ("/stats", None), ("/plan", None)]:
        status, _, said = call(url, f"/v2/models/second{path}", body)
        assert status == 404
        assert "second is unloaded" in said["error"]
    states = {one["name"]: (one["state"], one["reason"]) for one in call(url, "/v2/models")[2]["models"]}
    assert states == {"first": ("READY", ""), "second": ("UNAVAILABLE", "unloaded")}
    assert unload(url, "second")[0] == 404
    assert unload(url, "third")[0] == 404
    assert infer(url, x, "/v2/models/first/infer")[0] == 200
    assert load(url, "second")[0] == 200
    found = infer(url, x, "/v2/models/second/infer")[2]
    assert_close(answer(found), models["second"](x).detach())


def test_unloading_answers_what_was_accepted(folder, model, x):
    with Service.load(folder, machine=TOGETHER) as service, Listener(service, port=0) as listener:
        pieces = service.models["small"].engine._pieces
        pieces["model"] = piece = Slow(pieces["model"])
        with ThreadPoolExecutor(2) as pool:
            accepted = pool.submit(infer, listener.url, x)
            wait_for(lambda: piece.calls == 1)
            unloading = pool.submit(unload, listener.url, "small")
            wait_for(lambda: not service.models)
            piece.gate.set()
            assert_close(answer(accepted.result()[2]), model(x).detach())
            assert unloading.result()[0] == 200


def test_statistics(folder, x):
    with Service.load(folder, machine=TOGETHER) as service, Listener(service, port=0) as listener:
        for _ in range(3):
            infer(listener.url, x)
        infer(listener.url, x[:, :3])
        (found,) = call(listener.url, "/v2/models/small/stats")[2]["model_stats"]
        assert call(listener.url, "/v2/models/stats")[2]["model_stats"] == [found]
        assert (found["name"], found["version"]) == ("small", service.models["small"].version)
        assert (found["inference_count"], found["execution_count"]) == (15, 3)
        times = found["inference_stats"]
        assert (times["success"]["count"], times["fail"]["count"]) == (3, 1)
        assert 0 < times["compute_infer"]["ns"] <= times["success"]["ns"]
        assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in found["batch_stats"]] == [(5, 3)]
        service.reload("small")
        assert call(listener.url, "/v2/models/stats")[2]["model_stats"][0]["inference_count"] == 0


def test_tritonclient_loads_unloads_and_counts(two, x):
    _, listener, _ = two
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")

    x = x.numpy()
    for kind, where, more in [
        (http, listener.url.removeprefix("http://"), {}),
        (grpc, listener.grpc_target, {"as_json": True}),
    ]:
        given = kind.InferInput("input", list(x.shape), "FP32").set_data_from_numpy(x)
        with kind.InferenceServerClient(where) as client:

            def count(client=client, more=more):
                found = client.get_inference_statistics("second", **more)["model_stats"][0]
                return int(found.get("inference_count", 0))

            def states(client=client, more=more):
                found = client.get_model_repository_index(**more)
                return [one["state"] for one in (found if isinstance(found, list) else found["models"])]

            before = count()
            client.infer("second", [given])
            assert count() == before + len(x)
            assert len(client.get_inference_statistics(**more)["model_stats"]) == 2
            client.unload_model("second")
            assert states() == ["READY", "UNAVAILABLE"]
            assert not client.is_model_ready("second")
            client.load_model("second")
            assert states() == ["READY", "READY"]
            client.infer("second", [given])
            with pytest.raises(kind.InferenceServerException, match="no model 'third'"):
                client.unload_model("third")


def test_examples_are_answered(two):
    _, listener, models = two
    found = call(listener.url, "/v2/models/first/example")[2]
    status, _, body = call(listener.url, "/v2/models/first/infer", json.dumps(found["request"]))
    assert status == 200
    given = torch.tensor(found["request"]["inputs"][0]["data"]).reshape(1, 12)
    assert_close(answer(body), models["first"](given).detach())
    done = subprocess.run(["sh", "-c", found["curl"]], capture_output=True, text=True, timeout=PATIENCE)
    assert_close(answer(json.loads(done.stdout)), models["first"](given).detach())


def test_large_samples_are_asked_for_in_binary(tmp_path):
    model = network((600, 12, 8), 2)
    with Service.load(saved(model, tmp_path / "wide")) as service, Listener(service, port=0, token=TOKEN) as listener:
        (tmp_path / "token").write_text(TOKEN)
        line = curl(service.models["wide"], listener.url, token=True).replace("TOKEN-FILE", str(tmp_path / "token"))
        assert len(line) < 600
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE)
        assert_close(answer(json.loads(done.stdout)), model(torch.zeros(1, 600)).detach())
        assert len(example_request(service.models["wide"])["inputs"][0]["data"]) == 600


def test_the_plan_is_served(two):
    service, listener, _ = two
    found = call(listener.url, "/v2/models/first/plan")[2]
    expected = [len(stage.pieces) for stage in service.models["first"].plan.stages]
    assert [len(stage["pieces"]) for stage in found["stages"]] == expected
