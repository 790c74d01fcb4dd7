"""Continued training ends in exact blocks, by the paper's own tests."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.annealing import nulls
from crystallite.data.batch import Batch
from crystallite.reorganization.blocks import clear_idle_
from crystallite.separation import find_chains, random_partition, upgrade
from crystallite.separation.training import ends_of
from crystallite.structure.levels import chain_labels
from tests.helpers import digits
from tests.helpers.block_models import Fused
from tests.helpers.tolerance import assert_close


@pytest.fixture(scope="module")
def trained():
    loader, x, y = digits.data()
    return digits.train(digits.network(), loader, 15).eval(), loader, x, y


@pytest.fixture(scope="module")
def upgraded(trained):
    net, loader, x, y = trained
    return upgrade(
        net, blocks=4, data=loader, loss=F.cross_entropy, metric=lambda m: digits.accuracy(m, x, y), epochs=15,
        partition="spread", ignore="4", **digits.RECIPE,
    )  # fmt: skip


def separated(small):
    """The weights of the layers that separate, with their nulls."""
    state = cx.restore(small).state_dict()
    options = cx.record(small).options
    return [(state[f"{n}.weight"], options.nulls[f"{n}.weight"]) for n in options.layers]


@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
def test_annealing_takes_nothing_away(upgraded, level):
    masks = []
    for w, null in separated(upgraded):
        masks.append(cx.anneal(w, null, level, rule="neyman").mask)
        assert torch.equal(masks[-1], w != 0)
        assert cx.decompose(masks[-1]).n_blocks == 4
    assert max(int(labels.max()) for labels in chain_labels(masks)) + 1 == 4  # and jointly


def test_the_null_is_the_initialisation(upgraded):
    assert [null.bound for _, null in separated(upgraded)] == pytest.approx([1 / 8, 96**-0.5])


def test_accuracy_is_kept(trained, upgraded):
    net, _, x, y = trained
    assert digits.accuracy(net, x, y) > 0.93
    assert digits.accuracy(upgraded, x, y) >= digits.accuracy(net, x, y) - 0.02


def test_the_result_runs_as_subnetworks(trained, upgraded):
    _, _, x, _ = trained
    chain = upgraded[0]
    assert isinstance(chain, cx.BlockChain)
    assert (chain.n_subnetworks, chain.n_shuffles) == (4, 0)
    hidden = torch.zeros(len(x), 96)
    with torch.no_grad():
        for network, inputs, outputs in chain.subnetworks():
            hidden[:, outputs] = network(x[:, inputs])
        idle, constants = chain.idle_outputs()
        hidden[:, idle] = constants
        assert_close(upgraded[1:](hidden), upgraded(x))


def test_the_record_tells_the_whole_story(trained, upgraded):
    _, _, x, y = trained
    record = cx.record(upgraded).options
    assert [epoch.epoch for epoch in record.history] == list(range(1, 16))
    assert record.history[-1].threshold == 1.0
    shares = [epoch.threshold for epoch in record.history]
    assert shares == sorted(shares)
    assert record.history[-1].metric == pytest.approx(digits.accuracy(upgraded, x, y), abs=0.01)
    assert 0.5 < record.start < record.history[-1].metric  # what least squares alone gives, long before the end
    assert record.balanced == ("2", "4")
    assert cx.record(upgraded).method == "upgraded"
    assert "4 blocks in 1 chain, 15 epochs" in str(record)


def test_the_result_can_be_saved(trained, upgraded, tmp_path):
    again = cx.load(cx.save(upgraded, tmp_path / "small"))
    assert torch.equal(again(trained[2]), upgraded(trained[2]))
    assert cx.record(again).options == cx.record(upgraded).options  # the nulls and the partition too


def test_with_the_output_layer_the_whole_network_separates(trained):
    net, loader, x, _ = trained
    small = upgrade(net, blocks=2, data=loader, loss=F.cross_entropy, epochs=4, partition="spread", **digits.RECIPE)
    networks = cx.subnetworks(small)
    assert len(networks.parts) == 2
    assert sorted(torch.cat(networks.outputs).tolist()) == list(range(10))
    with torch.no_grad():
        assert_close(networks(x), small(x))
        for part, reads, writes in zip(networks.parts, networks.inputs, networks.outputs, strict=True):
            other = x.clone()
            other[:, [i for i in range(64) if i not in reads.tolist()]] = 7.0  # what it does not read is nothing to it
            assert_close(small(other)[:, writes], part(x[:, reads]))


def test_padding_is_not_learned():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x, attention_mask):
            return self.layers(x)

    torch.manual_seed(0)
    net, x, mask = Pair(), torch.randn(16, 6, 8), torch.ones(16, 6)
    mask[:, 4:] = 0
    found = []
    for padding in (0.0, 3.0):
        data = [{"x": torch.where(mask[..., None] == 1, x, padding), "attention_mask": mask}]
        small = upgrade(net, blocks=2, data=data, epochs=3, partition="random")
        found.append(cx.restore(small).state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_without_labels_it_learns_what_the_dense_model_returns(trained):
    net, loader, x, y = trained
    images = [batch for batch, _ in loader]
    options = {"ignore": "4", "learning_rate": 5e-3, "partition": "regions"}
    one, many = (upgrade(net, blocks=2, data=images, epochs=n, **options) for n in (1, 8))
    with torch.no_grad():
        errors = [float((m(x) - net(x)).square().mean() / net(x).var()) for m in (one, many)]
    assert errors[1] < 0.15
    assert errors[1] < errors[0]
    assert digits.accuracy(many, x, y) > digits.accuracy(net, x, y) - 0.05


def test_the_same_seed_gives_the_same_bits_and_leaves_no_trace(trained):
    net, loader, *_ = trained
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    options = {"blocks": 2, "data": loader, "loss": F.cross_entropy, "epochs": 1, **digits.RECIPE}
    runs = [upgrade(net, seed=s, **options).state_dict() for s in (0, 0, 1)]
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
    assert any(runs[0][n].shape != t.shape or not torch.equal(runs[0][n], t) for n, t in runs[2].items())
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_rescaled_hidden_neurons_do_not_help_over_the_bound(trained):
    """The same function in other units is tested in the same units."""
    net, loader, *_ = trained
    scaled = copy.deepcopy(net)
    with torch.no_grad():
        scaled[0].weight.mul_(64)
        scaled[0].bias.mul_(64)
        scaled[2].weight.div_(64)
    acting = [
        cx.record(upgrade(n, blocks=2, data=loader, loss=F.cross_entropy, epochs=2, **digits.RECIPE))
        .options.history[-1]
        .acting
        for n in (net, scaled)
    ]
    assert acting[1] == pytest.approx(acting[0], abs=0.05)


class Pair(nn.Module):
    """A transformer's feed-forward pair on its residual stream."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_feed_forward_pairs_separate_inside_their_streams():
    torch.manual_seed(0)
    net = nn.Sequential(Pair(), Pair())
    data = [torch.randn(8, 10, 16) for _ in range(12)]
    planted = random_partition(find_chains(net, example=data[0]), 4)
    with torch.no_grad():  # blocks with weights well over the bound, and noise everywhere
        for name in planted.layers:
            weight = net.get_submodule(name).weight
            weight.copy_(0.1 * weight + planted.mask(name) * 4 * weight)
    small = upgrade(net, blocks=4, data=data, epochs=15, partition=planted)
    assert cx.record(small).options.chains == (("0.up", "0.down"), ("1.up", "1.down"))
    assert cx.record(small).options.balanced == ()  # GELU fixes the units itself
    weights = [w for w, _ in separated(small)]
    for pair in (weights[:2], weights[2:]):
        labels = chain_labels(pair)
        assert max(int(side.max()) for side in labels) + 1 == 4
    assert cx.record(small).options.history[-1].loss < 0.1
    assert cx.record(small).options.history[-1].acting > 0.7
    with torch.no_grad():
        assert_close(small(data[0]), cx.restore(small)(data[0]))


