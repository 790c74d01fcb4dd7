"""On Ray as without it: the same rows, errors and kept results, from a cluster of two nodes or from none.

Ray listens on every network interface, so it runs in a network namespace that has nothing but loopback. A process
namespace ends whatever it started. `python -m tests.analysis.test_ray_engine FOLDER` is what runs inside.
"""

import functools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.namespace import OBJECT_STORE_BYTES, bring_loopback_up
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.analysis.matrix import Options
from crystallite.analysis.ray_engine import analyze_layers
from tests.helpers.ray_namespace import run_in_namespace

pytestmark = pytest.mark.slow  # compression/test_ray_engine.py runs on two nodes, too


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the runs inside the namespace gave, by name."""
    folder = tmp_path_factory.mktemp("ray")
    write_checkpoints(folder)
    run_in_namespace("tests.analysis.test_ray_engine", folder)
    return json.loads((folder / "outcome.json").read_text())


def test_two_nodes_give_the_rows_of_one_process(outcome):
    assert outcome["nodes"] == 2
    kinds = {row["kind"] for row in outcome["local"]["matrices"]}
    assert kinds == {"linear", "conv", "recurrent", "recurrent feedback"}
    assert outcome["ray"] == outcome["local"]


def test_fast_and_other_options_reach_the_tasks(outcome):
    assert outcome["ray options"] == outcome["local options"]
    assert outcome["ray options"] != outcome["ray"]


def test_the_first_bad_matrix_raises_its_own_error(outcome):
    kind, message = outcome["ray error"]
    assert kind == "InvalidMatrix"
    assert "a: " in message
    assert outcome["ray error"] == outcome["local error"]


def test_either_engine_goes_on_where_the_other_stopped(outcome):
    assert outcome["resumed on ray"] == outcome["resumed locally"] == outcome["local"]
    assert sorted(outcome["kept"]) == sorted(row["name"] for row in outcome["local"]["matrices"])  # each once


def test_a_cluster_is_joined_and_left(outcome):
    assert outcome["joined"] == outcome["local"]
    assert not outcome["still connected"]


def test_the_command_starts_a_cluster_where_there_is_none(outcome):
    assert outcome["command"] == outcome["local"]


class LastComesFirst:
    """As much of Ray as the engine uses, in one process; what was sent last is finished first."""

    def __init__(self):
        self.cancelled = []

    def remote(self, num_cpus):
        return lambda work: SimpleNamespace(remote=lambda *arguments: functools.partial(work, *arguments))

    def wait(self, references):
        return references[-1:], references[:-1]

    def get(self, reference):
        return reference()

    def cancel(self, reference):
        self.cancelled.append(reference.args[1])


@pytest.fixture
def backwards(monkeypatch):
    ray = LastComesFirst()
    monkeypatch.setattr("crystallite.analysis.ray_engine.connected", lambda: nullcontext(ray))
    threads = torch.get_num_threads()
    yield ray
    torch.set_num_threads(threads)  # the tasks ran in this process


def test_of_several_errors_the_first_in_order_is_raised(backwards, tmp_path):
    save_file(two_bad_of_three(), tmp_path / "bad.safetensors")
    kept = tmp_path / "kept.jsonl"
    with pytest.raises(cx.InvalidMatrix, match=r"^a: .*\(1, 2\)"):
        cx.analyze(tmp_path / "bad.safetensors", engine="ray", resume=kept)
    assert [json.loads(line)["row"]["name"] for line in kept.read_text().splitlines()] == ["c"]


def test_who_stops_listening_cancels_the_rest(backwards, tmp_path):
    save_file({f"{name}.weight": torch.randn(16, 16) for name in "abc"}, tmp_path / "good.safetensors")
    rows = analyze_layers(str(tmp_path / "good.safetensors"), ["a", "b", "c"], Options())
    assert next(rows).name == "c"
    rows.close()
    assert backwards.cancelled == ["a", "b"]


def write_checkpoints(folder):
    """`model`: every kind of layer in two shards. `bad.safetensors`: two matrices that are not finite."""
    torch.manual_seed(0)
    gru = nn.GRU(40, 60)
    shards = [
        {
            # above 16 MB a process of its own takes two threads where a task takes one
            "large.weight": torch.randn(2100, 2100) * 0.02,
            "half.weight": (torch.randn(300, 200) * 0.02).bfloat16(),
            "norm.weight": torch.ones(300),
        },
        {
            "conv.weight": nn.Conv2d(16, 24, 3).weight.detach(),
            "gru.weight_ih_l0": gru.weight_ih_l0.detach(),
            "gru.weight_hh_l0": gru.weight_hh_l0.detach(),
        },
    ]
    model = folder / "model"
    model.mkdir()
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, model / file)
        weight_map |= dict.fromkeys(shard, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / "config.json").write_text(json.dumps({"initializer_range": 0.02}))

    save_file(two_bad_of_three(), folder / "bad.safetensors")


def two_bad_of_three():
    tensors = {f"{name}.weight": torch.randn(16, 16) for name in "abc"}
    tensors["a.weight"][1, 2] = tensors["b.weight"][3, 4] = float("nan")
    return tensors


def run_inside_the_namespace(folder):
    import ray
    from ray.cluster_utils import Cluster

    model, bad, kept = folder / "model", folder / "bad.safetensors", folder / "kept.jsonl"
    bring_loopback_up()
    outcome = {}
    record(outcome, "local", model, bad)

    size = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
    cluster.add_node(**size)
    os.environ["RAY_ADDRESS"] = cluster.address
    outcome["joined"] = cx.analyze(model, engine="ray").to_json()
    outcome["still connected"] = ray.is_initialized()
    ray.init(log_to_driver=False)
    outcome["nodes"] = sum(node["Alive"] for node in ray.nodes())
    record(outcome, "ray", model, bad)
    cx.analyze(model, engine="local", targets=["half", "gru*"], resume=kept)
    outcome["resumed on ray"] = cx.analyze(model, engine="ray", resume=kept).to_json()
    outcome["resumed locally"] = cx.analyze(model, engine="local", resume=kept).to_json()
    outcome["kept"] = [json.loads(line)["row"]["name"] for line in kept.read_text().splitlines()]
    ray.shutdown()
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]

    outcome["command"] = printed_by_the_command(model)
    (folder / "outcome.json").write_text(json.dumps(outcome))


def record(outcome, engine, model, bad):
    outcome[engine] = cx.analyze(model, engine=engine).to_json()
    options = {"fast": True, "level": "percolation", "rule": "neyman", "correction": "holm", "null": "init"}
    outcome[f"{engine} options"] = cx.analyze(model, engine=engine, **options).to_json()
    try:
        cx.analyze(bad, engine=engine)
    except cx.CrystalliteError as error:
        outcome[f"{engine} error"] = type(error).__name__, str(error)


def printed_by_the_command(path):
    command = [sys.executable, "-m", "crystallite", "analyze", str(path), "--engine", "ray", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


if __name__ == "__main__":
    run_inside_the_namespace(Path(sys.argv[1]))
