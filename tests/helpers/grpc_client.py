"""A client of the service over gRPC that sends whatever bytes it is given."""

import pytest

from crystallite.serving.grpc_messages import message
from tests.helpers.waiting import PATIENCE

grpc = pytest.importorskip("grpc", reason="needs grpcio")
Code = grpc.StatusCode
INFER = "/inference.GRPCInferenceService/ModelInfer"


def send(channel, content, call=INFER, **options):
    """(code, what was answered or said, trailing metadata) for bytes that may be anything."""
    method = channel.unary_unary(call)  # no serializer: bytes as they are
    try:
        answer, done = method.with_call(content, timeout=options.pop("timeout", PATIENCE), **options)
        return Code.OK, answer, dict(done.trailing_metadata())
    except grpc.RpcError as error:
        return error.code(), error.details(), dict(error.trailing_metadata() or ())


def request(x, model="f32", raw=True, **changes):
    tensor = {"name": "input", "datatype": "FP32", "shape": list(x.shape)}
    if not raw:
        tensor["contents"] = {"fp32_contents": x.flatten().tolist()}
    contents = [x.numpy().tobytes()] if raw else []
    return {"model_name": model, "inputs": [tensor], "raw_input_contents": contents, **changes}


def infer(channel, content, **options):
    return send(channel, message("ModelInferRequest")(**content).SerializeToString(), **options)
