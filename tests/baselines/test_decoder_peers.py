"""Published methods in the benchmark of decoders, as short references: each is exact on what it can represent."""

import copy

import pytest
import torch
from benchmarks import decoder_peers as peers
from benchmarks.decoder_slicegpt import sliced_width, slicegpt
from benchmarks.decoder_statistics import observe
from benchmarks.decoder_tasks import layer_weights, perplexity
from torch import nn

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, KEYS, SIZE, NEURONS, LAYERS = 32, 4, 2, 8, 40, 4


@pytest.fixture
def model():
    return decoder()


def decoder(keys=KEYS):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=WIDTH, intermediate_size=NEURONS, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=keys, head_dim=SIZE, initializer_range=0.3,
        tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2)
    return made


@pytest.fixture
def windows():
    return torch.randint(61, (16, 24), generator=torch.Generator().manual_seed(1))


def layers(model):
    return list(model.model.layers)


@torch.no_grad()
def same(small, model, windows, tolerance=1e-3):
    found, expected = (m(input_ids=windows, use_cache=False).logits for m in (small, model))
    return bool((found - expected).norm() <= tolerance * expected.norm())


def made(method, model, windows, share):
    if method == "SliceGPT":
        return slicegpt(model, windows, share)
    return peers.PEERS[method](model, observe(model, windows), share)


