"""Artifacts that somebody prepared: one clear error each, and nothing executed or allocated on their word."""

import contextlib
import copy
import hashlib
import json
import resource
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import crystallite as cx
from crystallite.models.manifest import write_manifest
from tests.helpers.artifacts import edit_manifest, sequential_network
from tests.helpers.planted.recurrent import flat
from tests.helpers.planted.recurrent import planted as planted_recurrent


def _edit_module(name, **changes):
    def edit(folder):
        modules = cx.read_manifest(folder)["modules"]
        modules[""]["children"][name] |= changes
        edit_manifest(modules=modules)(folder)

    return edit


def _edit_weights(change):
    """Change the weights and fix the hash, as somebody who wants us to trust them would."""

    def edit(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
        edit_manifest(weights_sha256=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())(folder)

    return edit


def _whole(**description):
    return edit_manifest(modules={"": description})


def _nested(depth):
    def edit(folder):
        edit_manifest(modules={"": "HERE"})(folder)
        inner = '{"type": "Sequential", "children": {"0": ' * depth + "{}" + "}}" * depth
        file = folder / "manifest.json"
        file.write_text(file.read_text().replace('"HERE"', inner))
        with contextlib.suppress(RecursionError):  # too deep to be read at all
            edit_manifest()(folder)

    return edit


def _share(**shared):
    """Say of modules that they are others."""

    def edit(folder):
        modules = cx.read_manifest(folder)["modules"]
        modules[""]["shared"] = {name.removeprefix("at_"): first for name, first in shared.items()}
        edit_manifest(modules=modules)(folder)

    return edit


def _record(**parts):
    return edit_manifest(record={"options": {"type": "ExactOptions"}, **parts})


def _fold(**fold):
    return _record(folds=[fold])


def _half(state):
    state["3.bias"] = state["3.bias"].half()


def _wide(state):
    """All of one operator, which says float32 of itself."""
    state.update({name: v.double() for name, v in state.items() if name.startswith("4.") and v.is_floating_point()})


def _text(old, new):
    """Change the text of the manifest and do not sign it."""

    def edit(folder):
        file = folder / "manifest.json"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))

    return edit


def _large_file(folder):
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(3 << 30)  # a file with a hole, which takes no space