def test_a_given_partition_is_kept(trained):
    net, loader, *_ = trained
    partition = random_partition(find_chains(net, ignore=["4"]), 2, seed=9)
    small = upgrade(net, blocks=2, data=loader, loss=F.cross_entropy, epochs=1, partition=partition, **digits.RECIPE)
    for (w, _), name in zip(separated(small), partition.layers, strict=True):
        assert not w[~partition.mask(name)].any()
    with pytest.raises(cx.InvalidOption, match="expected 2, as the partition has, got 3"):
        upgrade(net, blocks=3, data=loader, partition=partition)


def test_gate_and_value_in_one_layer_separate_together():
    torch.manual_seed(0)
    net, x = Fused(), torch.randn(256, 16)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    small = upgrade(net, blocks=2, data=[x], epochs=3)
    with torch.no_grad():
        assert_close(small(x), cx.restore(small)(x))
    state = cx.restore(small).state_dict()
    ends = state["both.weight"][:32], state["both.weight"][32:], state["down.weight"].T  # (hidden, stream) each
    read, written = (ends[0] != 0) | (ends[1] != 0), ends[2] != 0
    assert cx.decompose(torch.cat([read, written], 1)).n_blocks == 2


def test_pairs_of_gpt2_separate_and_come_back_as_its_own_layers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=1, **sizes)).eval()
    with torch.no_grad():
        for layer in (net.transformer.h[0].mlp.c_fc, net.transformer.h[0].mlp.c_proj):
            layer.weight.mul_(10)  # as if trained: beyond what initialisation draws
    tokens = torch.randint(40, (16, 12))
    small = upgrade(net, blocks=2, data=[{"input_ids": tokens}], epochs=2)
    assert [change.name.rpartition(".")[2] for change in cx.summary(small).changes if change.blocks == 2] == [
        "c_fc", "c_proj",
    ]  # fmt: skip
    scales = [null.scale for null in cx.record(small).options.nulls.values()]
    assert scales == pytest.approx([0.02, 0.02 / 2**0.5])  # of the model's initialisation, not of nn.Linear's
    again = cx.restore(small)
    assert [type(m) for m in again.modules()] == [type(m) for m in net.modules()]
    with torch.no_grad():
        assert_close(small(tokens).logits, again(tokens).logits)


