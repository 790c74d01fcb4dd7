"""Convolutions among the units that are fitted: channels that go, planted ranks, the swap, and what is left alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.pruning import eliminate, find_prunable
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.operators.low_rank import LowRankConv, LowRankLinear
from crystallite.statistics.layer_io import call_counts, matrix_of, read_rows, written_rows
from crystallite.statistics.regression import Moments, Regression
from tests.helpers.compressible import relative_error
from tests.helpers.tolerance import assert_close


def images(count=160, channels=3, side=8):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def small_cnn(seed=0):
    """conv → norm → conv → pooling → linear, whose norms know something."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 6),
    )  # fmt: skip
    with torch.no_grad():
        for value in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
            value.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(3, 5, 4, stride=3, padding=2, dilation=2),
        nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.Conv2d(3, 5, 3, padding="same", padding_mode="reflect", bias=False),
        nn.Conv3d(3, 5, 2, padding=1),
    ],
    ids=str,
)
def test_patches_times_the_matrix_are_what_the_convolution_writes(conv):
    x = torch.randn(4, 3, *[9] * len(conv.kernel_size))
    written = conv(x)

    def some(spec):
        assert spec == (4, *written.shape[2:])
        return torch.arange(0, spec.numel(), 3)

    patches = read_rows(conv, x, some)
    bias = 0 if conv.bias is None else conv.bias
    assert_close(patches @ matrix_of(conv).T + bias, written_rows(conv, written, some))
    assert_close(read_rows(conv, x[0], lambda _: torch.arange(3)), read_rows(conv, x, lambda _: torch.arange(3)))


def test_channels_that_nothing_reads_go_at_no_loss():
    model, x = small_cnn(), images()
    with torch.no_grad():
        model[3].weight[:, 4:] = 0
        model[7].weight.view(6, 24, 4)[:, 1::2] = 0
    counts = call_counts(model, ["0", "3", "7"], Batch(0, 2, (x[:2],)))
    assert counts == {"0": 64, "3": 16, "7": 1}
    needed = 64 * 4 * 27 + 16 * 12 * 36 + 6 * 48
    small = compress(model, budget=needed / (64 * 16 * 27 + 16 * 24 * 144 + 6 * 96) + 1e-6, calibration=x)
    assert repr(small[0]) == "Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))"
    assert small[1].num_features == 4
    assert repr(small[3]) == "Conv2d(4, 12, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))"
    assert small[7].in_features == 48
    assert relative_error(small(x), model(x)) < 1e-4


def test_a_planted_rank_is_found():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Softmax(1), nn.Conv2d(32, 2, 1)), images()
    with torch.no_grad():
        model[0].weight.copy_((torch.randn(32, 4) @ torch.randn(4, 27)).view(32, 3, 3, 3) / 8)
    small = compress(model, budget=(4 * 59 + 64) / (32 * 27 + 64) + 1e-6, calibration=x)
    assert [tuple(part.weight.shape) for part in (small[0].down, small[0].up)] == [(4, 3, 3, 3), (32, 4, 1, 1)]
    assert relative_error(small(x), model(x)) < 1e-4


@pytest.mark.parametrize("budget", [0.8, 0.5, 0.25])
def test_the_budget_is_kept_and_plain_modules_come_out(budget):
    model, x = small_cnn(), images()
    small = compress(model, budget=budget, calibration=x)
    before, after = cx.summary(small).macs
    assert before == 64 * 16 * 27 + 16 * 24 * 144 + 6 * 96
    assert after <= budget * before
    plain = (
        LowRankConv,
        LowRankLinear,
        nn.Sequential,
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.ReLU,
        nn.AdaptiveAvgPool2d,
        nn.Flatten,
        nn.Linear,
    )
    assert all(type(module) in plain for module in small.modules())
    counted = []
    for module in small.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda m, _, y: counted.append(y[0].numel() * m.weight[0].numel()))
    small(x[:1])
    assert sum(counted) == after


