"""A decoder fitted on two nodes of a Ray cluster, whose actors are killed meanwhile, becomes what it does without Ray.

Ray listens on every network interface, so it runs in a network namespace that has nothing but loopback. A process
namespace ends whatever it started. `python -m tests.compression.test_ray_engine FOLDER` is what runs inside.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from benchmarks.namespace import OBJECT_STORE_BYTES, bring_loopback_up
from safetensors.torch import load_file

import crystallite as cx
from crystallite.compression.decoders import ray_engine
from crystallite.compression.decoders.shares import Share
from tests.helpers.ray_namespace import run_in_namespace
from tests.helpers.waiting import wait_for

transformers = pytest.importorskip("transformers")

BUDGETS = (0.8, 0.7)
SIZES = {
    **{"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 160, "max_position_embeddings": 64},
}
LOST = {(Share.probe, 1), (Share.add, 1), (Share.finish, 2)}  # before these steps of a layer an actor is killed


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the runs inside the namespace gave, by name."""
    folder = tmp_path_factory.mktemp("ray")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder / "dense")
    printed, left = run_in_namespace("tests.compression.test_ray_engine", folder)
    print(printed)
    assert not [name for name in left if name.startswith("crystallite-")]  # nothing stays on the nodes
    return {"folder": folder, **json.loads((folder / "outcome.json").read_text())}


@pytest.mark.parametrize("name", ["ray", "killed", "resumed"])
def test_the_result_is_that_of_one_machine(outcome, name):
    assert outcome["shares"] == 2
    for budget in BUDGETS:
        folders = [outcome["folder"] / one / str(budget) for one in ("local", name)]
        assert largest_difference(*map(weights, folders)) < 1e-4
        local, here = (cx.record(cx.load(folder)) for folder in folders)
        assert here.options.held_out_error == pytest.approx(local.options.held_out_error, rel=1e-3)
        assert [c.error for c in here.changes] == [c.error and pytest.approx(c.error, rel=1e-3) for c in local.changes]
        for one, other in zip(local.options.inputs, here.options.inputs, strict=True):
            assert (other.layer, other.usual) == (one.layer, pytest.approx(one.usual, rel=1e-3))
            assert other.mean == pytest.approx(one.mean, abs=1e-4)


def test_actors_were_killed_at_every_kind_of_step(outcome):
    assert outcome["killed before"] == sorted(step.__name__ for step, _ in LOST)
    assert outcome["killed inside"] == ["moments"]


def weights(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def largest_difference(expected, found):
    """Of any weight, as a share of the largest one in its tensor."""
    assert {name: value.shape for name, value in expected.items()} == {name: v.shape for name, v in found.items()}
    return max(
        float((found[name].double() - value.double()).abs().max() / value.double().abs().max().clamp_min(1e-30))
        for name, value in expected.items()
    )


def run_inside_the_namespace(folder):
    import ray
    from ray.cluster_utils import Cluster

    bring_loopback_up()
    torch.set_num_threads(1)
    outcome = {}

    def compress(name, engine):
        x = torch.randint(1, 120, (48, 32), generator=torch.Generator().manual_seed(0))
        parts = [{"input_ids": part} for part in x.split(6)]
        cx.compress_folder(folder / "dense", parts, folder / name, budget=BUDGETS, engine=engine)

    compress("local", "local")
    size = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
    cluster.add_node(**size)
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(log_to_driver=False)
    compress("ray", "ray")

    plain = ray_engine._RayShares.each
    left, outcome["killed before"], outcome["killed inside"] = set(LOST), [], []

    def kill_meanwhile(pid, place, name):
        wait_for(lambda: [*Path(place).glob("read-*")])
        os.kill(pid, signal.SIGKILL)
        outcome["killed inside"].append(name)

    def each(self, step, *given, **named):
        outcome["shares"] = len(self._actors)
        layer = given[1] if step in (Share.moments, Share.add, Share.finish) else given[0]
        where = plain(self, os_pid)
        (pid, place), thread = where[len(left) % len(where)], None
        if (step, layer) in left:
            left.remove((step, layer))
            os.kill(pid, signal.SIGKILL)
            outcome["killed before"].append(step.__name__)
        elif step is Share.moments and layer == 2 and not outcome["killed inside"]:
            thread = threading.Thread(target=kill_meanwhile, args=(pid, place, step.__name__))
            thread.start()
        found = plain(self, step, *given, **named)
        if thread is not None:
            thread.join()
        return found

    ray_engine._RayShares.each = each
    compress("killed", "ray")
    outcome["killed before"].sort()

    def stop(self, step, *given, **named):
        if step is Share.add and given[1] == 1:
            raise KeyboardInterrupt
        return plain(self, step, *given, **named)

    ray_engine._RayShares.each = stop  # then another engine goes on, and after it the first
    for engine in ("ray", "local"):
        try:
            compress("resumed", engine)
        except KeyboardInterrupt:
            assert engine == "ray"
    ray.shutdown()
    cluster.shutdown()
    for name in ("ray", "killed", "resumed"):
        found = [largest_difference(*(weights(folder / one / str(b)) for one in ("local", name))) for b in BUDGETS]
        print(f"{name}: largest difference of a weight to one machine, of the largest in its tensor: {max(found):.1e}")
    (folder / "outcome.json").write_text(json.dumps(outcome))


def os_pid(share):
    return os.getpid(), str(share.work.folder)


if __name__ == "__main__":
    run_inside_the_namespace(Path(sys.argv[1]))
