"""ONNX files that compute what the model does, in any batch size; 8-bit ones nearly; none that do not."""

import copy
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.data.batch import batches
from crystallite.export.comparison import InRuntime
from crystallite.export.run import export
from tests.helpers import compressible as networks
from tests.helpers.tolerance import assert_close

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")


def samples(width=32, count=600, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def outputs(file, **inputs):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})


@pytest.fixture(scope="module")
def fitted():
    model = networks.mlp(32, 256, 256, 8).eval()
    return model, cx.compress(model, budget=0.5, calibration=samples())


def test_a_fitted_model_runs_in_onnxruntime_in_any_batch_size(fitted, tmp_path):
    _, small = fitted
    done = export(small, tmp_path / "deep" / "small.onnx", [samples(count=9)])
    assert done.samples == 9
    assert done.deviation < 1e-5
    assert os.listdir(tmp_path / "deep") == ["small.onnx"]
    for count in (1, 2, 33):
        x = samples(count=count, seed=count)
        assert_close(torch.from_numpy(outputs(done.path, input=x)[0]), small(x).detach())


def test_blocks_are_exported_too(tmp_path):
    small = cx.compress(networks.mlp(32, 64, 8), blocks=2, calibration=samples())
    done = export(small, tmp_path / "blocks.onnx", samples(count=9))
    x = samples(count=4, seed=1)
    assert_close(torch.from_numpy(outputs(done.path, input=x)[0]), small.eval()(x).detach())


class PostNorm(nn.Module):
    """Layers whose sums are normed, as in BERT."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))

    def forward(self, input):
        x = input
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x).relu())
        return x


@pytest.mark.parametrize("int8", [False, True])
def test_sums_and_norms_stay_apart(tmp_path, int8):
    torch.manual_seed(0)
    model = PostNorm().eval()
    file = export(model, tmp_path / "a.onnx", samples(count=9), int8=int8).path
    options, optimised = onnxruntime.SessionOptions(), tmp_path / "as-it-runs.onnx"
    options.optimized_model_filepath = str(optimised)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(optimised).graph.node]
    assert kinds.count("LayerNormalization") == 2  # the slow SkipLayerNormalization has not taken their place
    assert kinds.count("Sum") == 2
    if not int8:
        assert_close(torch.from_numpy(outputs(file, input=samples(count=4))[0]), model(samples(count=4)).detach())


@pytest.mark.parametrize("kind", [{"int8": True}, {"type": "q8_0"}])
def test_what_is_not_rounded_is_said(fitted, kind, tmp_path):
    torch.manual_seed(0)
    ends = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.Linear(64, 4))
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), *ends).eval()
    convolutions = 9 * (32 + 32 * 32)
    share = convolutions / (convolutions + 32 * 64 + 64 * 4)
    done = export(model, tmp_path / "conv.onnx", torch.randn(9, 1, 8, 8), **kind)
    assert f"{share:.0%} of the weights stay in floating point" in str(done)
    _, small = fitted
    assert "stay in" not in str(export(small, tmp_path / "linear.onnx", samples(count=9), **kind))


def test_maps_agree_where_their_classes_do(tmp_path):
    torch.manual_seed(0)
    model, other = (nn.Conv2d(1, 3, 3, padding=1).eval() for _ in range(2))
    x = torch.randn(9, 1, 5, 4)
    done = export(model, tmp_path / "map.onnx", x)
    assert done.agreement == 1
    _, agreement = InRuntime(onnxruntime, tmp_path / "map.onnx", model).compare(batches(x), other)
    assert agreement == pytest.approx(float((model(x).argmax(1) == other(x).argmax(1)).double().mean()))


def test_eight_bits_are_smaller_and_near(fitted, tmp_path):
    _, small = fitted
    plain, int8 = (export(small, tmp_path / f"{n}.onnx", samples(count=99), int8=n == "int8") for n in ("a", "int8"))
    assert int8.bytes < 0.5 * plain.bytes
    assert 0 < int8.deviation < 0.1
    assert int8.agreement > 0.8
    x = samples(count=5, seed=1)
    found = torch.from_numpy(outputs(int8.path, input=x)[0])
    assert (found - small(x)).norm() < 0.1 * small(x).norm()
    import onnx

    weights = [w for w in onnx.load(int8.path).graph.initializer if w.data_type == onnx.TensorProto.INT8 and w.dims]
    scales = [w for w in onnx.load(int8.path).graph.initializer if w.name.endswith("_scale")]
    layers = [layer for layer in small.modules() if isinstance(layer, nn.Linear)]
    assert len([w for w in weights if len(w.dims) == 2]) == len(layers)
    assert sorted(w.dims[0] for w in scales) == sorted(layer.out_features for layer in layers)


def test_a_file_that_is_too_far_away_is_not_written(fitted, tmp_path):
    with pytest.raises(cx.InvalidOption, match=r"its outputs deviate by .*; raise max_deviation"):
        export(fitted[1], tmp_path / "small.onnx", samples(count=9), int8=True, max_deviation=1e-9)
    assert os.listdir(tmp_path) == []


class Chooses(nn.Module):
    """Depends on its input in a way that no graph can hold."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [(Chooses(), "a.onnx", "Chooses cannot be written as ONNX"), (nn.Linear(32, 2), "a.pt", "ends in .onnx")],
)
def test_what_cannot_be_exported_is_refused(model, name, message, tmp_path):
    with pytest.raises(cx.InvalidOption, match=message):
        export(model, tmp_path / name, samples(count=9))
    assert os.listdir(tmp_path) == []


