"""Structure in degrees: planted modules, noise, heavy neurons, and what must not change the result."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

import crystallite as cx
from crystallite.analysis import modular_controls
from crystallite.analysis.degrees import OPTIONS


def planted(rows, cols, k, strength, seed=0):
    """Noise whose standard deviation is `strength` times as large inside k modules."""
    rng = np.random.default_rng(seed)
    row_labels, col_labels = rng.permutation(np.arange(rows) % k), rng.permutation(np.arange(cols) % k)
    inside = row_labels[:, None] == col_labels
    return rng.normal(size=(rows, cols)) * np.where(inside, strength, 1), row_labels, col_labels


def agree(found, expected, share=1.0):
    """Whether a share of the pairs of neurons is together or apart in both."""
    same = (found[:, None] == found) == (expected[:, None] == expected)
    return same.mean() >= share


def test_planted_modules_are_found_where_no_exact_block_is():
    w, rows, cols = planted(96, 80, 3, 1.6)
    found = cx.modularity(w)
    assert found.modular
    assert found.k == 3
    assert agree(found.labels[0], rows, 0.9)
    assert agree(found.labels[1], cols, 0.9)
    assert found.controls["norms"].deviations > 5
    profile = cx.level_profile(w)
    in_use = profile.active_share >= 0.8
    assert profile.effective_blocks[in_use].max() < 1.5  # at no threshold does it fall apart


def test_noise_is_at_the_median_and_rarely_called_modular():
    rng = np.random.default_rng(0)
    found = [cx.modularity(rng.normal(size=(24, 32)), controls=19, seed=i) for i in range(60)]
    for kind in ("norms", "shuffled", "null"):
        middle = np.mean([each.controls[kind].percentile for each in found])
        assert 50 - 4 * 28.9 / 60**0.5 < middle < 50 + 4 * 28.9 / 60**0.5, kind
    assert sum(each.modular for each in found) <= 9  # 3 expected; more than 9 once in a thousand


@pytest.mark.parametrize("threads", [1, 2])
def test_the_search_is_made_in_one_thread_whatever_is_allowed(threads, monkeypatch):
    """So no result depends on it, nor does a machine that is busy otherwise make threads wait for each other."""
    allowed, search = [], modular_controls.best_partitions

    def seen():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    def search_and_see(*args):
        allowed.append(seen())
        return search(*args)

    monkeypatch.setattr(modular_controls, "best_partitions", search_and_see)
    with threadpool_limits(threads, "blas"):
        cx.modularity(planted(32, 32, 2, 1.6)[0])
        assert seen() == {threads}
    assert allowed
    assert all(each == {1} for each in allowed)


def test_heavy_rows_and_columns_alone_are_not_modular():
    rng = np.random.default_rng(1)
    scales = np.exp(rng.normal(size=(40, 1)) * 0.8) * np.exp(rng.normal(size=50) * 0.8)
    found = [cx.modularity(rng.normal(size=(40, 50)) * scales, controls=19, seed=i) for i in range(30)]
    assert 30 < np.mean([each.percentile for each in found]) < 70
    assert np.mean([each.controls["null"].percentile for each in found]) > 90  # a control that forgets them is fooled


def test_a_heavy_neuron_is_named_with_what_it_does():
    w, *_ = planted(96, 80, 2, 1.5, seed=4)
    clean = cx.modularity(w, k=2)
    assert clean.hubs == ()
    w[7] *= 15
    found = cx.modularity(w, k=2)
    hub = found.hubs[0]
    assert (hub.group, hub.neuron) == (0, 7)
    assert 10 < hub.times < 20
    assert hub.gain > 0.02
    assert found.gain_without_hubs > 0.02


def test_a_chain_shows_modules_that_its_layers_alone_do_not():
    rng = np.random.default_rng(2)
    hidden = rng.permutation(np.arange(64) % 2)
    inputs, outputs = (np.arange(64) % 2 for _ in range(2))
    first = rng.normal(size=(64, 64)) * np.where(hidden[:, None] == inputs, 1.3, 1)
    second = rng.normal(size=(64, 64)) * np.where(outputs[:, None] == hidden, 1.3, 1)
    together = cx.modularity([first, second])
    assert together.modular
    assert together.k == 2
    assert together.sizes == (64, 64, 64)
    assert agree(together.labels[0], hidden, 0.6)
    alone = [cx.modularity(w).controls["norms"].deviations for w in (first, second)]
    assert together.controls["norms"].deviations > max(alone)
    apart = cx.modularity([first, second[:, rng.permutation(64)]])  # the layers no longer agree on hidden neurons
    assert together.score - together.expected > apart.score - apart.expected


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1.6]), st.integers(-20, 20))
def test_neither_order_nor_scale_matters(seed, strength, exponent):
    w, *_ = planted(20, 17, 2, strength, seed)
    rng = np.random.default_rng(seed)
    rows, cols = rng.permutation(20), rng.permutation(17)
    found, moved = (cx.modularity(each, controls=5) for each in (w, w[rows][:, cols] * 2.0**exponent))
    assert moved.score == pytest.approx(found.score, abs=1e-6)
    assert (moved.k, moved.percentile) == (found.k, found.percentile)
    assert agree(moved.labels[0], found.labels[0][rows])
    assert agree(moved.labels[1], found.labels[1][cols])
    assert cx.modularity(w * 3.7e-30, controls=5).score == pytest.approx(found.score, abs=0.02)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, torch.float32, torch.bfloat16])
def test_number_formats_and_memory_orders(kind):
    w, rows, _ = planted(48, 40, 2, 2.5)
    given = torch.tensor(w).to(kind) if isinstance(kind, torch.dtype) else w.astype(kind)
    turned = given.T.contiguous().T if isinstance(given, torch.Tensor) else np.asfortranarray(given)
    for each in (given, turned):
        found = cx.modularity(each, controls=9)
        assert found.modular
        assert agree(found.labels[0], rows, 0.95)


def test_neurons_that_were_not_sampled_follow_those_that_were():
    w, rows, cols = planted(300, 200, 2, 2.0)
    w[5] = 0
    found = cx.modularity(w, sample=64, controls=9)
    assert found.sampled == (64, 64)
    assert found.sizes == (300, 200)
    live = np.arange(300) != 5
    assert found.labels[0][5] == -1
    assert agree(found.labels[0][live], rows[live], 0.95)
    assert agree(found.labels[1], cols, 0.95)


def test_bad_arguments_say_what_was_expected():
    w = np.random.default_rng(0).normal(size=(8, 8))
    for call, text in (
        (lambda: cx.modularity(w[:3]), "at least 4 neurons on each side, got 3 and 8"),
        (lambda: cx.modularity(w * np.nan), "finite weights, got NaN"),
        (lambda: cx.modularity(w * 0), "no weight but zeros"),
        (lambda: cx.modularity([w, w[:, :5]]), "matrix 1: expected 8 columns, got 5"),
    ):
        with pytest.raises(cx.InvalidMatrix, match=text):
            call()
    for options, text in (({"k": 5}, "from 2 to 4"), ({"controls": 1}, "controls"), ({"sample": 2.5}, "sample")):
        with pytest.raises(cx.InvalidOption, match=text):
            cx.modularity(w, **options)


class TestAnalyze:
    def network(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 4))
        sides = [torch.arange(size) % 2 for size in (40, 60, 40, 4)]
        with torch.no_grad():
            for layer, before, after in zip(net[::2], sides[:-1], sides[1:], strict=True):
                layer.weight *= torch.where(after[:, None] == before, 1.7, 1.0)
        return net

    def test_rows_and_the_chain_say_how_modular_they_are(self):
        found = cx.analyze(self.network(), null="empirical")
        middle = found["2"].modularity
        assert middle["modular"]
        assert middle["k"] == 2
        assert middle["controls"]["norms"]["copies"] == OPTIONS.primary
        assert "Modular in degrees: 2 modules score" in found["2"].verdict
        (chain,) = found.chains
        assert chain.layers == ("0", "2", "4")
        assert chain.modularity["sizes"] == [60, 40, 40, 4]
        assert chain.modularity["modular"]
        assert chain.modularity["k"] == 2
        assert "modular in degrees" in found.verdict
        assert found.chain_table().splitlines()[1].startswith("0, 2, 4  ")
        assert found.chain_table(width=60).splitlines()[1].startswith("network  ")
        assert "40–60–40–4" in repr(found)
        assert found.to_json()["chains"][0]["name"] == "network"

    def test_chains_name_their_layers_in_full(self):
        torch.manual_seed(0)
        ffn = nn.ModuleDict({"lin1": nn.Linear(16, 40), "lin2": nn.Linear(40, 16)})
        found = cx.analyze(nn.ModuleDict({"layer": nn.ModuleList([nn.ModuleDict({"ffn": ffn})])}))
        assert "layer.0.ffn: lin1, lin2  16–40–16" in found.chain_table()
        assert "layer.0.ffn: lin1, lin2" in found._repr_html_()
        assert "layer.0.ffn.lin1…2  16–40–16" in found.chain_table(width=75)
        assert found.to_json()["chains"][0]["layers"] == ("layer.0.ffn.lin1", "layer.0.ffn.lin2")

    def test_the_report_shows_both(self):
        page = cx.report(self.network(), null="empirical").html
        assert "Modular in degrees: 2 modules score" in page
        assert "Chains of layers in degrees" in page

    def test_an_untrained_network_is_not(self):
        torch.manual_seed(1)
        found = cx.analyze(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40)))
        assert "modular in degrees" not in found.verdict.lower()

    def test_fast_leaves_it_out_and_exact_blocks_need_none(self):
        fast = cx.analyze(self.network(), fast=True)
        assert fast["2"].modularity is None
        assert fast.chains == ()
        blocks = nn.Linear(32, 32)
        with torch.no_grad():
            blocks.weight.copy_(torch.block_diag(torch.ones(16, 16), torch.ones(16, 16)) + 0.5 * torch.rand(32, 32))
            blocks.weight[:16, 16:] = blocks.weight[16:, :16] = 0
        row = cx.analyze(blocks, null="empirical", rule="neyman").rows[0]
        assert row.finding != "separate" or row.modularity is None

    @pytest.mark.parametrize("layer", [nn.GRU(12, 16), nn.Conv2d(12, 16, 3), nn.Conv2d(12, 16, 1, groups=2)])
    def test_feedback_and_kernels(self, layer):
        torch.manual_seed(0)
        found = cx.analyze(layer)
        rows = {row.name: row.modularity for row in found.rows}
        if isinstance(layer, nn.GRU):
            assert rows["weight_hh_l0"]["sizes"] == [16]  # one module for a unit, as it writes and as it reads
            assert found.chains[0].modularity["sizes"] == [16, 12]
        elif layer.groups == 1:
            assert next(iter(rows.values()))["sizes"] == [16, 12]
        else:
            assert list(rows.values()) == [None]
