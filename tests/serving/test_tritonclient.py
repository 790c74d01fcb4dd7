"""The client of another project, unmodified, gets the model's answers."""

import numpy as np
import pytest
import torch

from crystallite.serving import Listener, Service
from tests.helpers.artifacts import APART, network, saved
from tests.helpers.tolerance import assert_close

triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Models by name, and a client of the server that has them."""
    models = {"f32": network(), "f16": network(dtype=torch.float16)}
    folder = tmp_path_factory.mktemp("triton")
    paths = {name: saved(model, folder / name) for name, model in models.items()}
    with Service.load(paths, machine=APART) as service, Listener(service, port=0) as listener:
        client = triton.InferenceServerClient(listener.url.removeprefix("http://"))
        yield models, client
        client.close()


@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("returned", [True, False])
def test_answers(served, name, batch, sent, returned):
    models, client = served
    dtype, datatype = {"f32": (np.float32, "FP32"), "f16": (np.float16, "FP16")}[name]
    x = np.random.default_rng(0).standard_normal((batch, 12)).astype(dtype)
    given = triton.InferInput("input", list(x.shape), datatype).set_data_from_numpy(x, binary_data=sent)
    wanted = triton.InferRequestedOutput("output", binary_data=returned)
    result = client.infer(name, [given], outputs=[wanted], request_id="1")
    assert_close(torch.from_numpy(result.as_numpy("output").copy()), models[name](torch.from_numpy(x)).detach())
    assert result.get_response()["id"] == "1"


def test_what_else_it_asks(served):
    _, client = served
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("f32")
    assert not client.is_model_ready("f64")
    assert client.get_server_metadata()["name"] == "crystallite"
    assert client.get_model_metadata("f16")["inputs"][0]["datatype"] == "FP16"
    assert [model["name"] for model in client.get_model_repository_index()] == ["f32", "f16"]
    client.load_model("f32")


def test_errors_reach_it(served):
    _, client = served
    x = triton.InferInput("input", [1, 5], "FP32").set_data_from_numpy(np.zeros((1, 5), np.float32))
    with pytest.raises(triton.InferenceServerException, match=r"expected shape \[samples, 12\], got \[1, 5\]"):
        client.infer("f32", [x])
