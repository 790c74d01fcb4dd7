"""The protocol over gRPC: an unmodified client gets the model's answers, and what is wrong is the caller's error."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import crystallite as cx
from crystallite.serving import Limits, Listener, Service
from crystallite.serving.grpc_messages import message
from tests.helpers.artifacts import APART, TOGETHER, network, saved
from tests.helpers.grpc_client import INFER, Code, infer, request, send
from tests.helpers.http_client import TOKEN, Slow
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for

grpc = pytest.importorskip("grpc", reason="needs grpcio")
triton = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Models by name, and where they are served."""
    models = {"f32": network(), "f16": network(dtype=torch.float16)}
    folder = tmp_path_factory.mktemp("triton")
    paths = {name: saved(model, folder / name) for name, model in models.items()}
    with Service.load(paths, machine=APART) as service, Listener(service, port=0, grpc_port=0) as listener:
        yield models, listener.grpc_target


@pytest.fixture(scope="module")
def client(served):
    with triton.InferenceServerClient(served[1]) as client:
        yield client


@pytest.fixture(scope="module")
def channel(served):
    with grpc.insecure_channel(served[1], options=[("grpc.max_send_message_length", -1)]) as channel:
        yield channel


@pytest.fixture
def alive(channel, served, x):
    """Whatever a test sent, the server answers afterwards."""
    yield
    code, content, _ = infer(channel, request(x))
    assert code == Code.OK
    found = message("ModelInferResponse").FromString(content).raw_output_contents[0]
    assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(5, 8), served[0]["f32"](x).detach())


@pytest.mark.parametrize("name", ["f32", "f16"])
@pytest.mark.parametrize("batch", [1, 64])
def test_answers(served, client, name, batch):
    dtype, datatype = {"f32": (np.float32, "FP32"), "f16": (np.float16, "FP16")}[name]
    x = np.random.default_rng(0).standard_normal((batch, 12)).astype(dtype)
    given = triton.InferInput("input", list(x.shape), datatype).set_data_from_numpy(x)
    result = client.infer(name, [given], outputs=[triton.InferRequestedOutput("output")], request_id="1")
    assert_close(torch.from_numpy(result.as_numpy("output").copy()), served[0][name](torch.from_numpy(x)).detach())
    assert result.get_response().id == "1"


@pytest.mark.parametrize("batch", [1, 64])
def test_typed_contents(served, channel, batch):
    x = torch.randn(batch, 12)
    code, content, _ = infer(channel, request(x, raw=False))
    assert code == Code.OK
    output = message("ModelInferResponse").FromString(content).outputs[0]
    assert list(output.shape) == [batch, 8]
    assert_close(torch.tensor(output.contents.fp32_contents).reshape(batch, 8), served[0]["f32"](x).detach())


def test_messages_are_those_of_the_client():
    from tritonclient.grpc import service_pb2

    def fields(descriptor):
        inner = {nested.name: fields(nested) for nested in descriptor.nested_types}
        return inner, [
            (f.name, f.number, f.type, f.is_repeated, f.message_type and f.message_type.full_name)
            for f in descriptor.fields
        ]

    names = ["ModelInferRequest", "ModelInferResponse", "ModelMetadataResponse", "ServerMetadataResponse"]
    names += ["RepositoryIndexRequest", "RepositoryIndexResponse", "RepositoryModelLoadRequest", "ModelStatistics"]
    names += ["RepositoryModelUnloadRequest", "ModelStatisticsResponse", "InferStatistics", "InferBatchStatistics"]
    for name in [*names, "InferParameter", "InferTensorContents", "ModelReadyRequest", "ModelReadyResponse"]:
        assert fields(message(name).DESCRIPTOR) == fields(getattr(service_pb2, name).DESCRIPTOR)


