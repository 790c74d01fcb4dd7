"""`crystallite serve`: plans, the end by SIGTERM, new versions by SIGHUP, and one line on bad input."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from crystallite.cli.main import main
from tests.helpers.artifacts import network, saved
from tests.helpers.http_client import answer, call, infer
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for


def run(*arguments):
    return main(["serve", *map(str, arguments)])


@contextmanager
def served(*arguments):
    """A server in a process of its own, and where it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "crystallite", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            found = re.match(r"(http://127\.0\.0\.1:\d+)/v2/models/(\S+) ", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


def test_plan(folder, capsys):
    assert run(folder, "--plan") == 0
    assert "a hop costs" in capsys.readouterr().out
    assert run(folder, "--plan", "--json", "--batch", 100_000_000) == 0
    found = json.loads(capsys.readouterr().out)["small"]
    assert [len(stage["pieces"]) for stage in found["stages"]] == [0, 4, 0]


def test_sigterm_answers_what_was_accepted(tmp_path, model, x):
    path = saved(model, tmp_path / "small", passed=None)
    long = ("--max-wait", PATIENCE, "--timeout", PATIENCE)
    with (
        served(path, "--unvalidated", *long, "--max-batch", 1000) as (process, url),
        ThreadPoolExecutor(20) as pool,
    ):
        accepted = [pool.submit(infer, url, x + i) for i in range(20)]
        wait_for(lambda: re.search(r'queue_requests{model="small"} 20\b', call(url, "/metrics")[2]))
        process.send_signal(signal.SIGTERM)
        for i, done in enumerate(accepted):
            status, _, body = done.result()
            assert status == 200
            assert_close(answer(body), model(x + i).detach())
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
        with pytest.raises(ConnectionError):
            call(url, "/v2")


def test_sighup_brings_a_new_version_or_keeps_the_old(tmp_path, x):
    models = [network(seed=seed) for seed in (0, 1)]
    link = tmp_path / "small"
    link.symlink_to(saved(models[0], tmp_path / "v0"))
    with served(link) as (process, url):
        assert_close(answer(infer(url, x)[2]), models[0](x).detach())
        link.unlink()
        link.symlink_to(saved(models[1], tmp_path / "v1"))
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline().startswith("small: version ")
        assert_close(answer(infer(url, x)[2]), models[1](x).detach())
        link.unlink()
        process.send_signal(signal.SIGHUP)
        assert "small stays as it is" in process.stderr.readline()
        assert_close(answer(infer(url, x)[2]), models[1](x).detach())
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_two_ports_and_a_log(folder, model, x):
    grpc = pytest.importorskip("grpc", reason="needs grpcio")
    from tests.helpers import grpc_client

    with served(folder, "--grpc-port", 0, "--log", "json") as (process, url):
        target = process.stdout.readline().strip().removeprefix("grpc://")
        assert_close(answer(infer(url, x, id="first")[2]), model(x).detach())
        with grpc.insecure_channel(target) as channel:
            assert grpc_client.infer(channel, grpc_client.request(x, "small", id="second"))[0] == grpc.StatusCode.OK
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        lines = [json.loads(line) for line in process.stderr]
    assert [(line["protocol"], line["status"], line["request_id"]) for line in lines] == [
        ("http", 200, "first"),
        ("grpc", 200, "second"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "needs a token"),
        (["--max-batch", 0], "--max-batch: expected at least 1"),
        (["--batch", 0], "--batch"),
        (["--original", "no such"], "package.module:factory"),
        (["--tls-cert", "server.pem"], "--tls-cert needs --tls-key"),
        (["--tls-cert", "no.pem", "--tls-key", "no.key"], "expected a certificate"),
    ],
)
def test_bad_options(folder, arguments, message, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert run(folder, *arguments) == 2
    assert message in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_models_of_one_name(folder, capsys):
    assert run(folder, folder) == 2
    assert "two models are called small" in capsys.readouterr().err


def test_models_need_a_verdict(tmp_path, capsys):
    assert run(saved(network(), tmp_path / "small", passed=None)) == 2
    assert "never validated" in capsys.readouterr().err