def test_refitted_channels_lose_less_than_cut_ones():
    model, x = small_cnn(), images(256)
    small = compress(model, budget=0.82, calibration=x, ignore="3")  # of the first layer only low ranks can be chosen
    assert relative_error(small(x), model(x)) < 0.3
    with pytest.raises(InvalidOption, match=r"hold 34% .*; left alone: 3 \(66%\): not asked for"):
        compress(model, budget=0.6, calibration=x, ignore="3")
    small = compress(model, budget=0.6, calibration=x)
    cut = small_cnn()
    with torch.no_grad():
        strong = cut[3].weight.pow(2).sum((0, 2, 3)).argsort(descending=True)
        cut[3].weight[:, strong[small[0].out_channels :]] = 0
    assert small[0].out_channels < 16
    assert relative_error(small(x), model(x)) < relative_error(cut(x), model(x))


def test_what_a_convolution_adds_to_a_stream_is_made_good_for():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.second, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            x = x + self.second(F.relu(self.first(x)))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model, x = Residual(), images(128)
    small = compress(model, budget=0.5, calibration=x)
    assert small.first.out_channels == small.second.in_channels < 16  # the stream keeps its channels
    assert (small.second.out_channels, small.head.in_features) == (8, 8)
    assert relative_error(small(x), model(x)) < 0.2


def test_groups_of_inputs_go_together_and_the_best_ones_stay():
    torch.manual_seed(0)
    x = torch.randn(500, 12) @ torch.randn(12, 12)
    own = torch.randn(3, 12)
    moments = Moments("a")
    moments.add(x, x @ own.T)
    regression = Regression.solve(moments, moments, own, True, 1e-6)
    places = torch.arange(12).view(4, 3)
    for size, (neurons, weight) in eliminate(regression, [3, 1], places).items():
        assert len(neurons) == size
        kept = places[neurons].flatten()
        assert torch.equal(weight.abs().sum(0).nonzero()[:, 0], kept)
        centred = x - x.mean(0)
        expected = torch.linalg.lstsq(centred[:, kept].double(), (centred @ own.T).double()).solution.T
        torch.testing.assert_close(weight[:, kept], expected, rtol=1e-3, atol=1e-3)
    alone = {one: _error_of(regression, [one]) for one in range(4)}
    assert int(eliminate(regression, [1], places)[1][0][0]) in sorted(alone, key=alone.get)[:2]
    scattered = torch.arange(12).view(3, 4).T  # inputs of a neuron need not lie next to each other
    moved = Regression.solve(moments, moments, own, True, 1e-6)
    for neurons, weight in eliminate(moved, [2], scattered).values():
        assert torch.equal(weight.abs().sum(0).nonzero()[:, 0], scattered[neurons].flatten().sort().values)


def _error_of(regression, groups):
    columns = torch.tensor([3 * g + i for g in groups for i in range(3)])
    inner = regression.restricted(columns)
    return inner.error(inner.weight)


def test_hidden_channels_are_those_that_one_layer_reads():
    model = small_cnn()
    found = find_prunable(model, {"0", "3", "7"}, Batch(0, 2, (images(2),))).groups
    assert [(g.writers, g.reader, g.size, g.width, g.passed) for g in found] == [
        (("0",), "3", 16, 9, ("1",)),
        (("3",), "7", 24, 4, ()),
    ]


def test_saved_and_loaded(tmp_path):
    model, x = small_cnn(), images()
    small = compress(model, budget=0.4, calibration=x)
    cx.save(small, tmp_path / "small")
    assert torch.equal(cx.load(tmp_path / "small")(x), small(x))


def test_a_model_of_one_dimension_and_frozen_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 16, 5), nn.Tanh(), nn.Conv1d(16, 4, 5)).requires_grad_(False)
    x = torch.randn(100, 4, 20)
    small = compress(model, budget=0.5, calibration=x)
    assert not any(p.requires_grad for p in small.parameters())
    assert relative_error(small(x), model(x)) < 0.5


def test_what_is_left_alone_says_why():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.ConvTranspose2d(6, 8, 2), nn.ReLU(), nn.Conv2d(8, 8, 3)
    )
    small = compress(model, budget=0.9, calibration=images())
    became = {change.name: change.became for change in cx.summary(small).changes}
    assert became["0"] == "left alone: the 3 groups of its channels are apart already"
    assert became["2"] == "left alone: no block operator for ConvTranspose2d"
    assert "error" in became["4"]