def test_what_else_it_asks(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("f32")
    assert not client.is_model_ready("f64")
    assert not client.is_model_ready("f32", "9")
    assert client.get_server_metadata().name == "crystallite"
    found = client.get_model_metadata("f16")
    assert (found.inputs[0].datatype, list(found.inputs[0].shape)) == ("FP16", [-1, 12])
    assert (found.outputs[0].name, list(found.outputs[0].shape)) == ("output", [-1, 8])


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"model_name": "other"}, Code.NOT_FOUND, "no model 'other'"),
        ({"model_version": "9"}, Code.NOT_FOUND, "has version"),
        ({"inputs": []}, Code.INVALID_ARGUMENT, "expected one to 1 tensors, got 0"),
        ({"inputs": [{"name": "other"}]}, Code.INVALID_ARGUMENT, "expected 'input', got"),
        ({"inputs": [{"name": "input", "datatype": "FP16"}]}, Code.INVALID_ARGUMENT, "expected datatype FP32"),
        ({"raw_input_contents": [b"1234"]}, Code.INVALID_ARGUMENT, "expected 240 bytes for shape [5, 12], got 4"),
        ({"raw_input_contents": [b""] * 9}, Code.INVALID_ARGUMENT, "got other numbers"),
        ({"raw_input_contents": []}, Code.INVALID_ARGUMENT, "expected 60 fp32_contents"),
        ({"raw_input_contents": [b"\xff" * 240]}, Code.INVALID_ARGUMENT, "finite"),
        ({"outputs": [{"name": "hidden"}]}, Code.INVALID_ARGUMENT, "outputs: expected 'output'"),
        (
            {"outputs": [{"name": "output", "parameters": {"shared_memory_region": {"string_param": "a"}}}]},
            Code.INVALID_ARGUMENT,
            "no parameter but classification",
        ),
        (
            {"outputs": [{"name": "output", "parameters": {"classification": {"string_param": "2"}}}]},
            Code.INVALID_ARGUMENT,
            "1 or more classes, got 0",
        ),
        ({"parameters": {"timeout": {"int64_param": -1}}}, Code.INVALID_ARGUMENT, "microseconds"),
        ({"parameters": {"timeout": {"string_param": "soon"}}}, Code.INVALID_ARGUMENT, "microseconds"),
    ],
)
@pytest.mark.usefixtures("alive")
def test_bad_requests(channel, x, changes, code, said):
    found, answered, _ = infer(channel, request(x, **changes))
    assert found == code
    assert said in answered


@pytest.mark.parametrize("shape", [[], [0, 12], [-1, 12], [1, 12, 1], [2**62, 12], [1] * 1000])
@pytest.mark.usefixtures("alive")
def test_shapes(channel, x, shape):
    tensor = {"name": "input", "datatype": "FP32", "shape": shape}
    assert infer(channel, request(x, inputs=[tensor]))[0] == Code.INVALID_ARGUMENT


def test_half_precision_has_no_typed_contents(channel):
    tensor = {"name": "input", "datatype": "FP16", "shape": [1, 12], "contents": {"fp32_contents": [0.0] * 12}}
    code, said, _ = infer(channel, {"model_name": "f16", "inputs": [tensor]})
    assert code == Code.INVALID_ARGUMENT
    assert "raw_input_contents" in said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(content=st.binary(min_size=1, max_size=60))
@pytest.mark.usefixtures("alive")
def test_any_bytes_are_the_caller_s_error(channel, content):
    assert send(channel, content)[0] in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)


@pytest.mark.usefixtures("alive")
def test_methods_that_do_not_exist(channel):
    assert send(channel, b"", "/inference.GRPCInferenceService/ModelConfig")[0] == Code.UNIMPLEMENTED


def test_messages_that_are_too_large(tmp_path, x):
    limits = Limits(max_bytes=2000)
    with (
        Service.load(saved(network(), tmp_path / "f32"), limits=limits) as service,
        Listener(service, port=0, grpc_port=0) as listener,
        grpc.insecure_channel(listener.grpc_target) as channel,
    ):
        assert send(channel, bytes(100_000))[0] == Code.RESOURCE_EXHAUSTED
        assert infer(channel, request(x), metadata=(("x", "x" * 100_000),))[0] == Code.RESOURCE_EXHAUSTED
        # 10 MB of zeros that fit into 10 KB
        squeezed = send(channel, bytes(10_000_000), compression=grpc.Compression.Gzip)
        assert squeezed[0] == Code.UNIMPLEMENTED
        assert infer(channel, request(x))[0] == Code.OK


