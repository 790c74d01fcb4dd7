"""ONNX models built with onnx.helper: every weight (out, in), the nodes say what it is, no way out of the folder."""

import sys
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from crystallite.core.errors import CheckpointError
from crystallite.weights import onnx_file, open_checkpoint, recognise
from tests.helpers.hostile_onnx import HOSTILE

RANDOM = np.random.default_rng(0)


def values(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


def write(path, nodes, arrays, **options):
    initializers = [a if isinstance(a, TensorProto) else numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", [], [], initializers)
    onnx.save(helper.make_model(graph), path, **options)
    return path


def by_name(path):
    checkpoint = open_checkpoint(path)
    return checkpoint, {layer.name: layer for layer in recognise(checkpoint)}


def test_every_matrix_comes_back_out_in(tmp_path):
    arrays = {name: values(3, 5) for name in ("a", "b", "c", "d", "e", "f")}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["1"]),  # x W: stored (in, out)
        helper.make_node("Gemm", ["x", "b"], ["2"]),
        helper.make_node("Gemm", ["x", "c"], ["3"], transB=1),
        helper.make_node("Transpose", ["d"], ["dt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "dt"], ["4"]),
        helper.make_node("MatMul", ["e", "x"], ["5"]),  # W x
        helper.make_node("Identity", ["f"], ["same"]),
        helper.make_node("MatMul", ["x", "same"], ["6"]),
    ]
    checkpoint, layers = by_name(write(tmp_path / "m.onnx", nodes, arrays))
    for name, turned in {"a": True, "b": True, "c": False, "d": False, "e": False, "f": True}.items():
        expected = arrays[name].T if turned else arrays[name]
        assert np.array_equal(checkpoint.read(name), expected), name
        assert checkpoint.tensors[name].shape == expected.shape
        assert (layers[name].kind, layers[name].rows, layers[name].cols) == ("linear", *expected.shape)


def test_nodes_say_what_tensors_are(tmp_path):
    arrays = {
        "conv": values(4, 1, 3, 3),
        "deconv": values(4, 2, 3),
        "emb": values(10, 4),
        "ln": values(4),
        "shift": values(1, 6),
        "fc.bias": values(4),
        "fc": values(6, 4),
    }
    nodes = [
        helper.make_node("Conv", ["x", "conv"], ["1"], group=4),
        helper.make_node("ConvTranspose", ["x", "deconv"], ["2"], group=2),
        helper.make_node("Gather", ["emb", "ids"], ["3"]),
        helper.make_node("LayerNormalization", ["x", "ln"], ["4"]),
        helper.make_node("Add", ["x", "shift"], ["5"]),
        helper.make_node("Gemm", ["x", "fc", "fc.bias"], ["6"]),
    ]
    checkpoint, layers = by_name(write(tmp_path / "m.onnx", nodes, arrays))
    assert (layers["conv"].kind, layers["conv"].groups, layers["conv"].kernel) == ("conv", 4, (3, 3))
    deconv = layers["deconv"]
    assert (deconv.rows, deconv.cols, deconv.groups) == (4, 6, 2)
    assert deconv.matrices(checkpoint)[0][1].shape == (4, 6)
    assert layers["emb"].kind == "embedding"
    reasons = {name: layer.reason for name, layer in layers.items() if layer.kind == "skipped"}
    assert reasons == {"ln": "norm", "shift": "operand of Add", "fc.bias": "bias"}


@pytest.mark.parametrize(("op", "gates"), [("LSTM", "iofc"), ("GRU", "zrh"), ("RNN", "h")])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_nodes(tmp_path, op, gates, directions):
    count, hidden, inputs = len(gates), 4, 3
    arrays = {
        "onnx::W_1": values(directions, count * hidden, inputs),
        "onnx::R_2": values(directions, count * hidden, hidden),
        "onnx::B_3": values(directions, 2 * count * hidden),
    }
    node = helper.make_node(op, ["x", *arrays], ["y"], name=f"/encoder/rnn/{op}", hidden_size=hidden)
    checkpoint, layers = by_name(write(tmp_path / "m.onnx", [node], arrays))
    last = "" if directions == 1 else "[backward]"
    inner, feedback = layers["encoder.rnn.weight_ih" + last], layers["encoder.rnn.weight_hh" + last]
    assert (inner.kind, inner.rows, inner.cols, inner.gates) == ("recurrent", count * hidden, inputs, count)
    assert (feedback.feedback, feedback.rows, feedback.cols, feedback.gates) == (True, hidden, hidden, count)
    assert layers["encoder.rnn.bias"].reason == "bias"
    matrices = feedback.matrices(checkpoint)
    assert [label for label, _ in matrices] == list(gates)
    assert np.array_equal(matrices[-1][1], arrays["onnx::R_2"][-1, -hidden:])


def test_numbered_weights_are_named_after_their_node(tmp_path):
    arrays = {"onnx::MatMul_7": values(3, 5), "onnx::MatMul_8": values(5, 5), "kept.weight": values(5, 2)}
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["1"], name="/layer.0/dense/MatMul"),
        helper.make_node("MatMul", ["1", "onnx::MatMul_8"], ["2"], name="/layer.0/dense/MatMul_1"),
        helper.make_node("MatMul", ["2", "kept.weight"], ["3"], name="/layer.1/MatMul"),
    ]
    _, layers = by_name(write(tmp_path / "m.onnx", nodes, arrays))
    assert list(layers) == ["layer.0.dense", "layer.0.dense_2", "kept"]


