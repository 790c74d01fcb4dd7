"""Attention with its projections as layers: what nn.MultiheadAttention is, before, after, undone, saved and loaded."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.core.errors import CheckpointError, CrystalliteError, InvalidMatrix, InvalidOption
from crystallite.export.run import export
from crystallite.models.composites import collapse_, expand_
from crystallite.models.description import build, describe
from crystallite.models.layers import find_units
from crystallite.operators.attention import ExpandedAttention
from tests.helpers.block_models import assert_same_state, block_linear
from tests.helpers.tolerance import assert_close


def attention(embed=8, heads=2, seed=0, **options):
    torch.manual_seed(seed)
    made = nn.MultiheadAttention(embed, heads, **options)
    for name, parameter in made.named_parameters():  # PyTorch begins with biases of zero
        if "bias" in name:
            nn.init.normal_(parameter)
    return made


def masks(draw, batch, heads, queries, keys, dtype):
    """(key_padding_mask, attn_mask), of one kind; everybody may look at the first key."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def mask(*shape):
        hidden = torch.rand(shape, generator=rng) < 0.4
        hidden[..., 0] = False
        return hidden if kind == "bool" else torch.randn(shape, generator=rng).to(dtype).masked_fill(hidden, -torch.inf)

    kind = draw(st.sampled_from(["bool", "float"]))
    padding = draw(st.sampled_from([None, "padding"]))
    form = draw(st.sampled_from([None, "one", "each"]))
    count = batch or 1
    shape = {None: None, "one": (queries, keys), "each": (count * heads, queries, keys)}[form]
    padded = (keys,) if batch is None else (batch, keys)
    return mask(*padded) if padding else None, mask(*shape) if shape else None


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_it_computes_what_pytorchs_module_computes(data):
    draw = data.draw
    heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    kdim, vdim = (draw(st.sampled_from([None, 3, 7])) for _ in range(2))
    batch_first, bias = draw(st.booleans()), draw(st.booleans())
    dense = attention(heads * head_dim, heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first, dtype=dtype)
    dense = dense.train(draw(st.booleans()))  # there is no dropout; PyTorch's fused kernel runs in evaluation only
    own = ExpandedAttention.from_dense(dense)
    batch, queries, keys = draw(st.sampled_from([None, 1, 3])), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    itself = kdim is vdim is None and draw(st.booleans())
    keys = queries if itself else keys

    def values(length, features):
        shape = (length, features) if batch is None else (batch, length, features)
        made = torch.randn(shape, dtype=dtype)
        return made if batch is None or batch_first else made.transpose(0, 1)

    query = values(queries, heads * head_dim)
    key, value = (query if itself else values(keys, size or heads * head_dim) for size in (kdim, vdim))
    padding, mask = masks(draw, batch, heads, queries, keys, dtype)
    options = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    with torch.set_grad_enabled(draw(st.booleans())):
        expected = dense(query, key, value, key_padding_mask=padding, attn_mask=mask, **options)
        found = own(query, key, value, key_padding_mask=padding, attn_mask=mask, **options)
    assert_close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        assert_close(found[1], expected[1])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_causal_masks(need_weights, padded):
    dense = attention(batch_first=True)
    x, mask = torch.randn(3, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(3, 5).masked_fill(torch.arange(5) > 2, -torch.inf) if padded else None
    named = {"attn_mask": mask, "is_causal": True, "key_padding_mask": padding, "need_weights": need_weights}
    own = ExpandedAttention.from_dense(dense)
    assert_close(own(x, x, x, **named)[0], dense(x, x, x, **named)[0])
    with pytest.raises(InvalidOption, match="attn_mask"):
        own(x, x, x, is_causal=True)


def test_dropout_falls_on_the_weights_in_training_only():
    dense = attention(dropout=0.5)
    own, x = ExpandedAttention.from_dense(dense), torch.randn(6, 4, 8)
    torch.manual_seed(1)
    expected = dense(x, x, x)
    torch.manual_seed(1)
    found = own(x, x, x)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert (own(x, x, x, need_weights=False)[0] != own.eval()(x, x, x, need_weights=False)[0]).any()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"attn_mask": torch.zeros(4, 4)}, "attn_mask"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.long)}, "attn_mask"),
        ({"key_padding_mask": torch.zeros(2, 5)}, "key_padding_mask"),
        ({"key": torch.zeros(5, 8)}, "query, key and value"),
        ({"query": torch.nested.nested_tensor([torch.zeros(2, 8)], layout=torch.jagged)}, "nested"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, what):
    x = torch.zeros(3, 5, 8)
    with pytest.raises(InvalidMatrix, match=what):
        ExpandedAttention.from_dense(attention(batch_first=True))(**{"query": x, "key": x, "value": x} | arguments)


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}, {"bias": False}, {"batch_first": True}], ids=str)
def test_it_is_undone_bit_for_bit_and_says_what_pytorchs_module_says(options):
    dense = attention(**options, dropout=0.1).eval()
    dense.out_proj.requires_grad_(False)
    own = ExpandedAttention.from_dense(dense)
    names = ["embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "_qkv_same_embed_dim"]
    assert {name: getattr(own, name) for name in names} == {name: getattr(dense, name) for name in names}
    for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
        expected, found = getattr(dense, name), getattr(own, name)
        assert (found is None) == (expected is None), name
        assert expected is None or torch.equal(found, expected)
    assert torch.equal(own.out_proj.weight, dense.out_proj.weight)
    again = own.to_dense()
    assert type(again) is nn.MultiheadAttention
    assert_same_state(again, dense)
    for name, parameter in dense.named_parameters():
        assert again.get_parameter(name).requires_grad == parameter.requires_grad
    assert not again.training
    assert not describe(dense)  # only what became of it is described


def test_a_projection_that_has_changed_keeps_it_expanded():
    own = ExpandedAttention.from_dense(attention())
    own.v = cx.BlockLinear.from_dense(own.v.weight.detach(), own.v.bias, cx.decompose(own.v.weight))
    assert own.to_dense() is None
    assert isinstance(collapse_(nn.Sequential(own))[0], ExpandedAttention)


class Own(nn.MultiheadAttention):
    pass


def parametrized():
    made = attention()
    nn.utils.parametrizations.orthogonal(made.out_proj)
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: attention(add_bias_kv=True), "add_bias_kv"),
        (lambda: attention(add_zero_attn=True), "add_zero_attn"),
        (lambda: Own(8, 2), "code of its own"),
        (parametrized, "computed from others"),
    ],
)
def test_what_cannot_be_expanded_is_left_alone_with_its_reason(made, reason):
    model = nn.ModuleDict({"attention": made()})
    (unit,) = find_units(expand_(copy.deepcopy(model)), ["*"], [])
    assert reason in unit.reason
    assert unit.macs >= 4 * 8 * 8
    with pytest.raises(InvalidOption, match="expanded"):
        ExpandedAttention.from_dense(model["attention"])


