"""Multiply-adds against PyTorch's own counter and against what blocks hold."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import crystallite as cx
from crystallite.data.batch import Batch
from crystallite.models.experts import units_and_experts
from crystallite.statistics.layer_io import call_counts, counts_and_unit, row_counts
from crystallite.validation.cost import count_macs, measure_latency
from tests.helpers.block_models import block_convolution, block_linear, block_recurrent


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), (5, 7, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv2d(6, 5, 2, stride=2)), (2, 4, 8, 8)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 8, 8)),
        (nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 20)),
    ],
)
def test_dense_models_count_as_pytorch_counts(model, shape):
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        model(x)
    batch = Batch(0, len(x), (x,))
    assert 2 * count_macs(model, batch) == counter.get_total_flops()
    units = units_and_experts(model, ["*"], [])
    rows = row_counts(model, [unit.name for unit in units], batch)
    assert 2 * sum(unit.macs * rows[unit.name] for unit in units) == counter.get_total_flops()


class HeadGates(nn.Module):
    """A matrix for each head, as the gates of RecurrentGemma: every token meets all of them."""

    def __init__(self):
        super().__init__()
        self.input_weight, self.state_weight = (nn.Parameter(torch.randn(4, 3, 3)) for _ in range(2))
        self.input_bias, self.state_bias = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))

    def forward(self, x, positions):
        heads = x.reshape(-1, 4, 3).transpose(0, 1)
        read = torch.baddbmm(self.input_bias[:, None], heads, self.input_weight)
        kept = torch.baddbmm(self.state_bias[:, None], heads, self.state_weight)
        return (read * kept).transpose(0, 1).reshape(x.shape) * (positions[..., None] > 0)


def test_stacks_that_are_no_experts_count_for_every_token():
    batch = Batch(0, 2, (torch.randn(2, 20, 12), torch.arange(20).expand(2, -1)))
    model = HeadGates()
    with FlopCounterMode(display=False) as counter:
        batch.run(model)
    assert 2 * count_macs(model, batch) == counter.get_total_flops()
    (unit,) = units_and_experts(model, ["*"], [])
    assert 2 * unit.macs * row_counts(model, [""], batch)[""] == counter.get_total_flops()


class OwnProducts(nn.Module):
    """Weights of layers that are handed to a function, as the projections of WavLM are; one layer is never used."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out, self.unused = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        return nn.functional.multi_head_attention_forward(
            x, x, x, 8, 2, torch.empty([0]), torch.cat([self.query.bias, self.key.bias, self.value.bias]), None, None,
            False, 0.0, self.out.weight, self.out.bias, False, None, use_separate_proj_weight=True,
            q_proj_weight=self.query.weight, k_proj_weight=self.key.weight, v_proj_weight=self.value.weight,
        )[0]  # fmt: skip


def test_weights_that_the_models_code_multiplies_itself_count():
    model, batch = nn.Sequential(nn.Linear(8, 8), OwnProducts()), Batch(0, 3, (torch.randn(3, 5, 8),))
    assert count_macs(model, batch) == 5 * 15 * 64
    names = [unit.name for unit in units_and_experts(model, ["*"], [])]
    assert list(call_counts(model, names, batch).values()) == [5, 5, 5, 5, 5, 0]


def test_layers_that_run_once_for_a_batch_count_in_proportion():
    batch = Batch(0, 6, named={"x": torch.randn(6, 4, 8)})

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.places = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.own(x) + self.places(torch.ones(4, 8))

    assert counts_and_unit(Shared(), ["own", "places"], batch) == (
        {"own": 6, "places": 1},
        "for 1/4 of a batch of 6 samples (x [4, 8])",
    )
    assert counts_and_unit(Shared(), ["own"], batch) == ({"own": 4}, "for one sample (x [4, 8])")


def test_recurrent_networks_count_every_step_and_gate():
    x = torch.randn(7, 3, 5)
    model = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
    weights = sum(p.numel() for name, p in model.named_parameters() if name.startswith("weight"))
    assert count_macs(model, Batch(0, 7, (x,))) == 21 * weights


def test_attention_counts_its_projections():
    x = torch.randn(2, 6, 8)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert count_macs(model, Batch(0, 2, (x,))) == 12 * (4 * 8 * 8 + 2 * 8 * 16)


@pytest.mark.parametrize(
    ("model", "x", "positions"),
    [
        (block_linear(16, 16, 4, 0), torch.randn(3, 2, 16), 6),
        (block_convolution(nn.Conv2d, 8, 8, 2, 0), torch.randn(2, 8, 6, 6), 32),
        (block_recurrent(nn.GRU, 6, 96, 2), torch.randn(5, 2, 6), 10),
    ],
)
def test_blocks_count_by_what_they_hold(model, x, positions):
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert hasattr(small, "macs")
    assert count_macs(small, Batch(0, len(x), (x,))) == positions * small.macs
    assert count_macs(small, Batch(0, len(x), (x,))) < count_macs(model, Batch(0, len(x), (x,)))


def test_a_chain_counts_once_not_per_part():
    model = nn.Sequential(block_linear(16, 16, 4, 0), nn.ReLU(), block_linear(16, 16, 4, 1))
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert count_macs(small, Batch(0, 3, (torch.randn(3, 16),))) == 3 * 2 * 4 * 16


def test_no_hook_is_left_behind():
    model = nn.Sequential(nn.Linear(4, 4))
    count_macs(model, Batch(0, 1, (torch.zeros(1, 4),)))
    assert not any(module._forward_hooks for module in model.modules())


def test_latency_tells_a_slow_model_from_a_fast_one():
    fast, slow = nn.Linear(256, 8), nn.Sequential(*[nn.Linear(256, 256) for _ in range(30)])
    (found,) = measure_latency(slow, fast, [Batch(0, 128, (torch.randn(128, 256),))])
    assert found.batch == 128
    assert found.speedup > 2