class Loud(nn.Module):
    """Returns noise where a mask says so."""

    def __init__(self, masked):
        super().__init__()
        self.layer, self.masked = nn.Linear(32, 8), masked

    def forward(self, x, attention_mask):
        loud = (attention_mask == (0 if self.masked else 1)).unsqueeze(-1)
        return self.layer(x) + loud * torch.rand(*x.shape[:2], 8)


def test_padding_is_not_compared(tmp_path):
    batch = {
        "x": torch.randn(3, 5, 32),
        "attention_mask": torch.ones(3, 5, dtype=torch.long),
    }  # some is masked on trial
    done = export(Loud(masked=True), tmp_path / "a.onnx", [batch])
    assert done.deviation < 1e-5
    assert done.samples == 3
    with pytest.raises(cx.InvalidOption, match="its outputs deviate by"):
        export(Loud(masked=False), tmp_path / "b.onnx", [batch])


def test_data_that_are_no_numbers_are_named_as_the_reason(fitted, tmp_path):
    x = samples(count=9)
    x[3, 4] = torch.nan
    with pytest.raises(cx.InvalidOption, match=r"a\.onnx: not written: outputs hold NaN or infinity.*check the data"):
        export(fitted[1], tmp_path / "a.onnx", x)
    assert os.listdir(tmp_path) == []