def test_tied_and_hooked_ones_are_left_alone():
    tied = nn.ModuleDict({"a": attention(), "b": attention()})
    tied["b"].in_proj_weight = tied["a"].in_proj_weight
    hooked = nn.ModuleDict({"a": attention()})
    hooked["a"].out_proj.register_forward_hook(lambda *_: None)
    for model, reason in ((tied, "tied"), (hooked, "hooks")):
        assert all(reason in unit.reason for unit in find_units(model, ["*"], []))
        assert not any(isinstance(m, ExpandedAttention) for m in expand_(model).modules())


def planted(layer):
    """An encoder layer whose attention falls into blocks."""
    with torch.no_grad():
        for part, weight in enumerate(layer.self_attn.in_proj_weight.chunk(3)):
            weight.copy_(block_linear(16, 16, 4, part).weight)
        layer.self_attn.out_proj.weight.copy_(block_linear(16, 16, 4, 9).weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of the original
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("fold", [True, False])
def test_exact_before_after_undone_and_reloaded(tmp_path, batch_first, fold):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    for each in model.layers:
        planted(each)
    small = cx.reorganize(model, level=None, only_if_faster=False, fold=fold)
    assert isinstance(small.layers[1].self_attn.q, cx.BlockLinear)
    became = {c.name: c.operators[0].blocks for c in cx.summary(small).changes}
    assert [became[f"layers.0.self_attn.{part}"] for part in ("q", "k", "v", "out")] == [4] * 4
    x = torch.randn(3, 5, 16)
    padding = torch.arange(5)[None] > torch.tensor([[4], [2], [3]])
    padding = padding if batch_first else torch.arange(3)[None] > torch.tensor([[2]] * 5)
    with torch.no_grad():
        assert_close(small(x), model(x))
        found, expected = small(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
    real = ~padding if batch_first else ~padding.T  # PyTorch's fused kernel writes zeros where padding is
    assert_close(found[real], expected[real])
    again = cx.restore(small)
    assert_same_state(again, model)
    assert type(again.layers[0].self_attn) is nn.MultiheadAttention
    assert [each.activation_relu_or_gelu for each in again.layers] == [1, 1]
    assert again.use_nested_tensor == model.use_nested_tensor
    loaded = cx.load(cx.save(small, tmp_path / "a"), into=model)
    assert torch.equal(loaded(x), small(x))
    assert_same_state(cx.restore(loaded), model)


def test_where_no_block_is_found_pytorchs_module_comes_back():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    small = cx.reorganize(model, level=None)
    assert type(small.self_attn) is nn.MultiheadAttention
    assert small.activation_relu_or_gelu == 1
    assert {c.name for c in cx.summary(small).changes} >= {"self_attn.q", "self_attn.out"}
    assert_same_state(small, model)
    assert_same_state(cx.restore(small), model)


def test_its_layers_are_annealed_against_what_pytorch_draws():
    known = cx.nulls.for_module(attention())
    inner = cx.nulls.for_module(ExpandedAttention.from_dense(attention()))
    assert {inner[f"{part}.weight"] for part in "qkv"} == {known["in_proj_weight"]}
    assert inner["out.weight"] == known["out_proj.weight"]
    apart = attention(kdim=3, vdim=5)
    known, inner = (cx.nulls.for_module(m) for m in (apart, ExpandedAttention.from_dense(apart)))
    assert [inner[f"{part}.weight"] for part in "qkv"] == [known[f"{part}_proj_weight"] for part in "qkv"]


def test_who_names_the_attention_means_its_layers():
    model = expand_(nn.TransformerEncoderLayer(8, 2, 16))
    assert [u.name for u in find_units(model, ["self_attn"], [])] == [f"self_attn.{p}" for p in ("q", "k", "v", "out")]
    assert [u.name for u in find_units(model, ["*"], ["*attn"])] == ["linear1", "linear2"]
    assert [u.name for u in find_units(model, ["self_attn.q"], [])] == ["self_attn.q"]
    with pytest.raises(InvalidOption, match=r"self_attn\.q"):
        find_units(model, ["self_attn.qq"], [])


class Pooled(nn.Module):
    """Attention that a model of the user's calls itself, for its weights too."""

    def __init__(self):
        super().__init__()
        self.attention = attention(16, 2, kdim=8, vdim=12, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, query, memory, more):
        found, weights = self.attention(query, memory, more)
        return self.head(query + found), weights


MODELS = {
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        lambda: (torch.randn(120, 5, 16),),
    ),
    "transformer": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        lambda: {"src": torch.randn(120, 6, 16), "tgt": torch.randn(120, 4, 16)},
    ),
    "own": (
        Pooled,
        lambda: {
            "query": torch.randn(120, 3, 16), "memory": torch.randn(120, 6, 8), "more": torch.randn(120, 6, 12),
        },
    ),
}  # fmt: skip