def test_constants_and_branches_hold_weights_too(tmp_path):
    branches = {}
    for branch in ("then", "else"):
        weight = numpy_helper.from_array(values(3, 5), "w")
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        branches[f"{branch}_branch"] = helper.make_graph([node], branch, [], [output], [weight])
    constant = numpy_helper.from_array(values(5, 2), "value")
    nodes = [
        helper.make_node("If", ["flag"], ["y"], name="choose", **branches),
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("MatMul", ["y", "c"], ["z"]),
        helper.make_node("Constant", [], ["axis"], value=numpy_helper.from_array(np.array([1]))),
    ]
    checkpoint, layers = by_name(write(tmp_path / "m.onnx", nodes, {}))
    shapes = {name: (layer.kind, layer.rows, layer.cols) for name, layer in layers.items()}
    assert shapes == {
        "choose.else_branch.w": ("linear", 5, 3),
        "choose.then_branch.w": ("linear", 5, 3),
        "c": ("linear", 2, 5),
    }
    assert np.array_equal(checkpoint.read("c"), numpy_helper.to_array(constant).T)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed fields"])
@pytest.mark.parametrize(
    "dtype",
    ["FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT64", "INT8", "UINT32", "BOOL"],
)
def test_data_types(tmp_path, dtype, raw):
    kind = getattr(TensorProto, dtype)
    numbers = (RANDOM.random((3, 4)) * 9).astype(helper.tensor_dtype_to_np_dtype(kind))
    made = numpy_helper.from_array(numbers, "w") if raw else helper.make_tensor("w", kind, (3, 4), numbers.ravel())
    checkpoint = open_checkpoint(write(tmp_path / "m.onnx", [], {"w": made}))
    read = checkpoint.read("w")
    got = read.astype(np.float64) if isinstance(read, np.ndarray) else read.double().numpy()
    assert np.array_equal(got, numbers.astype(np.float64))


def test_typed_fields_need_the_package_and_say_so(tmp_path, monkeypatch):
    made = helper.make_tensor("w", TensorProto.INT64, (2,), [1, 2])
    path = write(tmp_path / "m.onnx", [], {"w": made, "v": values(2, 2)})
    monkeypatch.setitem(sys.modules, "onnx", None)
    checkpoint = open_checkpoint(path)
    assert checkpoint.read("v").shape == (2, 2)
    with pytest.raises(CheckpointError, match=r"pip install 'crystallite\[onnx\]'"):
        checkpoint.read("w")