@pytest.mark.parametrize("method", [*peers.PEERS, "SliceGPT"])
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_every_method_keeps_the_share_and_changes_nothing_of_the_original(method, share, model, windows):
    before = copy.deepcopy(model.state_dict())
    small = made(method, model, windows, share)
    assert 0.9 * share <= layer_weights(small) / layer_weights(model) <= 1.02 * share
    assert not same(small, model, windows)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert perplexity(small, windows) > 1
    assert small.to(torch.bfloat16)(input_ids=windows, use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("method", ["Wanda neurons", "Wanda neurons, refit", "FLAP", "ShortGPT", "MoDeGPT"])
def test_the_whole_share_is_exact(method, model, windows):
    assert same(made(method, model, windows, 1.0), model, windows)


def with_a_duplicate(model):
    """A neuron twice in every layer, the second one read weakly."""
    for layer in layers(model):
        for p in (layer.mlp.gate_proj, layer.mlp.up_proj):
            p.weight.data[7] = p.weight.data[3]
        layer.mlp.down_proj.weight.data[:, 7] *= 1e-2
    return 1 - LAYERS * 3 * WIDTH / layer_weights(model)  # one neuron of every layer less


def test_a_refit_recovers_a_neuron_that_another_one_tells(model, windows, monkeypatch):
    monkeypatch.setattr(peers, "_RIDGE", 1e-5)
    share = with_a_duplicate(model)
    assert same(made("Wanda neurons, refit", model, windows, share), model, windows, 1e-4)
    assert not same(made("Wanda neurons", model, windows, share), model, windows, 5e-4)


def test_nystrom_is_exact_where_a_neuron_comes_twice(model, windows):
    share = with_a_duplicate(model)
    statistics = observe(model, windows)
    small = peers.modegpt(model, statistics, share, temperature=1e6, leverage=1e-6)
    assert small.model.layers[0].mlp.up_proj.out_features == NEURONS - 1
    assert same(small, model, windows)


def test_values_of_low_rank_and_pairs_that_are_not_compared_cost_nothing(model, windows):
    pairs = torch.tensor([0, 2, 3])  # of four: all but the second are compared
    for layer in layers(model):
        attention = layer.self_attn
        value = attention.v_proj.weight.data.view(KEYS, SIZE, WIDTH)
        value[:, 5:] = value[:, :3]  # five of eight are independent
        for p in (attention.q_proj, attention.k_proj):
            p.weight.data.view(-1, SIZE, WIDTH)[:, [1, 5]] = 0
    found = observe(model, windows)
    small = copy.deepcopy(model)
    for layer, statistics in zip(layers(small), found, strict=True):
        attention, gram = layer.self_attn, statistics.gram["attention"]
        chosen = peers._rotary_pairs(attention, gram, KEYS, 3)
        assert torch.equal(chosen, pairs.expand(KEYS, -1))
        layer.self_attn = peers.CompactAttention(
            attention, chosen, *peers._values_and_outputs(attention, gram, KEYS, 5)
        )
    assert layer_weights(small) < layer_weights(model)
    assert same(small, model, windows)


def test_whitened_svd_is_exact_on_matrices_of_low_rank(model, windows):
    for layer in layers(model):
        for name in peers._MATRICES:
            weight = layer.get_submodule(name).weight.data
            rank = int(0.5 * weight.numel() / sum(weight.shape))
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            weight.copy_(u[:, :rank] * s[:rank] @ v[:rank])
    assert same(made("SVD-LLM", model, windows, 0.5), model, windows)
    assert not same(made("SVD-LLM", model, windows, 0.3), model, windows)


def test_whitening_finds_what_the_inputs_show(model, windows):
    """Of a matrix and the inputs that it reads, no other pair of the same rank comes nearer."""
    statistics = observe(model, windows)
    small = peers.svd_llm(model, statistics, 0.5)
    weight, pair = model.model.layers[0].mlp.up_proj.weight, small.model.layers[0].mlp.up_proj
    factor = torch.linalg.cholesky(statistics[0].gram["feed_forward"])
    error = ((pair[1].weight @ pair[0].weight - weight).double() @ factor).norm()
    best = torch.linalg.svdvals(weight.double() @ factor)[pair[0].out_features :].norm()
    torch.testing.assert_close(error, best, rtol=1e-3, atol=0)


def test_a_layer_that_changes_nothing_is_dropped(model, windows):
    for p in (layers(model)[2].self_attn.o_proj, layers(model)[2].mlp.down_proj):
        p.weight.data.zero_()
    assert same(made("ShortGPT", model, windows, 0.75), model, windows)


def test_biases_keep_the_mean_of_what_is_cut(model, windows):
    small = made("FLAP", model, windows, 0.7)
    cut = [i for i, layer in enumerate(layers(small)) if layer.mlp.up_proj.out_features < NEURONS]
    assert len({layer.mlp.up_proj.out_features for layer in layers(small)}) > 1  # one ranking over all layers
    inside = {}
    for m in (model, small):
        layers(m)[cut[0]].mlp.register_forward_hook(lambda _, x, y, m=m: inside.update({m: (x[0], y)}))
        m(input_ids=windows, use_cache=False)
    x = inside[model][0]  # the same inputs for both
    means = [layers(m)[cut[0]].mlp(x).flatten(0, 1).mean(0) for m in (model, small)]
    torch.testing.assert_close(*means, rtol=1e-3, atol=1e-4)


def test_heads_of_their_own_are_ranked_with_the_neurons(windows):
    model = decoder(keys=HEADS)
    small = made("FLAP", model, windows, 0.6)
    heads = [layer.self_attn.q_proj.out_features // SIZE for layer in layers(small)]
    assert sum(heads) < LAYERS * HEADS
    assert min(heads) >= 1
    assert 0.55 <= layer_weights(small) / layer_weights(model) <= 0.6
    seen = {}
    for m in (model, small):
        layers(m)[0].self_attn.register_forward_hook(lambda _, x, y, m=m: seen.update({m: y[0]}))
        m(input_ids=windows, use_cache=False)
    means = [seen[m].flatten(0, 1).mean(0) for m in (model, small)]  # what the first layer's attention gives
    torch.testing.assert_close(*means, rtol=1e-3, atol=1e-4)


def test_slicing_nothing_is_exact(model, windows):
    assert same(slicegpt(model, windows, 1.0, width=WIDTH), model, windows)


def test_slicing_is_exact_where_the_stream_has_fewer_dimensions(model, windows):
    inside, rest = 20, slice(20, None)
    model.model.embed_tokens.weight.data[:, rest] = 0
    for layer in layers(model):
        for p in (layer.self_attn.o_proj, layer.mlp.down_proj):
            p.weight.data[rest] = 0
    small = slicegpt(model, windows, 1.0, width=inside)
    assert same(small, model, windows)
    assert layer_weights(small) < layer_weights(model)


def test_the_width_of_a_slice_counts_the_shortcuts(model, windows):
    for share in (0.9, 0.6):
        width = sliced_width(model, share)
        counts = [layer_weights(slicegpt(model, windows, 1.0, width=w)) for w in (width, width + 1)]
        assert counts[0] <= share * layer_weights(model) < counts[1]


def test_shares_of_layers_follow_their_likeness(model, windows):
    statistics = observe(model, windows)
    for share in (0.9, 0.5, 0.2):
        found = torch.tensor(peers.allotted(statistics, share, 0.05)).double()
        assert found.mean() == pytest.approx(share)
        assert found.min() >= 0.1 - 1e-9
    likeness = torch.tensor([layer.similarity for layer in statistics])
    assert torch.tensor(peers.allotted(statistics, 0.9, 0.05)).argmin() == likeness.argmax()


def test_perplexity_is_that_of_transformers(model, windows):
    with torch.no_grad():
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss
    assert perplexity(model, windows) == pytest.approx(loss.exp().item(), rel=1e-4)


def test_statistics_are_those_of_what_layers_read(model, windows):
    (found, *_), seen = observe(model, windows), []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    with torch.no_grad():
        model(input_ids=windows, use_cache=False)
    x = seen[0].flatten(0, 1).double()
    torch.testing.assert_close(found.gram["neurons"], x.T @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance("neurons"), x.var(0, correction=0), rtol=1e-3, atol=1e-5)
    assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)