def test_tokens(tmp_path, x):
    with (
        Service.load(saved(network(), tmp_path / "f32")) as service,
        Listener(service, port=0, token=TOKEN, grpc_port=0) as listener,
        grpc.insecure_channel(listener.grpc_target) as channel,
    ):
        for metadata in [(), (("authorization", TOKEN),), (("authorization", "Bearer wrong"),)]:
            for call in ("ModelInfer", "ModelMetadata", "ServerMetadata", "ModelReady"):
                path = f"/inference.GRPCInferenceService/{call}"
                code, said, _ = send(channel, b"\xff", path, metadata=metadata)
                assert code == Code.UNAUTHENTICATED
                assert TOKEN not in said
        assert send(channel, b"", "/inference.GRPCInferenceService/ServerLive")[0] == Code.OK
        allowed = (("authorization", f"Bearer {TOKEN}"),)
        assert infer(channel, request(x), metadata=allowed)[0] == Code.OK


def test_ports_that_are_taken(tmp_path, served):
    port = int(served[1].rpartition(":")[2])
    service = Service.load(saved(network(), tmp_path / "f32"))
    with service, pytest.raises(cx.InvalidOption, match="cannot listen"):
        Listener(service, port=0, grpc_port=port)


@pytest.fixture
def slow(tmp_path):
    """A listener whose model's only piece waits, a channel to it, the piece and the service."""
    limits = Limits(max_queue=1, max_batch=1, timeout=PATIENCE)
    with (
        Service.load(saved(network(), tmp_path / "f32"), machine=TOGETHER, limits=limits) as service,
        Listener(service, port=0, grpc_port=0) as listener,
        grpc.insecure_channel(listener.grpc_target) as channel,
    ):
        pieces = service.models["f32"].engine._pieces
        pieces["model"] = piece = Slow(pieces["model"])
        try:
            yield listener, channel, piece, service
        finally:
            piece.gate.set()


def test_full_queues_deadlines_and_clients_that_leave(slow, x):
    _, channel, piece, service = slow
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(infer, channel, request(x))
        wait_for(lambda: piece.calls == 1)
        leaving = channel.unary_unary(INFER).future(message("ModelInferRequest")(**request(x)).SerializeToString())
        wait_for(lambda: service.models["f32"].batcher.waiting == 1)
        code, said, trailing = infer(channel, request(x))
        assert code == Code.RESOURCE_EXHAUSTED
        assert "1 requests wait" in said
        assert int(trailing["retry-after"]) >= 1
        leaving.cancel()
        wait_for(lambda: service.models["f32"].batcher.waiting == 0)
        late = request(x, parameters={"timeout": {"int64_param": 100_000}})
        code, said, _ = infer(channel, late)
        assert code == Code.DEADLINE_EXCEEDED
        assert "0.1 s" in said
        assert infer(channel, request(x), timeout=0.1)[0] == Code.DEADLINE_EXCEEDED  # the call's own
        wait_for(lambda: service.models["f32"].batcher.waiting == 0)
        piece.gate.set()
        assert busy.result()[0] == Code.OK
    assert piece.calls == 1
    counted = re.findall(r'requests_total{model="f32",status="(\d+)"} (\d)', service.metrics.text({}))
    counts = {int(status): int(count) for status, count in counted}
    assert (counts.pop(200), counts.pop(429)) == (1, 1)
    assert counts in ({499: 1, 504: 2}, {499: 2, 504: 1})  # at a deadline, client and server are equally fast


def test_closing_answers_what_was_accepted(slow, x):
    listener, channel, piece, service = slow
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(infer, channel, request(x))]
        wait_for(lambda: piece.calls == 1)
        accepted.append(pool.submit(infer, channel, request(x)))
        wait_for(lambda: service.models["f32"].batcher.waiting == 1)
        closing = threading.Thread(target=listener.close)
        closing.start()
        wait_for(lambda: infer(channel, request(x), timeout=PATIENCE)[0] == Code.UNAVAILABLE)
        piece.gate.set()
        assert [done.result()[0] for done in accepted] == [Code.OK] * 2
        closing.join(PATIENCE)
        assert not closing.is_alive()