def external(tmp_path, **place):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 5], data_location=TensorProto.EXTERNAL)
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return write(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": tensor})


def test_external_data_is_mapped(tmp_path):
    numbers = values(3, 5)
    (tmp_path / "m.data").write_bytes(bytes(64) + numbers.tobytes())
    checkpoint = open_checkpoint(external(tmp_path, location="m.data", offset=64, length=60))
    assert np.array_equal(checkpoint.read("w"), numbers.T)
    assert isinstance(checkpoint.read("w").base, np.memmap)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"location": "../secret"}, "a file in the same folder"),
        ({"location": "/etc/passwd"}, "a file in the same folder"),
        ({"location": ""}, "a file in the same folder"),
        ({}, "a file in the same folder"),
        ({"location": "link"}, "a link that leaves it"),
        ({"location": "missing"}, "No such file"),
        ({"location": "data", "offset": 1 << 60}, "truncated or corrupt"),
        ({"location": "data", "offset": -4}, "whole numbers"),
        ({"location": "data", "offset": "9" * 5000}, "whole numbers"),
        ({"location": "data", "length": 4}, "60 bytes of external data"),
    ],
)
def test_external_data_stays_in_its_folder_and_size(tmp_path, place, message):
    (tmp_path / "secret").write_bytes(bytes(60))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(60))
    (folder / "link").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(external(folder, **place))


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_models_are_refused(tmp_path, case):
    content, said = HOSTILE[case]
    (tmp_path / "w.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(tmp_path / "w.onnx")
    assert "w.onnx: expected" in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    path = write(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": values(4, 4)})
    content = path.read_bytes()
    end = content.index(b"w", content.index(b"MatMul") + 8)
    for size in range(1, end + 20):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def with_location(path, *locations, extra=b""):
    """A tensor of encoded integers whose external data is another file, and `data_location` said on the wire."""
    tensor = TensorProto(name="w", data_type=TensorProto.INT32, dims=[2, 2], int32_data=[1, 2, 3, 4])
    tensor.external_data.add(key="location", value="secret")
    said = b"".join(b"\x70" + varint(value) for value in locations) + extra
    content = tensor.SerializeToString() + said
    graph = b"\x2a" + varint(len(content)) + content
    path.write_bytes(b"\x3a" + varint(len(graph)) + graph)
    return path


def varint(number):
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def test_no_library_reads_external_data(tmp_path, monkeypatch):
    """However it is said that numbers lie elsewhere: they are read by us, inside the folder, or not at all."""
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.chdir(tmp_path)  # where onnx would look
    (tmp_path / "secret").write_bytes(np.arange(70, 74, dtype=np.int32).tobytes())
    read = []
    monkeypatch.setattr("onnx.numpy_helper.load_external_data_for_tensor", lambda *_: read.append(1), raising=False)
    monkeypatch.setattr("onnx.external_data_helper.load_external_data_for_tensor", lambda *_: read.append(1))
    assert np.array_equal(open_checkpoint(with_location(model / "a.onnx", 0)).read("w"), [[1, 2], [3, 4]])
    for number, locations in enumerate([[1], [(1 << 32) + 1], [(5 << 32) + 1], [1, 7], [1, (1 << 32) + 7]]):
        path = with_location(model / f"{number}.onnx", *locations)
        assert _protobuf_says_external(path), locations
        with pytest.raises(CheckpointError, match="No such file"):  # it does not lie in the model's folder
            open_checkpoint(path)
    path = with_location(model / "b.onnx", 1, extra=b"\x72\x01\x00")  # the same field as bytes, which nobody counts
    assert _protobuf_says_external(path)
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(path)
    assert not read


def test_what_is_decoded_by_the_package_names_no_file(tmp_path, monkeypatch):
    """Even if this reader and protobuf disagreed on where numbers lie."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(np.arange(70, 74, dtype=np.int32).tobytes())
    path = with_location(tmp_path / "m.onnx", 1)
    monkeypatch.setattr(onnx_file, "_external", lambda file, tensor, nbytes: (file, None))
    assert np.array_equal(open_checkpoint(path).read("w"), [[1, 2], [3, 4]])


def _protobuf_says_external(path):
    return onnx.load(path, load_external_data=False).graph.initializer[0].data_location == TensorProto.EXTERNAL


def test_data_types_are_compared_as_protobuf_keeps_them(tmp_path):
    content = TensorProto(name="w", dims=[2], raw_data=bytes(8)).SerializeToString() + b"\x10" + varint((1 << 32) + 1)
    graph = b"\x2a" + varint(len(content)) + content
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + varint(len(graph)) + graph)
    assert onnx.load(tmp_path / "m.onnx").graph.initializer[0].data_type == TensorProto.FLOAT
    assert open_checkpoint(tmp_path / "m.onnx").tensors["w"].dtype == "float32"


def nested(depth, name, weights):
    """Graphs in each other, with weights in the innermost."""
    arrays = [numpy_helper.from_array(np.zeros(2, np.float32), f"w{i}") for i in range(weights)]
    graph = helper.make_graph([], "g", [], [], arrays)
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["y"], name=name, then_branch=graph)
        graph = helper.make_graph([node], "g", [], [])
    return helper.make_model(graph).SerializeToString()


def test_names_do_not_grow_with_the_graphs_around_them(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(nested(12, "n" * 20, 10))
    assert len(open_checkpoint(path).tensors) == 10
    path.write_bytes(nested(12, "n" * 4000, 10))
    with pytest.raises(CheckpointError, match="names of at most 4096 characters"):
        open_checkpoint(path)
    path.write_bytes(nested(12, "n" * 300, 5000))  # 250 kB that would become 19 MB of names
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="names of at most 4096 characters"):
        open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def test_field_numbers_beyond_protobufs_are_refused(tmp_path):
    content = varint((1 << 35) | 0x3A) + b"\x00"
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match="an impossible field"):
        open_checkpoint(tmp_path / "m.onnx")