class Continues(nn.Module):
    """Takes a state, and returns one; texts could be generated with it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x, state):
        y = self.layer(x) + state["last"]
        return {"logits": y, "states": (y.tanh(), [y.sum(-1)])}

    def can_generate(self):
        return True


def test_parts_of_arguments_and_results_have_names(tmp_path):
    model, batch = Continues(), {"x": torch.randn(3, 5, 32), "state": {"last": torch.randn(3, 5, 8)}}
    done = export(model, tmp_path / "a.onnx", [batch])
    assert list(done.inputs) == ["x", "state.last"]
    assert done.outputs == ("logits", "states.0", "states.1.0")
    assert done.notes == ()
    with_int8 = export(model, tmp_path / "b.onnx", [batch], int8=True)
    assert "models that generate text" in str(with_int8)


def test_half_precision_becomes_single_and_says_so(tmp_path):
    model, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(), samples(count=9)
    done = export(model, tmp_path / "a.onnx", x.bfloat16())
    assert "computes in float32: the weights were torch.bfloat16" in str(done)
    assert model[0].weight.dtype == torch.bfloat16
    assert_close(torch.from_numpy(outputs(done.path, input=x)[0]), copy.deepcopy(model).float()(x).detach())


class Complains(nn.Module):
    def forward(self, x):
        if torch.compiler.is_exporting():
            try:
                raise ZeroDivisionError("no graph of this")
            except ZeroDivisionError as error:
                raise RuntimeError("something went wrong") from error
        return x


def test_the_first_cause_is_told(tmp_path):
    with pytest.raises(cx.InvalidOption, match="Complains cannot be written as ONNX: ZeroDivisionError: no graph of"):
        export(Complains(), tmp_path / "a.onnx", samples(count=9))


def test_a_batch_without_an_input_is_refused_by_name(tmp_path):
    class Adds(nn.Module):
        def forward(self, x, y=None):
            return x if y is None else x + y

    with pytest.raises(cx.InvalidOption, match="the batch at sample 2 lacks y"):
        export(Adds(), tmp_path / "a.onnx", [{"x": torch.ones(2, 3), "y": torch.ones(2, 3)}, {"x": torch.ones(2, 3)}])


@pytest.mark.parametrize("sides", [(8, 8), (8, 12)])
def test_sizes_of_pictures_are_free_where_batches_differ_in_them(tmp_path, sides):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    done = export(model, tmp_path / "a.onnx", [torch.randn(2, 3, side, 8) for side in sides])
    assert done.inputs == {"input": ("batch_size", 3, 8 if sides == (8, 8) else "input_axis_2", 8)}
    assert bool(done.notes) == (sides == (8, 8))


def test_modes_are_kept_and_dropout_is_off(tmp_path):
    model = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)).train()
    done = export(model, tmp_path / "a.onnx", samples(count=9))
    assert model.training
    assert done.deviation < 1e-5


@pytest.mark.slow
def test_a_transformer_takes_texts_of_any_length(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()

    def texts(count, length):
        mask = torch.ones(count, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        return {"input_ids": torch.randint(1, 60, (count, length)) * mask, "attention_mask": mask}

    small = cx.compress(model, budget=0.6, calibration=[texts(20, 10) for _ in range(8)])
    for int8, most in ((False, 1e-3), (True, 0.1)):
        done = export(small, tmp_path / f"{int8}.onnx", [texts(4, 10), texts(3, 17)], int8=int8)
        fresh = texts(5, 6)
        with torch.no_grad():
            expected = small(**fresh).last_hidden_state
        found = torch.from_numpy(outputs(done.path, **fresh)[0])
        assert (found - expected).norm() < most * expected.norm()


def test_the_command_exports_what_was_saved(fitted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cx.save(fitted[1], "small")
    np.savez("inputs.npz", inputs=samples(count=40).numpy())
    assert main(["export", "small", "a.onnx", "--data", "inputs.npz"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "on 40 samples in ONNX Runtime" in captured.out
    assert main(["export", "small", "b.onnx", "--data", "inputs.npz", "--int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "int8"
    x = samples(count=3, seed=1)
    assert_close(torch.from_numpy(outputs("a.onnx", input=x)[0]), fitted[1](x).detach())
    assert main(["export", "small", "a.onnx", "--data", "inputs.npz"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", "small", "c.onnx", "--data", "inputs.npz", "--past"]) == 2
    assert "--past takes decoders and batches of input_ids" in capsys.readouterr().err
    save_file({"inputs": torch.ones(4, 3)}, "wrong.safetensors")
    assert main(["export", "small", "c.onnx", "--data", "wrong.safetensors"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not os.path.exists("c.onnx")


def products(file):
    import onnx

    kinds = [node.op_type for node in onnx.load(file).graph.node]
    assert not {"MatMul", "Gemm"} & set(kinds)
    return kinds.count("MatMulInteger")


def test_blocks_are_quantised_too(tmp_path):
    """As they are where neurons stand in their order; as one product where moving them would take longer."""
    halves = [(np.arange(half, half + 32), np.arange(half, half + 32)) for half in (0, 32)]
    apart = [(rows[::-1].copy(), columns) for (rows, _), (_, columns) in zip(halves, halves[::-1], strict=True)]
    for blocks, expected in ((halves, 2), (apart, 1)):
        torch.manual_seed(0)
        model = nn.Sequential(cx.BlockLinear.from_blocks(torch.randn(64, 64), torch.randn(64), blocks))
        done = export(model, tmp_path / f"{expected}.onnx", samples(count=9, width=64), int8=True)
        assert 0 < done.deviation < 0.1
        assert products(done.path) == expected


def test_rows_of_tables_have_scales_of_their_own(tmp_path):
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 4)
            with torch.no_grad():
                self.table.weight[0] *= 1000  # one scale for all would leave nothing of the others
                self.table.weight[1] = 0

        def forward(self, tokens):
            return self.table(tokens), self.layer(self.table(tokens + 1)[:, 0])

    torch.manual_seed(0)
    model, tokens = Looked().eval(), torch.randint(2, 40, (8, 5))
    done = export(model, tmp_path / "a.onnx", [tokens], int8=True)
    tokens[0] = torch.tensor([0, 1, 2, 3, 48])
    found, _ = outputs(done.path, tokens=tokens)
    expected = model.table(tokens)
    apart = (torch.from_numpy(found) - expected).abs().amax(-1)
    assert (apart <= expected.abs().amax(-1) / 253).all()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_take_batches_and_sequences_of_any_size(kind, fitted, bidirectional, tmp_path):
    torch.manual_seed(0)
    model, x = Reader(kind, bidirectional).eval(), torch.randn(400, 7, 12)
    small = cx.compress(model, x, budget=0.5) if fitted else model
    exported = cx.export(small, tmp_path / "small.onnx", x[:16])
    assert not exported.notes
    assert exported.inputs["rows"] == ("batch_size", "rows_axis_1", 12)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    for shape in ((1, 7, 12), (3, 7, 12), (3, 11, 12), (2, 1, 12)):
        rows = torch.randn(shape)
        (found,) = session.run(None, {"rows": rows.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), small(rows), rtol=1e-4, atol=1e-5)


def test_a_length_that_a_graph_fixes_is_said(tmp_path):
    """ONNX Runtime gets the steps of an `nn.RNN` one by one."""
    exported = cx.export(Reader(nn.RNN, False).eval(), tmp_path / "small.onnx", torch.randn(16, 7, 12))
    assert exported.inputs["rows"] == ("batch_size", 7, 12)
    (note,) = exported.notes
    assert "batch_size, 7, 12, while the model takes sequences of any length" in note


class Reader(nn.Module):
    def __init__(self, kind, bidirectional):
        super().__init__()
        self.layer = kind(12, 24, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(24 * (1 + bidirectional), 5)

    def forward(self, rows):
        return self.head(self.layer(rows)[0].mean(1))
