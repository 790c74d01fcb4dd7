"""On Ray as without it: the same rows, errors and kept results, from a cluster of two nodes or from none.

Ray listens on every network interface, so it runs in a network namespace that has nothing but loopback. A process
namespace ends whatever it started. `python -m tests.analysis.test_ray_engine FOLDER` is what runs inside.
"""

import fcntl
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx

NAMESPACE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.geteuid():
    NAMESPACE.insert(1, "--map-root-user")
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else is in the namespace, and a token would be written to the home folder
}
OBJECT_STORE_BYTES = 80 << 20  # near the least that Ray accepts
SECONDS = 150  # several times what it takes on two cores


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the runs inside the namespace gave, by name."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'crystallite[ray]'")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("Ray is tested in a namespace of its own, which `unshare` may not make here")
    folder = tmp_path_factory.mktemp("ray")
    write_checkpoints(folder)
    with tempfile.TemporaryDirectory() as short:  # paths of Unix sockets hold 107 bytes
        command = [*NAMESPACE, sys.executable, "-m", "tests.analysis.test_ray_engine", str(folder)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | RAY | {"RAY_TMPDIR": short}
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=SECONDS
        )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "outcome.json").read_text())


def test_two_nodes_give_the_rows_of_one_process(outcome):
    assert outcome["nodes"] == 2
    assert [row["kind"] for row in outcome["local"]["matrices"]] == EXPECTED_KINDS
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


def test_the_command_joins_a_cluster_or_starts_one(outcome):
    assert outcome["command in a cluster"] == outcome["command without a cluster"] == outcome["local"]


def test_the_command_says_in_one_line_what_is_wrong(outcome):
    code, lines = outcome["command error"]
    assert code == 1
    assert [line for line in lines if line.startswith("crystallite: a: expected finite numbers")]
    assert not [line for line in lines if "Traceback" in line]


EXPECTED_KINDS = ["linear", "linear", "conv", "recurrent", "recurrent feedback"]


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

    bad = {"a.weight": torch.randn(1500, 1500), "b.weight": torch.randn(16, 16), "c.weight": torch.randn(16, 16)}
    bad["a.weight"][-1, -1] = bad["b.weight"][3, 4] = float("nan")  # the later one is found sooner
    save_file(bad, folder / "bad.safetensors")


def run_inside_the_namespace(folder):
    import ray
    from ray.cluster_utils import Cluster

    model, bad, kept = folder / "model", folder / "bad.safetensors", folder / "kept.jsonl"
    bring_loopback_up()
    outcome = {}
    for engine in ("local", "ray"):
        if engine == "ray":
            size = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
            cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
            cluster.add_node(**size)
            ray.init(cluster.address, log_to_driver=False)
            outcome["nodes"] = sum(node["Alive"] for node in ray.nodes())
        outcome[engine] = cx.analyze(model, engine=engine).to_json()
        options = {"fast": True, "level": "percolation", "rule": "neyman", "correction": "holm", "null": "init"}
        outcome[f"{engine} options"] = cx.analyze(model, engine=engine, **options).to_json()
        outcome[f"{engine} error"] = error_of(lambda engine=engine: cx.analyze(bad, engine=engine))

    cx.analyze(model, engine="local", include=["half", "gru*"], resume=kept)
    outcome["resumed on ray"] = cx.analyze(model, engine="ray", resume=kept).to_json()
    outcome["resumed locally"] = cx.analyze(model, engine="local", resume=kept).to_json()
    outcome["kept"] = [json.loads(line)["row"]["name"] for line in kept.read_text().splitlines()]

    ray.shutdown()
    os.environ["RAY_ADDRESS"] = cluster.address
    outcome["command in a cluster"] = json.loads(command(model).stdout)
    done = command(bad)
    outcome["command error"] = done.returncode, done.stderr.splitlines()
    del os.environ["RAY_ADDRESS"]
    cluster.shutdown()
    outcome["command without a cluster"] = json.loads(command(model).stdout)
    (folder / "outcome.json").write_text(json.dumps(outcome))


def bring_loopback_up():
    """`ip link set lo up`, which not every machine has."""
    read_flags, write_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, read_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, write_flags, struct.pack("16sh14x", b"lo", flags | up))


def error_of(call):
    try:
        call()
    except cx.CrystalliteError as error:
        return type(error).__name__, str(error)


def command(path):
    arguments = ["-m", "crystallite.cli", "analyze", str(path), "--engine", "ray", "--json"]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


if __name__ == "__main__":
    run_inside_the_namespace(Path(sys.argv[1]))
