"""A decoder fitted on two nodes of a Ray cluster, whose actors are killed meanwhile, becomes what it does without Ray.

Ray listens on every network interface, so it runs in a network namespace that has nothing but loopback. A process
namespace ends whatever it started. `python -m tests.compression.test_ray_engine FOLDER` is what runs inside: the runs
that the file FOLDER/runs names.
"""

import contextlib
import functools
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


def outcome(folder, *runs):
    """What the runs inside the namespace gave, by name."""
    (folder / "runs").write_text(" ".join(runs))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder / "dense")
    printed, left = run_in_namespace("tests.compression.test_ray_engine", folder)
    print(printed)
    assert not [name for name in left if name.startswith("crystallite-")]  # nothing stays on the nodes
    return json.loads((folder / "outcome.json").read_text())


def test_the_result_is_that_of_one_machine(tmp_path):
    assert outcome(tmp_path, "ray")["shares"] == 2
    assert_as_on_one_machine(tmp_path, "ray")


@pytest.mark.slow
def test_actors_that_are_killed_change_nothing(tmp_path):
    found = outcome(tmp_path, "killed")
    assert found["killed before"] == sorted(step.__name__ for step, _ in LOST)
    assert found["killed inside"] == ["moments"]
    assert_as_on_one_machine(tmp_path, "killed")


@pytest.mark.slow
def test_either_engine_goes_on_where_the_other_stopped(tmp_path):
    outcome(tmp_path, "resumed")
    assert_as_on_one_machine(tmp_path, "resumed")


def assert_as_on_one_machine(folder, name):
    for budget in BUDGETS:
        folders = [folder / one / str(budget) for one in ("local", name)]
        assert largest_difference(*map(weights, folders)) < 1e-4
        local, here = (cx.record(cx.load(folder)) for folder in folders)
        assert here.options.held_out_error == pytest.approx(local.options.held_out_error, rel=1e-3)
        assert [c.error for c in here.changes] == [c.error and pytest.approx(c.error, rel=1e-3) for c in local.changes]
        for one, other in zip(local.options.inputs, here.options.inputs, strict=True):
            assert (other.layer, other.usual) == (one.layer, pytest.approx(one.usual, rel=1e-3))
            assert other.mean == pytest.approx(one.mean, abs=1e-4)


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
    runs = {"ray": count_shares, "killed": kill_actors, "resumed": stop_and_go_on}
    outcome = {}
    for name in (folder / "runs").read_text().split():
        outcome |= runs[name](functools.partial(compress, name))
        found = [largest_difference(*(weights(folder / one / str(b)) for one in ("local", name))) for b in BUDGETS]
        print(f"{name}: largest difference of a weight to one machine, of the largest in its tensor: {max(found):.1e}")
    ray.shutdown()
    cluster.shutdown()
    (folder / "outcome.json").write_text(json.dumps(outcome))


def count_shares(compress):
    seen = set()

    def each(self, step, *given, **named):
        seen.add(len(self._actors))
        return plain(self, step, *given, **named)

    with instead_of_each_step(each) as plain:
        compress("ray")
    return {"shares": max(seen)}


def kill_actors(compress):
    """One before each kind of step, and one inside a step."""
    left, before, inside = set(LOST), [], []

    def kill_meanwhile(pid, place, name):
        wait_for(lambda: [*Path(place).glob("read-*")])
        os.kill(pid, signal.SIGKILL)
        inside.append(name)

    def each(self, step, *given, **named):
        layer = given[1] if step in (Share.moments, Share.add, Share.finish) else given[0]
        where = plain(self, os_pid)
        (pid, place), thread = where[len(left) % len(where)], None
        if (step, layer) in left:
            left.remove((step, layer))
            os.kill(pid, signal.SIGKILL)
            before.append(step.__name__)
        elif step is Share.moments and layer == 2 and not inside:
            thread = threading.Thread(target=kill_meanwhile, args=(pid, place, step.__name__))
            thread.start()
        found = plain(self, step, *given, **named)
        if thread is not None:
            thread.join()
        return found

    with instead_of_each_step(each) as plain:
        compress("ray")
    return {"killed before": sorted(before), "killed inside": inside}


def stop_and_go_on(compress):
    def stop(self, step, *given, **named):
        if step is Share.add and given[1] == 1:
            raise KeyboardInterrupt
        return plain(self, step, *given, **named)

    with instead_of_each_step(stop) as plain, contextlib.suppress(KeyboardInterrupt):
        compress("ray")
    compress("local")
    return {}


@contextlib.contextmanager
def instead_of_each_step(function):
    plain = ray_engine._RayShares.each
    ray_engine._RayShares.each = function
    try:
        yield plain
    finally:
        ray_engine._RayShares.each = plain


def os_pid(share):
    return os.getpid(), str(share.work.folder)


if __name__ == "__main__":
    run_inside_the_namespace(Path(sys.argv[1]))