def call(model, inputs):
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("asked", [{"budget": 0.5}, {"blocks": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_compressed_saved_and_reloaded(tmp_path, name, asked):
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model, data = make().eval(), draw()
    small = cx.compress(model, data if isinstance(data, dict) else data[0], **asked)
    inside = {name: module for name, module in small.named_modules() if isinstance(module, ExpandedAttention)}
    assert inside
    changes = {change.name: change for change in cx.summary(small).changes}
    for path in inside:
        assert {f"{path}.{part}" for part in ("q", "k", "v", "out")} <= changes.keys()
    before, after = cx.summary(small).macs
    assert 0.4 * before < after <= 0.5 * before
    loaded = cx.load(cx.save(small, tmp_path / "a"), into=model)
    for found, expected in zip(call(loaded, data), call(small, data), strict=True):
        assert torch.equal(found, expected)
    before, after = cx.validate(model, small, [data] if isinstance(data, dict) else data[0]).macs
    assert 0.4 * before < after <= 0.5 * before


@pytest.mark.parametrize("asked", [{"budget": 0.5}, {"blocks": 2}, {"budget": 1.0}], ids=str)
def test_a_model_that_is_an_attention(asked):
    x = torch.randn(80, 5, 16)
    small = cx.compress(attention(16, 2, batch_first=True).eval(), dict.fromkeys(("query", "key", "value"), x), **asked)
    whole = asked == {"budget": 1.0}
    assert isinstance(small, nn.MultiheadAttention if whole else ExpandedAttention)
    assert [change.name for change in cx.summary(small).changes] == ["q", "k", "v", "out"]


def test_an_attention_that_is_the_model_is_reorganized_and_restored():
    dense = attention(16, 2)
    with torch.no_grad():
        dense.out_proj.weight.copy_(block_linear(16, 16, 4, 1).weight)
    small = cx.reorganize(dense, level=None, only_if_faster=False)
    assert isinstance(small.out, cx.BlockLinear)
    assert_same_state(cx.restore(small), dense)


def test_cross_attention_is_counted_by_who_reads(tmp_path):
    """Queries and outputs run at the positions of the one side, keys and values at those of the other."""
    torch.manual_seed(0)
    make, draw = MODELS["own"]
    small = cx.compress(make().eval(), draw(), budget=0.5)
    counted = {c.name: c.macs_before for c in cx.summary(small).changes}
    assert counted["attention.k"] / (16 * 8) == 2 * counted["attention.q"] / (16 * 16)
    assert counted["attention.v"] / (16 * 12) == 2 * counted["attention.out"] / (16 * 16)


def test_polishing_trains_its_layers():
    torch.manual_seed(0)
    model, x = MODELS["encoder"][0]().eval(), torch.randn(80, 5, 16)
    for asked in ({"budget": 0.5}, {"blocks": 2, "targets": "*self_attn*"}):
        raw, polished = (cx.compress(model, x, **asked, polish_steps=steps) for steps in (0, 4))
        layer = next(n for n, m in raw.named_modules() if n.endswith("self_attn.out"))
        pairs = zip(raw.get_submodule(layer).parameters(), polished.get_submodule(layer).parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs)


def test_it_is_analyzed_swept_and_exported(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    planted(model)
    small, x = cx.reorganize(model, level=None, only_if_faster=False), torch.randn(4, 5, 16)
    assert {row.name for row in cx.analyze(small).rows} >= {"linear1", "linear2"}
    assert {row.name for row in cx.analyze(expand_(copy.deepcopy(model))).rows} >= {"self_attn.q", "self_attn.out"}
    annealed = cx.sweep(model, x, levels=[0.1]).points[0]
    assert {layer.name for layer in annealed.layers} >= {"self_attn.q", "self_attn.out"}
    for number, each in enumerate((model, small)):
        export(each, tmp_path / f"{number}.onnx", [x, x[:3, :4]])  # which compares what ONNX Runtime returns
        assert (tmp_path / f"{number}.onnx").exists()


def test_a_description_is_believed_in_nothing():
    own = ExpandedAttention.from_dense(attention())
    plain = describe(own)
    assert repr(build(plain, "a")) == repr(own)
    small = {"type": "Linear", "arguments": {"in_features": 8, "out_features": 6, "bias": True}}
    relu = {"type": "ReLU", "arguments": {}}
    wrong = [
        {"num_heads": 0}, {"num_heads": 3}, {"num_heads": "2"}, {"head_dim": -1}, {"dropout": 7}, {"batch_first": 1},
        {"q": small}, {"v": small}, {"k": relu}, {"out": None}, {"device": "cpu"},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(CheckpointError, match="expected"):
            build(plain | change, "a")
    with pytest.raises(CrystalliteError):
        build({name: value for name, value in plain.items() if name != "q"}, "a")
