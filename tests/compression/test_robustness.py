"""Hostile calibration data: a clear refusal or a sound model, never a silently wrong one."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.core.errors import InvalidOption
from tests.helpers import compressible as networks
from tests.helpers.compressible import relative_error


def samples(width, count=800, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", [0, -1])
def test_one_bad_number_is_enough(place):
    """Among what is fitted on, or only among what judges."""
    batches = list(samples(16).split(100))
    batches[place] = batches[place].clone()
    batches[place][3, 2] = torch.inf
    with pytest.raises(InvalidOption, match=r"0: its activations .* hold NaN or infinity"):
        compress(networks.mlp(16, 16, 4), budget=0.5, calibration=batches)


def test_data_that_never_changes_is_refused():
    with pytest.raises(InvalidOption, match="below the smallest that can be reached"):
        compress(networks.mlp(16, 16, 4), budget=0.5, calibration=torch.ones(200, 16))


@pytest.mark.parametrize("objective", ["macs", "parameters"])
@pytest.mark.parametrize("seed", range(4))
def test_inputs_that_repeat_each_other_are_no_trouble(seed, objective):
    """Blocks and hubs are chosen here, and neurons go that are not shared out evenly to them."""
    model, half = networks.mlp(32, 32, 8), samples(16)
    x = torch.cat([half, half], 1)
    small = compress(model, budget=0.6, calibration=x, seed=seed, objective=objective)
    assert cx.summary(small).macs[1] <= 0.6 * cx.summary(small).macs[0]
    assert relative_error(small(x), model(x)) < 0.25


def test_some_inputs_that_never_change_are_no_trouble():
    model, x = networks.low_rank(), samples(40)
    x[:, 5:9] = 1e4
    small = compress(model, budget=0.4, calibration=x)
    assert relative_error(small(x), model(x)) < 1e-3


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_data_does_not_matter(scale):
    model, x = networks.low_rank(), scale * samples(40)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias.mul_(scale)
    small = compress(model, budget=0.4, calibration=x)
    assert relative_error(small(x), model(x)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision(dtype):
    model, x = networks.low_rank().to(dtype), samples(40).to(dtype)
    small = compress(model, budget=0.4, calibration=x)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert relative_error(small(x).float(), model(x).float()) < 0.05


def test_sums_of_half_precision_do_not_overflow():
    """Gradients of 16-bit outputs, each of moderate size, whose products are beyond what 16 bits hold."""
    model, x = networks.low_rank().half(), samples(40).half()
    with torch.no_grad():
        model[2].weight.mul_(1 / 64)
        model[2].bias.mul_(1 / 64)
    small = compress(model, budget=0.4, calibration=x)
    assert relative_error(small(x).float(), model(x).float()) < 0.05


def test_layers_of_other_kinds_are_named_in_the_summary():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.recurrent, self.layers = (
                nn.Embedding(9, 8),
                nn.GRU(8, 8, batch_first=True),
                networks.mlp(8, 32, 4),
            )

        def forward(self, x):
            return self.layers(self.recurrent(self.table(x))[0])

    torch.manual_seed(0)
    model = Mixed()
    small = compress(model, blocks=2, calibration=torch.randint(9, (200, 5)))
    became = {change.name: change.became for change in cx.summary(small).changes}
    assert became["table"].startswith("left alone: Embedding is a look-up table")
    assert became["recurrent"].startswith("left alone: only linear layers are fitted in blocks, this is a GRU")
    assert torch.equal(small.recurrent.weight_hh_l0, model.recurrent.weight_hh_l0)


class Stream(nn.Module):
    """Two blocks that add to what they read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = networks.mlp(16, 32, 16), networks.mlp(16, 32, 16)

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


def test_layers_that_make_good_for_what_a_stream_lost_say_so(capsys):
    small = compress(Stream().eval(), budget=0.4, calibration=samples(16), progress=True)
    became = {change.name: change.became for change in cx.summary(small).changes}
    assert [name for name, text in became.items() if "losses of earlier layers included" in text] == ["second.2"]
    shown = capsys.readouterr().err
    assert all(phase in shown for phase in ("tracing", "weighing", "probing", "fitting"))