BIG = {"in_features": 10**5, "out_features": 10**5}
LSTM = {"input_size": 2, "hidden_size": 2, "num_layers": 10**12}
WIDE = {"in_features": 8, "out_features": 12, "columns": False, "outputs": False, "bias": True, "stacks": [[2, 6, 6]]}
TALL = WIDE | {"columns": True, "stacks": [[3, 6, 4]]}
HOSTILE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "found no manifest"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "empty file"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "expected a JSON object as manifest"),
    "brackets": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest in JSON"),
    "a name twice": (lambda f: (f / "manifest.json").write_text('{"a": 1, "a": 2}'), "twice"),
    "another version": (edit_manifest(version=1), "expected format crystallite 4"),
    "another format": (edit_manifest(format="other"), "expected format"),
    "no modules": (edit_manifest(modules=None), "expected 'modules'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing"),
    "other weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "not those the manifest"),
    "code as a type": (_whole(type="os.system", arguments=["true"]), "unknown type 'os.system'"),
    "a list as a type": (_whole(type=["Linear"], arguments={}), "description of a module"),
    "no type": (_whole(arguments={}), "description of a module"),
    "unknown arguments": (_whole(type="ReLU", arguments={"device": {}, "code": 1}), "description of a module"),
    "no arguments": (_whole(type="Linear"), "no 'arguments'"),
    "a huge layer": (
        _edit_module("3", type="Linear", arguments={"in_features": 10**9, "out_features": 10**9}),
        r"'3.bias': expected floating-point numbers of shape \(1000000000,\), got .* \(8,\)",
    ),
    "an impossible layer": (
        _whole(type="Linear", arguments={"in_features": 10**30, "out_features": 1}),
        "description of a module",
    ),
    "endless layers": (_whole(type="LSTM", arguments=LSTM), "layers"),
    "deep nesting": (_nested(400), "description of a module"),
    "deeper nesting": (_nested(2000), "manifest in JSON"),
    "huge blocks": (_edit_module("4", stacks=[[10**6, 10**6, 1]]), "expected blocks of up to 12 rows"),
    "blocks wider than their layer": (_edit_module("4", **WIDE), "12 rows and 8 columns, got 12 and 12"),
    "blocks taller than their layer": (_edit_module("4", **TALL), "expected blocks of up to 12 rows .*, got 18 and 12"),
    "blocks of no number": (_edit_module("4", stacks=[["x", None, 1.5]]), "description of a module"),
    "blocks of no dtype": (_edit_module("4", dtype="load"), "description of a module"),
    "blocks of integers": (_edit_module("4", dtype="int64"), "description of a module"),
    "indices outside": (_edit_weights(lambda s: s["4.outputs"].fill_(10**6)), "4.outputs must hold indices below 13"),
    "negative indices": (_edit_weights(lambda s: s["0.outputs"].sub_(5)), "0.outputs must hold indices below 8"),
    "indices of another kind": (
        _edit_weights(lambda s: s.update({"0.outputs": s["0.outputs"].int()})), "must hold indices"
    ),
    "indices instead of weights": (
        _edit_weights(lambda s: s.update({"3.weight": s["3.weight"].long()})), "'3.weight': expected floating-point"
    ),
    "a tensor missing": (_edit_weights(lambda s: s.pop("3.weight")), "3.weight"),
    "a tensor too many": (_edit_weights(lambda s: s.update(extra=torch.ones(2))), "extra"),
    "a module as another": (_share(at_4="3"), "'4' as the module '3', which is another"),
    "a module as nothing": (_share(at_4="nothing"), "no 'nothing'"),
    "a module as the whole": (_share(at_4=""), "no ''"),
    "a module as a number": (_share(at_4=3), "description of a module"),
    "a tie to nothing": (edit_manifest(tied={"extra": "nothing"}), "cannot be tied"),
    "a tie of what is stored": (edit_manifest(tied={"3.weight": "3.bias"}), "cannot be tied"),
    "a tie to no name": (edit_manifest(tied={"extra": ["3.weight"]}), "cannot be tied"),
    "a record of other things": (_record(changes=[{"a": 1}]), "record of a reorganization"),
    "a list as a record": (_record(folds=5), "record"),
    "folds without an order": (_fold(places=[["a", 0]]), "got no record.folds.order"),
    "folds of numbers": (_fold(order=[1, 0], places=[["a", 0]]), "record of a reorganization"),
    "folds of other things": (_fold(order="1 x", places=[["a", 0]]), "record of a reorganization"),
    "folds of huge numbers": (_fold(order="9" * 5000, places=[["a", 0]]), "record of a reorganization"),
    "folds beyond int64": (_fold(order="1 " + "9" * 30, places=[["a", 0]]), "record of a reorganization"),
    "another method": (_record(options={"type": "os.system"}), "expected one of ExactOptions, "),
    "folds that lose a neuron": (_fold(order="1 1 0", places=[["a", 0]]), "every index below 3 once"),
    "changed by hand": (_text('"training": false', '"training": true'), r"one that was changed: .*write_manifest\("),
    "a verdict by hand": (_text('"verdict": null', '"verdict": {"passed": true}'), "one that was changed"),
    "not signed": (_text("manifest_sha256", "other_sha256"), "its manifest_sha256 is None"),
    "a manifest of gigabytes": (_large_file, "expected a manifest of at most 33554432 bytes, got 3221225472"),
    "a device": (_whole(type="Linear", arguments={**BIG, "device": "cpu"}), "the argument 'device' of Linear"),
    "a dtype": (_whole(type="Linear", arguments={**BIG, "dtype": "float32"}), "the argument 'dtype' of Linear"),
    "a dtype that is code": (_edit_module("4", dtype="set_default_dtype"), "the dtype 'set_default_dtype' instead"),
    "a dtype in a list": (_edit_module("4", dtype=["float32"]), "description of a module"),
    "ten thousand layers": (_whole(type="LSTM", arguments=LSTM | {"num_layers": 10**4}), "1000 recurrent layers"),
    "many layers in many modules": (
        _whole(type="ModuleList", children={
            f"{i}": {"type": "LSTM", "arguments": LSTM | {"num_layers": 500}} for i in range(3)
        }), "1000 recurrent layers",
    ),
    "more blocks than any model has": (_edit_module("4", stacks=[[1, 1, 1]] * 200_001), "at most 200000 parts"),
    "an argument that is an object": (_whole(type="ReLU", arguments={"inplace": {}}), "the argument 'inplace'"),
    "a size that is an object": (_whole(type="LayerNorm", arguments={"normalized_shape": [{}]}), "as normalized_shape"),
    "a half-precision bias": (_edit_weights(_half), "3: expected numbers of one dtype among .*, got float16, float32"),
    "another dtype than described": (_edit_weights(_wide), "4: expected numbers of one dtype .*, got float32, float64"),
    "padding of gigabytes": (
        _whole(type="Conv2d", arguments={"in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": 3000}),
        "pads to at most 1048576 positions",
    ),
    "dilation of gigabytes": (
        _whole(type="Conv2d", arguments={
            "in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": "same", "dilation": 3000,
        }), "pads to at most 1048576 positions",
    ),
    "pooling to gigabytes": (
        _whole(type="AdaptiveAvgPool2d", arguments={"output_size": [10**5, 10**5]}), "as output_size of Ad"
    ),
    "nothing said of frozen parameters": (edit_manifest(frozen=None), "expected 'frozen'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_artifacts(tmp_path, case):
    damage, message = HOSTILE[case]
    folder = cx.save(sequential_network(), tmp_path / "a")
    damage(folder)
    with pytest.raises(cx.CheckpointError, match=message):
        cx.load(folder)


def test_hostile_recurrent_orders(tmp_path):
    blocks = cx.BlockRecurrent.from_dense(planted_recurrent("GRU", "triangular"))
    folder = cx.save(blocks, tmp_path / "b")
    _edit_weights(lambda s: s["layers.0.order"].fill_(1))(folder)
    with pytest.raises(cx.CheckpointError, match=r"layers.0.order must hold every index below 20 once"):
        cx.load(folder)
    folder = cx.save(blocks, tmp_path / "c")
    modules = cx.read_manifest(folder)["modules"]
    modules[""]["forms"][0]["blocks"][0][1] += 7
    edit_manifest(modules=modules)(folder)
    with pytest.raises(cx.CheckpointError, match="blocks that fill 20 units"):
        cx.load(folder)


def _edit_form(block, place, value):
    """Change one number of a block in the first form of a saved `BlockRecurrent`."""

    def edit(folder):
        modules = cx.read_manifest(folder)["modules"]
        modules[""]["forms"][0]["blocks"][block][place] = value
        edit_manifest(modules=modules)(folder)

    return edit


def _edit_recurrent(**changes):
    def edit(folder):
        modules = cx.read_manifest(folder)["modules"]
        modules[""] |= changes
        edit_manifest(modules=modules)(folder)

    return edit


LATER = _edit_weights(lambda s: s["layers.0.sources"][:4].copy_(torch.tensor([0, 1, 2, 7])))
HOSTILE_RECURRENT = {  # four blocks of 5 units, each hears all before it
    "sources that come later": (LATER, r"layers.0.sources: expected positions from 0 below 5, .*, got 7"),
    "its own units as sources": (
        _edit_weights(lambda s: s["layers.0.sources"][4].fill_(5)), "expected positions from 0 below 5"
    ),
    "sources that run later": (
        lambda f: (_edit_form(2, 2, 3)(f), _edit_form(3, 2, 2)(f)), "less depth than 2, for the block at 15, got 10"
    ),
    "sources of another component": (_edit_form(1, 3, False), "expected positions from 5 below 5"),
    "sources twice": (_edit_weights(lambda s: s["layers.0.sources"][1].fill_(0)), "sources: expected ascending"),
    "columns twice": (_edit_weights(lambda s: s["layers.0.columns"].fill_(0)), "columns: expected ascending"),
    "ranks in no order": (_edit_weights(lambda s: s["layers.0.rank"].copy_(s["layers.0.rank"].flip(0))), "0.rank: exp"),
    "more sources than units": (_edit_form(0, 5, 10**9), "possible depth, feedback and sources"),
    "an endless depth": (_edit_form(3, 2, 10**30), "possible depth, feedback and sources"),
    "a depth of no number": (_edit_form(3, 2, float("nan")), "expected whole numbers"),
    "a device": (_edit_recurrent(device="cpu"), "expected the settings mode, "),
    "a dtype": (_edit_recurrent(dtype="float64", layer="x"), "expected the settings mode, "),
    "no input": (_edit_recurrent(input_size=0), "expected the settings mode, "),
    "nine directions": (_edit_recurrent(bidirectional=8), "expected the settings mode, "),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_RECURRENT)
def test_hostile_recurrent_artifacts(tmp_path, case):
    damage, message = HOSTILE_RECURRENT[case]
    folder = cx.save(cx.BlockRecurrent.from_dense(planted_recurrent("GRU", "triangular"), smallest=1), tmp_path / "a")
    damage(folder)
    with pytest.raises(cx.CheckpointError, match=message):
        cx.load(folder)


def test_hostile_settings_of_low_rank_networks(tmp_path):
    network = cx.LowRankRecurrent("GRU", 4, 8, [(2, 2)])
    for number, changes in enumerate([{"device": "cpu"}, {"layer": "x"}, {"hidden_size": 0}, {"dropout": "much"}]):
        folder = cx.save(network, tmp_path / f"{number}")
        _edit_recurrent(**changes)(folder)
        with pytest.raises(cx.CheckpointError, match="expected the settings mode, "):
            cx.load(folder)


@pytest.mark.parametrize("structure", ["triangular", "fan", "chain", "random"])
@pytest.mark.parametrize("mode", ["GRU", "LSTM"])
def test_mutated_recurrent_artifacts_answer_the_same_twice(tmp_path, mode, structure):
    """Numbers inside their bounds, changed at random: refused, or every answer is computed from what was given."""
    rng = np.random.default_rng(0)
    blocks = cx.BlockRecurrent.from_dense(planted_recurrent(mode, structure), smallest=1)
    folder = cx.save(blocks, tmp_path / "a")
    modules, state = cx.read_manifest(folder)["modules"], load_file(folder / "model.safetensors")
    x, loaded = torch.ones(6, 3, 7, dtype=torch.float64), 0
    for _ in range(60):
        mine, changed = copy.deepcopy(modules), {name: value.clone() for name, value in state.items()}
        for _ in range(int(rng.integers(1, 3))):
            if rng.random() < 0.5:
                table = changed[f"layers.0.{rng.choice(['order', 'component', 'rank', 'sources', 'columns'])}"]
                if len(table):
                    table[int(rng.integers(len(table)))] = int(rng.integers(20))
            else:
                group = mine[""]["forms"][0][str(rng.choice(["blocks", "inputs"]))]
                block = group[int(rng.integers(len(group)))]
                block[int(rng.integers(len(block)))] = int(rng.integers(8))
        _edit_weights(lambda s, changed=changed: s.update(changed))(folder)
        edit_manifest(modules=mine)(folder)
        try:
            model = cx.load(folder).eval()
        except cx.CrystalliteError:
            continue
        loaded += 1
        answers = []
        for garbage in (float("nan"), 1e300):  # what memory holds before a call decides nothing
            left = [torch.full((size,), garbage, dtype=torch.float64) for size in (360, 400, 1080, 1368, 1440, 1728)]
            del left
            with torch.no_grad():
                answers.append(flat(model(x)))
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    assert loaded


def test_manifests_allocate_nothing(tmp_path):
    """The same attacks, by what they take: PyTorch's memory is seen by the size of the process, Python's is traced."""
    for number, case in enumerate(["a manifest of gigabytes", "a device", "ten thousand layers"]):
        folder = cx.save(sequential_network(), tmp_path / f"{number}")
        HOSTILE[case][0](folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        with pytest.raises(cx.CheckpointError):
            cx.load(folder)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        tracemalloc.stop()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kilobytes


def test_a_changed_manifest_can_be_signed(tmp_path):
    folder = cx.save(sequential_network(), tmp_path / "a", metadata={1: "one", "é": [1.5, None]})
    cx.load(folder)
    _text('"one"', '"two"')(folder)
    with pytest.raises(cx.CheckpointError, match="one that was changed"):
        cx.read_manifest(folder)
    write_manifest(folder, json.loads((folder / "manifest.json").read_text()))
    assert cx.read_manifest(folder)["metadata"] == {"1": "two", "é": [1.5, None]}
    cx.load(folder)


def test_models_of_two_dtypes_are_not_saved(tmp_path):
    network = sequential_network()
    network[4].double()
    with pytest.raises(cx.InvalidOption, match=r"the model: expected numbers of one dtype .*, got float32, float64"):
        cx.save(network, tmp_path / "a")
    network[4].float()
    network[3].double()  # a norm may have its own
    cx.load(cx.save(network, tmp_path / "b"))
