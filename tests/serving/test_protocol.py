"""The Open Inference Protocol as bytes: round trips, and refusals that say what is wrong."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crystallite.serving import Refusal
from crystallite.serving.protocol import HEADER_LENGTH, Request, Wanted, decode, encode
from crystallite.serving.signature import DATATYPES, Signature, TensorSpec


def one(dtype, below=None):
    """A model of one tensor."""
    return Signature((TensorSpec("input", dtype, (3,), below=below),), (TensorSpec("output", dtype, (2,)),))


FLOATS, TOKENS = one(torch.float32), one(torch.int64, below=10)
JSON, BINARY = {"output": Wanted(False)}, {"output": Wanted(True)}


def tensor(**changes):
    made = {"name": "input", "shape": [2, 3], "datatype": "FP32", "data": [0.5, 1, 2, 3, 4, 5], **changes}
    return {name: value for name, value in made.items() if value is not None}


def body(**changes):
    return json.dumps({"inputs": [tensor()], **changes}).encode()


def test_json_flat_and_nested():
    expected = torch.tensor([[0.5, 1, 2], [3, 4, 5]])
    nested = body(inputs=[tensor(data=[[0.5, 1, 2], [3, 4, 5]])], id="7", parameters={"timeout": 1500})
    assert torch.equal(decode(body(), None, FLOATS).given["input"], expected)
    request = decode(nested, None, FLOATS)
    assert torch.equal(request.given["input"], expected)
    assert (request.id, request.timeout, request.outputs) == ("7", 0.0015, JSON)


@pytest.mark.parametrize("dtype", DATATYPES)
def test_binary(dtype):
    x = torch.arange(6).reshape(2, 3).to(dtype)
    raw = x.view(torch.uint8).numpy().tobytes()
    described = tensor(datatype=DATATYPES[dtype], data=None, parameters={"binary_data_size": len(raw)})
    header = body(inputs=[described], parameters={"binary_data_output": True})
    request = decode(header + raw, str(len(header)), one(dtype))
    assert torch.equal(request.given["input"], x)
    assert request.outputs == BINARY
    answer, headers = encode({"output": x}, request, "small", "1")
    end = int(headers[HEADER_LENGTH])
    assert answer[end:] == raw
    output = json.loads(answer[:end])["outputs"][0]
    assert output == {
        "name": "output",
        "datatype": DATATYPES[dtype],
        "shape": [2, 3],
        "parameters": {"binary_data_size": len(raw)},
    }


def test_json_numbers_survive_bit_for_bit():
    x = torch.randn(4, 3)
    answer, _ = encode({"output": x}, Request({"input": x}, None, JSON, None), "small", "1")
    data = json.loads(answer)["outputs"][0]["data"]
    again = decode(body(inputs=[tensor(shape=[4, 3], data=data)]), None, FLOATS)
    assert torch.equal(again.given["input"], x)


@pytest.mark.parametrize(("labels", "names"), [((), ["", ""]), (("no", "yes"), [":yes", ":no"])])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_classes_in_the_place_of_numbers(labels, names, count):
    output = TensorSpec("output", torch.float32, (2,), labels=labels)
    signature = Signature((TensorSpec("input", torch.float32, (3,)),), (output,))
    wanted = [{"name": "output", "parameters": {"classification": count}}]
    request = decode(body(outputs=wanted), None, signature)
    answer, _ = encode({"output": torch.tensor([[-0.25, 0.5], [-1.0, 3.0]])}, request, "small", "1")
    (found,) = json.loads(answer)["outputs"]
    expected = [f"{value:f}:{place}" for value, place in ((0.5, 1), (-0.25, 0), (3.0, 1), (-1.0, 0))]
    kept = [f"{text}{names[i % 2]}" for i, text in enumerate(expected) if i % 2 < count]
    assert found == {"name": "output", "datatype": "BYTES", "shape": [2, min(count, 2)], "data": kept}


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (2, 3)), (torch.float32, ()), (torch.bool, (2,)), (None, ())]
)
def test_what_has_no_classes(dtype, shape):
    signature = Signature((TensorSpec("input", torch.float32, (3,)),), (TensorSpec("output", dtype, shape),))
    with pytest.raises(Refusal, match=r"output: classification needs numbers of shape \[samples, classes\], not "):
        decode(body(outputs=[{"name": "output", "parameters": {"classification": 1}}]), None, signature)


def test_what_json_has_not_is_refused_in_answers():
    y = torch.tensor([[float("inf")]])
    with pytest.raises(Refusal, match="binary") as caught:
        encode({"output": y}, Request({"input": y}, None, JSON, None), "small", "1")
    assert caught.value.status == 406


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b"{}", "inputs"),
        (body(inputs=[]), "inputs"),
        (body(inputs=[tensor(), tensor()]), "at most 1 tensors, got 2"),
        (body(inputs=[tensor(name="x")]), "expected 'input', got 'x'"),
        (body(inputs=[tensor(datatype="FP64")]), "expected datatype FP32, got 'FP64'"),
        (body(inputs=[tensor(datatype=None)]), "datatype"),
        (body(inputs=[tensor(shape=None)]), "shape"),
        (body(inputs=[tensor(shape=[2, 4])]), r"expected shape \[samples, 3\], got \[2, 4\]"),
        (body(inputs=[tensor(shape=[6])]), "expected shape"),
        (body(inputs=[tensor(shape=[2, 1, 3])]), "expected shape"),
        (body(inputs=[tensor(shape=[0, 3], data=[])]), "expected shape"),
        (body(inputs=[tensor(shape=[-2, 3])]), "expected a shape"),
        (body(inputs=[tensor(shape=[2.0, 3])]), "expected a shape"),
        (body(inputs=[tensor(shape=[True, 3])]), "expected a shape"),
        (body(inputs=[tensor(shape=[10**30, 3])]), "expected a shape"),
        (body(inputs=[tensor(shape=[10**9, 3])]), "3000000000 numbers"),
        (body(inputs=[tensor(data=None)]), "data"),
        (body(inputs=[tensor(data=[1, 2])]), "6 numbers for shape"),
        (body(inputs=[tensor(data=["1"] * 6)]), "6 numbers"),
        (body(inputs=[tensor(data=[True] * 6)]), "6 numbers"),
        (body(inputs=[tensor(data=[None] * 6)]), "6 numbers"),
        (body(inputs=[tensor(data=[[1, 2], [3]])]), "6 numbers"),
        (body(inputs=[tensor(data=[[1, 2], [3, 4], [5, 6]])]), "flat list"),
        (body(inputs=[tensor(data=[10**400] * 6)]), "6 numbers"),
        (body(inputs=[tensor(parameters=[])]), "parameters"),
        (body(inputs=[tensor(parameters={"binary_data_size": 24})]), "both"),
        (body(inputs=[tensor(data=None, parameters={"binary_data_size": 24})]), "got binary_data_size 24 and 0 bytes"),
        (body(inputs=[tensor(data=None, parameters={"shared_memory_region": "a"})]), "data"),
        (body(outputs=[{"name": "x"}]), "expected 'output', got 'x'"),
        (body(outputs="x"), "outputs"),
        (body(outputs=[{"name": "output", "parameters": {"classes": 3}}]), "no parameter but binary_data or class"),
        (body(outputs=[{"name": "output", "parameters": {"classification": 0}}]), "1 or more classes, got 0"),
        (body(outputs=[{"name": "output", "parameters": {"classification": True}}]), "1 or more classes, got True"),
        (body(outputs=[{"name": "output", "parameters": {"classification": "2"}}]), "1 or more classes, got '2'"),
        (body(parameters=3), "parameters"),
        (body(parameters={"timeout": -1}), "timeout"),
        (body(parameters={"timeout": "soon"}), "timeout"),
        (body(id=3), "id"),
    ],
)
def test_what_is_wrong_is_said(content, message):
    with pytest.raises(Refusal, match=message) as caught:
        decode(content, None, FLOATS)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999", "9" * 5000, "²", ""])
def test_header_lengths(length):
    with pytest.raises(Refusal, match=HEADER_LENGTH):
        decode(body(), length, FLOATS)


@pytest.mark.parametrize(("size", "sent"), [(24, 23), (23, 23), (24, 25), (-24, 24), ("24", 24), (10**30, 24)])
def test_binary_sizes_must_agree(size, sent):
    header = body(inputs=[tensor(data=None, parameters={"binary_data_size": size})])
    with pytest.raises(Refusal, match=r"24 bytes for shape|as it claims|1 bytes follow"):
        decode(header + bytes(sent), str(len(header)), FLOATS)


def test_bytes_that_nothing_claims():
    with pytest.raises(Refusal, match="follow the JSON"):
        decode(body() + b"more", str(len(body())), FLOATS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_numbers_must_be_finite_in_the_model_s_precision(value):
    given = decode(body(inputs=[tensor(data=[value] * 6)]), None, FLOATS).given
    with pytest.raises(Refusal, match="finite"):
        FLOATS.check(given)


@pytest.mark.parametrize("data", [[-1] * 6, [10] * 6, [2**63] * 6])
def test_integers_must_lie_in_the_vocabulary(data):
    with pytest.raises(Refusal, match="integers"):
        TOKENS.check(decode(body(inputs=[tensor(datatype="INT64", data=data)]), None, TOKENS).given)
    with pytest.raises(Refusal, match="integers"):
        decode(body(inputs=[tensor(datatype="INT64", data=[0.5] * 6)]), None, TOKENS)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["name", "data", "shape"]), inner),
    max_leaves=12,
)


@given(
    field=st.sampled_from(["name", "shape", "datatype", "data", "parameters"]),
    value=values,
    outer=st.sampled_from([None, "id", "inputs", "outputs", "parameters"]),
    length=st.none() | st.text(max_size=4),
    tail=st.binary(max_size=30),
)
def test_hostile_requests_are_read_or_refused(field, value, outer, length, tail):
    header = {"inputs": [{**tensor(), field: value}]}
    if outer is not None:
        header[outer] = value
    try:
        request = decode(json.dumps(header).encode() + tail, length, FLOATS)
        FLOATS.check(request.given["input"])
    except Refusal:  # anything else fails the test
        return
    assert request.given["input"].shape[1:] == (3,)


@given(content=st.binary(max_size=60), length=st.none() | st.integers(0, 80).map(str))
def test_any_bytes_are_refused(content, length):
    with pytest.raises(Refusal):
        decode(content, length, FLOATS)
