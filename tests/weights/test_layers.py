"""What tensors are: from module classes where there are any, else from names and shapes alone."""

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint, recognise
from crystallite.weights.names import Tensors, role_from_name
from crystallite.weights.stored import TensorInfo

GATES = {"LSTM": ("i", "f", "g", "o"), "GRU": ("r", "z", "n"), "RNN": ("h",)}


def both_ways(module):
    """A module recognised by its classes, and its bare state dict by names."""
    return [open_checkpoint(module), open_checkpoint(dict(module.state_dict()))]


def by_name(checkpoint):
    return {layer.name: layer for layer in recognise(checkpoint)}


def reasons(checkpoint):
    return {layer.name: layer.reason for layer in recognise(checkpoint) if layer.kind == "skipped"}


def zeros(**shapes):
    return {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", GATES)
def test_recurrent_stacks(family):
    module = getattr(nn, family)(5, 4, num_layers=2, bidirectional=True)
    for checkpoint in both_ways(module):
        layers = by_name(checkpoint)
        for suffix, inputs in (("l0", 5), ("l0_reverse", 5), ("l1", 8), ("l1_reverse", 8)):
            inner, feedback = layers[f"weight_ih_{suffix}"], layers[f"weight_hh_{suffix}"]
            gates = len(GATES[family])
            assert (inner.kind, inner.feedback, inner.rows, inner.cols) == ("recurrent", False, 4 * gates, inputs)
            assert (feedback.feedback, feedback.rows, feedback.cols, feedback.gates) == (True, 4, 4, gates)
            matrices = feedback.matrices(checkpoint)
            assert tuple(label for label, _ in matrices) == GATES[family]
            weight = getattr(module, f"weight_hh_{suffix}").detach()
            assert torch.equal(torch.cat([matrix for _, matrix in matrices]), weight)
        assert set(reasons(checkpoint).values()) == {"bias"}


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(cell):
    for checkpoint in both_ways(nn.Sequential(cell(5, 4))):
        layers = by_name(checkpoint)
        assert layers["0.weight_hh"].gate_names == GATES[cell.__name__.removesuffix("Cell")]
        assert layers["0.weight_hh"].feedback
        assert not layers["0.weight_ih"].feedback


def test_projected_lstm_has_no_square_feedback():
    for checkpoint in both_ways(nn.LSTM(5, 6, proj_size=2)):
        layers = by_name(checkpoint)
        feedback = layers["weight_hh_l0"]
        assert (feedback.kind, feedback.feedback, feedback.gates) == ("recurrent", False, 4)
        assert feedback.matrices(checkpoint)[0][1].shape == (24, 2)
        assert (layers["weight_hr_l0"].kind, layers["weight_hr_l0"].rows) == ("linear", 2)


def test_g2p_names():
    checkpoint = open_checkpoint(
        zeros(enc_emb=(29, 8), enc_w_ih=(24, 8), enc_w_hh=(24, 8), enc_b_ih=24, enc_b_hh=24, fc_w=(74, 8), fc_b=74)
    )
    kinds = {layer.name: layer.kind for layer in recognise(checkpoint) if layer.kind != "skipped"}
    expected = {"enc_emb": "embedding", "enc_w_ih": "recurrent", "enc_w_hh": "recurrent", "fc_w": "linear"}
    assert kinds == expected
    assert by_name(checkpoint)["enc_w_hh"].gate_names == ("r", "z", "n")
    assert reasons(checkpoint) == {"enc_b_ih": "bias", "enc_b_hh": "bias", "fc_b": "bias"}


@pytest.mark.parametrize(("gates", "names"), [(4, ("i", "f", "c", "o")), (3, ("z", "r", "h")), (1, ("h",))])
def test_keras_kernels_are_stored_in_out(gates, names):
    recurrent = np.arange(4 * gates * 4, dtype=np.float32).reshape(4, gates * 4)
    checkpoint = open_checkpoint(
        {
            "lstm/lstm_cell/kernel:0": np.zeros((5, gates * 4), np.float32),
            "lstm/lstm_cell/recurrent_kernel:0": recurrent,
            "lstm/lstm_cell/bias:0": np.zeros((2, gates * 4), np.float32),
            "dense/kernel:0": np.zeros((4, 3), np.float32),
        }
    )
    layers = by_name(checkpoint)
    inner = layers["lstm/lstm_cell"]
    assert (inner.kind, inner.rows, inner.cols, inner.gates) == ("recurrent", gates * 4, 5, gates)
    feedback = layers["lstm/lstm_cell/recurrent_kernel:0"]
    assert (feedback.feedback, feedback.gate_names) == (True, names)
    assert np.array_equal(feedback.matrices(checkpoint)[-1][1], recurrent.T[-4:])
    assert (layers["dense"].rows, layers["dense"].cols) == (3, 4)
    assert reasons(checkpoint) == {"lstm/lstm_cell/bias:0": "bias"}


def test_keras_convolution_is_turned():
    weight = np.arange(3 * 2 * 4 * 5, dtype=np.float32).reshape(3, 2, 4, 5)  # (height, width, in, out)
    checkpoint = open_checkpoint({"conv/kernel:0": weight})
    (layer,) = recognise(checkpoint)
    assert (layer.rows, layer.cols, layer.kernel) == (5, 24, (3, 2))
    assert np.array_equal(layer.channels(checkpoint), weight.transpose(3, 2, 0, 1))
    assert np.array_equal(layer.matrices(checkpoint)[0][1], weight.transpose(3, 2, 0, 1).reshape(5, -1))


def test_multihead_attention():
    for checkpoint in both_ways(nn.MultiheadAttention(8, 2)):
        layers = by_name(checkpoint)
        assert (layers["in_proj"].kind, layers["in_proj"].parts) == ("attention", (8, 8, 8))
        assert layers["out_proj"].kind == "linear"
    kinds = {layer.kind for layer in recognise(open_checkpoint(nn.MultiheadAttention(8, 2, kdim=4, vdim=4)))}
    assert kinds == {"linear", "skipped"}


def test_transformer_layer():
    for checkpoint in both_ways(nn.TransformerEncoderLayer(8, 2, 16)):
        kinds = {layer.name: layer.kind for layer in recognise(checkpoint) if layer.kind != "skipped"}
        assert kinds == {
            "self_attn.in_proj": "attention",
            "self_attn.out_proj": "linear",
            "linear1": "linear",
            "linear2": "linear",
        }
        skipped = reasons(checkpoint)
        assert skipped["norm1.weight"] == "norm"
        assert skipped["linear1.bias"] == "bias"


@pytest.mark.parametrize("source", ["module", "names"])
def test_convolutions(source):
    module = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), nn.Conv1d(6, 2, 5))
    checkpoint = both_ways(module)[source == "names"]
    layers = by_name(checkpoint)
    conv = layers["0"]
    assert (conv.kind, conv.rows, conv.cols, conv.kernel) == ("conv", 6, 18, (3, 3))
    assert (conv.fan_in, conv.fan_out) == torch.nn.init._calculate_fan_in_and_fan_out(module[0].weight)
    assert conv.groups == (2 if source == "module" else None)
    assert torch.equal(conv.matrices(checkpoint)[0][1], module[0].weight.detach().reshape(6, 18))
    assert conv.channels(checkpoint).shape == (6, 2, 3, 3)
    assert layers["2"].kernel == (5,)
    skipped = reasons(checkpoint)
    assert skipped["1.running_mean"] == skipped["1.num_batches_tracked"] == "buffer"
    assert skipped["1.weight"] == "norm"
    with pytest.raises(CheckpointError, match="only a convolution"):
        by_name(open_checkpoint(nn.Linear(2, 2)))["weight"].channels(checkpoint)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_gives_outputs_as_rows(groups):
    module = nn.ConvTranspose1d(4, 6, 3, groups=groups, bias=False)
    checkpoint = open_checkpoint(module)
    (layer,) = recognise(checkpoint)
    matrix = layer.channels(checkpoint)
    assert tuple(matrix.shape) == (6, 4 // groups, 3)
    assert (layer.rows, layer.cols) == (6, 4 // groups * 3)
    for out in range(6):  # one input channel at a time tells which weights an output channel uses
        group = out // (6 // groups)
        for i in range(4 // groups):
            stored = module.weight[group * (4 // groups) + i, out % (6 // groups)]
            assert torch.equal(matrix[out, i], stored.detach())


class Conv1D(nn.Module):
    """transformers' linear layer: weight stored (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.rand(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def gpt2():
    block = nn.Module()
    block.attn = nn.ModuleDict({"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)})
    block.mlp = nn.ModuleDict({"c_fc": Conv1D(32, 8), "c_proj": Conv1D(8, 32)})
    model = nn.ModuleDict({"wte": nn.Embedding(50, 8), "wpe": nn.Embedding(16, 8), "h": nn.ModuleList([block])})
    return model


def test_gpt2_weights_are_turned_by_class_name_or_bias():
    for checkpoint in both_ways(gpt2()):
        layers = by_name(checkpoint)
        shapes = {name: (layer.kind, layer.rows, layer.cols) for name, layer in layers.items() if not layer.reason}
        assert shapes == {
            "wte": ("embedding", 50, 8),
            "wpe": ("embedding", 16, 8),
            "h.0.attn.c_attn": ("attention", 24, 8),
            "h.0.attn.c_proj": ("linear", 8, 8),
            "h.0.mlp.c_fc": ("linear", 32, 8),
            "h.0.mlp.c_proj": ("linear", 8, 32),
        }
        assert layers["h.0.attn.c_attn"].parts == (8, 8, 8)
        stored = checkpoint.read("h.0.attn.c_proj.weight")  # square: only its siblings tell
        assert torch.equal(layers["h.0.attn.c_proj"].matrices(checkpoint)[0][1], stored.T)


def test_the_config_decides_for_gpt2_without_biases():
    square = TensorInfo("h.0.mlp.c_proj.weight", (8, 8), "float32", 256)
    assert role_from_name(square, Tensors(), "gpt2").layout == "in-out"
    assert role_from_name(square, Tensors(), "gpt_bigcode").layout == "out-in"


@pytest.mark.parametrize(
    ("rows", "config", "parts"),
    [
        (24, {}, (8, 8, 8)),
        (12, {}, (8, 2, 2)),
        (16, {"num_attention_heads": 4, "num_key_value_heads": 2}, (8, 4, 4)),
        (10, {}, (8, 1, 1)),
        (25, {}, (25,)),
        (24, {"num_attention_heads": "four"}, (8, 8, 8)),
    ],
)
@pytest.mark.parametrize("name", ["query_key_value", "qkv", "Wqkv", "qkv_proj", "attn_qkv"])
def test_fused_attention(rows, config, parts, name):
    checkpoint = open_checkpoint({f"h.0.attn.{name}.weight": np.zeros((rows, 8), np.float32)})
    checkpoint.config.update(config)
    (layer,) = recognise(checkpoint)
    assert (layer.kind, layer.parts) == ("attention", parts)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("transformer.wte.weight", (50, 8), "embedding"),
        ("model.embed_tokens.weight", (50, 8), "embedding"),
        ("bert.embeddings.token_type_embeddings.weight", (2, 8), "embedding"),
        ("shared.weight", (50, 8), "embedding"),
        ("vit.pos_embed", (1, 17, 8), "embedding"),
        ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8), "embedding"),
        ("patch_embed.proj.weight", (8, 3, 4, 4), "conv"),
        ("embeddings.patch_embeddings.projection.weight", (8, 3, 4, 4), "conv"),
        ("encoder.embedding_hidden_mapping_in.weight", (8, 4), "linear"),
        ("time_embedding.linear_1.weight", (8, 4), "linear"),
        ("lm_head.weight", (50, 8), "linear"),
        ("fc.weight", (1, 8), "linear"),
        ("mlp.experts.gate_up_proj", (4, 8, 16), "linear"),
        ("block.expand_conv.weight", (8, 4, 1), "conv"),
        ("final_conv.weight", (1, 8, 1), "conv"),
        ("backbone.layers.0.mixer.in_proj.weight", (40, 8), "linear"),
        ("norm_proj.weight", (8, 4), "linear"),
        ("lora_b", (8, 2), "linear"),
    ],
)
def test_kinds_by_name(name, shape, kind):
    layers = recognise(open_checkpoint({name: np.zeros(shape, np.float32)}))
    assert {layer.kind for layer in layers} == {kind}
    assert len(layers) == (shape[0] if name == "mlp.experts.gate_up_proj" else 1)  # a stack is one layer per expert


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "reason"),
    [
        ("h.0.ln_1.weight", (8,), "f4", "norm"),
        ("model.layers.0.input_layernorm.weight", (8,), "f4", "norm"),
        ("blk.0.attn_q_norm.weight", (2, 8), "f4", "norm"),
        ("LayerNorm.gamma", (8,), "f4", "norm"),
        ("fc.bias", (8,), "f4", "bias"),
        ("h.0.attn.bias", (1, 1, 8, 8), "f4", "buffer"),
        ("h.0.attn.masked_bias", (), "f4", "buffer"),
        ("rotary_emb.inv_freq", (4,), "f4", "buffer"),
        ("embeddings.position_ids", (1, 512), "i8", "position ids"),
        ("bn.num_batches_tracked", (), "i8", "buffer"),
        ("qweight", (8, 8), "i4", "integer"),
        ("fc.weight_scale", (8, 1), "f4", "scale"),
        ("conv.weight_g", (8, 1, 1), "f4", "scale"),
        ("logit_scale", (), "f4", "scalar"),
        ("layer_scale.lambda1", (8,), "f4", "1-D"),
        ("cls_token", (1, 1, 8), "f4", "1-D"),
        ("nothing.weight", (0, 8), "f4", "empty"),
        ("freqs", (4, 4), "c8", "complex64"),
        ("strange", (2,) * 6, "f4", "6-D"),
        ("labels", (3, 2), "<U4", "str128"),
    ],
)
def test_what_is_skipped_and_why(name, shape, dtype, reason):
    checkpoint = open_checkpoint({name: np.zeros(shape, dtype)})
    (layer,) = recognise(checkpoint)
    assert (layer.name, layer.kind, layer.reason) == (name, "skipped", reason)
    assert layer.matrices(checkpoint) == []


def test_modules_know_better_than_names():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Linear(4, 3)  # misleading names
            self.norm = nn.Linear(3, 3)
            self.scaled_norm = nn.RMSNorm(3)
            self.register_buffer("table", torch.zeros(5, 5))
            self.pair = nn.Bilinear(2, 2, 2, bias=False)

    checkpoint = open_checkpoint(Model())
    layers = by_name(checkpoint)
    assert (layers["embedding"].kind, layers["norm"].kind) == ("linear", "linear")
    assert reasons(checkpoint) == {
        "table": "buffer",
        "embedding.bias": "bias",
        "norm.bias": "bias",
        "scaled_norm.weight": "norm",
        "pair.weight": "bilinear",
    }


def test_tied_weights_appear_once():
    model = nn.ModuleDict({"wte": nn.Embedding(6, 4), "lm_head": nn.Linear(4, 6, bias=False)})
    model["lm_head"].weight = model["wte"].weight
    for checkpoint in both_ways(model):
        (layer,) = recognise(checkpoint)
        assert (layer.kind, layer.tensors, layer.aliases) == ("embedding", ("wte.weight",), ("lm_head.weight",))


def test_every_tensor_is_in_exactly_one_layer():
    model = nn.ModuleDict(
        {"a": gpt2(), "b": nn.LSTM(3, 4), "c": nn.TransformerDecoderLayer(8, 2), "d": nn.BatchNorm2d(3)}
    )
    for checkpoint in both_ways(model):
        layers = recognise(checkpoint)
        assert sorted(n for layer in layers for n in (*layer.tensors, *layer.aliases)) == sorted(checkpoint.tensors)
        assert len({layer.name for layer in layers}) == len(layers)
        for layer in layers:
            for _, matrix in layer.matrices(checkpoint):
                assert tuple(matrix.shape) == (layer.rows, layer.cols)


def test_names_that_would_collide_stay_whole():
    checkpoint = open_checkpoint(zeros(fc=(2, 2), fc__weight=(2, 2)))
    assert [layer.name for layer in recognise(checkpoint)] == ["fc", "fc.weight"]


def test_matrices_are_views(tmp_path):
    np.save(tmp_path / "w.npy", np.ones((4, 4), np.float32))
    checkpoint = open_checkpoint(tmp_path)
    (layer,) = recognise(checkpoint)
    assert isinstance(layer.matrices(checkpoint)[0][1], np.memmap)
