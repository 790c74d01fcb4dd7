"""The service on a Ray cluster: the answers of the in-process engine, whatever dies, freezes, grows or is replaced.

Ray listens on every network interface, so all of it runs in a network namespace that has nothing but loopback; a
process namespace ends whatever was started. One cluster and one service are shared by all tests; the scenarios are
those of `benchmarks/ray_scenarios.py`, which are also timed.
"""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.namespace import NAMESPACE
from benchmarks.ray_load import AT_ONCE, CLOSE
from benchmarks.ray_scenarios import HEAVY, LIGHT
from benchmarks.serving_forms import FORMS


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """Runs a scenario on the shared cluster and returns what happened."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("fastapi") is None:
        pytest.skip("Ray Serve is not installed: pip install 'crystallite[ray]'")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("Ray is tested in a namespace of its own, which `unshare` may not make here")
    folder = tmp_path_factory.mktemp("ray")
    with tempfile.TemporaryDirectory() as short, open(folder / "errors", "w+") as errors:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "RAY_TMPDIR": short,  # paths of Unix sockets hold 107 bytes
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_worker_niceness": "0",  # of 15, workers hardly run where others keep the machine busy
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of 5 a busy machine takes more, and the proxy is killed
            "OMP_NUM_THREADS": "1",
        }
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks.ray_scenarios", str(folder)]
        with subprocess.Popen(
            command, env=environment, cwd=Path(__file__).parents[2], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        ) as process:  # fmt: skip

            def run(scenario, **options):
                process.stdin.write(f"{scenario} {json.dumps(options)}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                assert line, Path(errors.name).read_text()[-5000:]
                found = json.loads(line)
                assert "outcome" in found, found
                print(scenario, json.dumps(found["outcome"], indent=1))
                return found["outcome"]

            yield run
            process.kill()


def assert_nothing_lost(found, requests):
    assert (found["wrong"], found["lost"], found["right"]) == (0, {}, requests)


def test_answers_are_those_of_the_in_process_engine(ray):
    found = ray("answers")
    assert found["nodes"] == 2
    assert max(found["differences"].values()) <= CLOSE
    assert found["bad"] == 400
    assert found["bounds"] == {HEAVY: [2, 3], LIGHT: [1, 1]}
    assert found["replicas"] == {HEAVY: {"RUNNING": 2}, LIGHT: {"RUNNING": 1}, "transform": {"RUNNING": 1}}
    assert found["applications"] == 2


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_no_request(ray):
    assert_nothing_lost(ray("kill_a_replica", requests=1000), 1000)


@pytest.mark.slow
def test_the_only_replica_that_is_killed_costs_no_request(ray):
    assert_nothing_lost(ray("kill_the_only_replica"), 1000)


@pytest.mark.slow
def test_a_replica_that_freezes_costs_no_request(ray):
    assert_nothing_lost(ray("freeze_a_replica"), 1000)


@pytest.mark.slow
def test_a_transform_replica_that_is_killed_loses_only_what_it_held(ray):
    found = ray("kill_the_transform_replica")
    assert found["wrong"] == 0
    assert sum(found["lost"].values()) <= AT_ONCE
    assert found["right"] + sum(found["lost"].values()) == 1500


@pytest.mark.slow
def test_a_node_that_is_killed_makes_no_wrong_answer(ray):
    found = ray("kill_the_node")
    assert found["victims"]
    assert found["wrong"] == 0
    assert found["right"] + sum(found["lost"].values()) == 2000
    assert found["right"] > 1000


@pytest.mark.slow
def test_load_on_a_piece_gives_it_replicas_and_others_none(ray):
    found = ray("grow_and_shrink")
    assert found["most"] == 3
    assert found["light and transform"] == [[1, 1]]
    assert found["after"][HEAVY] == {"RUNNING": 2}
    assert (found["wrong"], found["lost"]) == (0, {})


@pytest.mark.slow
def test_a_new_version_takes_over_without_a_lost_request(ray):
    found = ray("bring_a_new_version")
    assert_nothing_lost(found, 1500)
    assert found["new"] <= CLOSE


@pytest.mark.slow
def test_a_version_that_cannot_be_opened_leaves_the_old_one(ray):
    found = ray("bring_a_broken_version")
    assert len(found["errors"]) == 3
    assert "MemoryError" in found["errors"][1]
    assert "PytorchStreamReader failed" in found["errors"][2]
    assert found["right"]
    assert found["whole"]


@pytest.mark.slow
def test_a_replica_does_not_serve_other_weights_than_were_planned_with(ray):
    found = ray("plan_with_other_weights")
    assert "is not the one that was planned with" in found["error"]
    assert found["whole"]


@pytest.mark.slow
def test_the_cluster_is_closed_to_others(ray):
    found = ray("join_without_the_token")
    assert found["code"] != 0
    assert "uthentication" in found["error"]


@pytest.mark.slow
def test_the_transform_tier_may_stay_in_this_process(ray):
    found = ray("serve_in_process")
    assert found["difference"] <= CLOSE
    assert found["again"] <= CLOSE
    assert found["pieces"] == [HEAVY, LIGHT]
    assert found["left"] == []


@pytest.mark.slow
def test_the_command_serves_on_ray(ray):
    found = ray("run_the_command")
    assert found["line"].startswith("http://127.0.0.1:8000/v2/models/small ")
    assert found["difference"] <= CLOSE
    assert found["code"] == 0
    assert found["left"] == []
    (line,) = map(json.loads, found["log"])
    assert (line["call"], line["status"], line["samples"]) == ("infer", 200, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_cut_and_loses_nothing_when_a_replica_is_killed(ray, name):
    found = ray("serve_form", name=name)
    assert found["pieces"] == FORMS[name].pieces
    assert max(found[where] for where in ("in process", "on Ray", "on Ray afterwards")) <= CLOSE
    assert_nothing_lost(found, 300)