class Dropping(nn.Module):
    """A pair that is left out at random while the model trains, as with LayerDrop."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        if self.training and torch.rand([]) < 0.5:
            return x
        return x + self.down(torch.relu(self.up(x)))


def test_a_model_that_drops_layers_while_it_trains_learns_from_its_own_outputs():
    torch.manual_seed(0)
    net, x = Dropping().train(), torch.randn(64, 8)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(4)
    assert cx.record(upgrade(net, blocks=2, data=[x], epochs=2)).options.chains == (("up", "down"),)
    with pytest.raises(cx.CrystalliteError, match="in training mode"):  # where a loss is, it trains as it is
        upgrade(net, blocks=2, data=[(x, x)], loss=F.mse_loss, epochs=2)


def test_a_threshold_nobody_reaches_is_an_error():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(cx.CrystalliteError, match="expected 2 blocks, but 0 are left"):
        upgrade(net, blocks=2, data=[torch.randn(32, 8)], epochs=1, null=nulls.Uniform(1e3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 1}, "at least 2"),
        ({"blocks": 64}, "too few for 64 blocks"),
        ({"epochs": 0}, "epochs must be"),
        ({"learning_rate": -1.0}, "learning_rate must be"),
        ({"smoothing": 1.0}, "smoothing must be"),
        ({"smoothing": 0.1}, "smoothing: needs labels"),
        ({"level": 0.0}, "level must be"),
        ({"null": "guess"}, "null must be"),
        ({"null": {}}, "no null for 0.weight"),
        ({"partition": "best"}, "partition must be"),
        ({"targets": "nothing"}, "no layer with weights matches"),
        ({"loss": F.cross_entropy}, "needs batches"),
        ({"data": []}, "at least one sample"),
    ],
)
def test_bad_options_are_refused(options, message):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(cx.InvalidOption, match=message):
        upgrade(net, **{"blocks": 2, "data": [torch.randn(32, 8)], "epochs": 1, **options})


def test_half_precision_that_cannot_be_trained_is_refused():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).half()
    with pytest.raises(cx.InvalidOption, match=r"0\.weight: expected weights in float32 or bfloat16, got float16"):
        upgrade(net, blocks=2, data=[torch.randn(32, 8).half()], epochs=1)


def test_batches_must_not_get_fewer():
    class Shrinking:
        left = 4

        def __iter__(self):
            yield from np.zeros((self.left, 8, 8), np.float32)
            self.left -= 1

    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(cx.InvalidOption, match="batches in every epoch"):
        upgrade(net, blocks=2, data=Shrinking(), epochs=1)


def test_idle_neurons_are_cleared_without_a_change_of_function():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        net[0].weight[:3] = 0  # emit constants
        net[3].weight[:, 4] = 0  # read by nobody
        net[5].weight[:, 2] = 0
    x = torch.randn(20, 6)
    expected = net(x)
    clear_idle_(net, ["0", "3", "5"])
    assert_close(net(x), expected)
    for before, after in ((net[0], net[3]), (net[3], net[5])):
        assert torch.equal(before.weight.any(1), after.weight.any(0))


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + self.down(self.up(x).relu()))


class _InAList(nn.Module):
    """Its pair lies in a list, which is never called."""

    def __init__(self):
        super().__init__()
        self.pair, self.norm = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)]), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.pair[1](self.pair[0](x).relu()))


@pytest.mark.parametrize(
    ("net", "ends"),
    [
        (nn.Sequential(_Layer(), _Layer()), ["0", "1"]),  # what is added to a stream, and the stream after it
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), ["2"]),
        (_InAList(), ["pair.1"]),
    ],
)
def test_without_labels_the_stream_around_a_chain_is_compared(net, ends):
    x = torch.randn(4, 6)
    assert ends_of(net.eval(), find_chains(net, example=x), Batch(0, 4, (x,))) == ends
