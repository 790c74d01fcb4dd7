"""`crystallite serve`: plans, the end by SIGTERM, new versions by SIGHUP, and one line on bad input."""

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from crystallite.cli.main import main
from crystallite.models.manifest import read_manifest
from tests.helpers.artifacts import network, saved
from tests.helpers.http_client import answer, call, infer
from tests.helpers.served_process import served
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for


def run(*arguments):
    return main(["serve", *map(str, arguments)])


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
        served(path, "--unvalidated", *long, "--max-batch", 1000) as (process, url, _),
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
    with served(link) as (process, url, _):
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


def test_a_trial(tmp_path, x):
    """The original from code, a verdict after three requests, written into the folder, and then the switch."""
    code = tmp_path / "models.py"
    code.write_text("from tests.helpers.artifacts import network as build\n")
    path = saved(network(), tmp_path / "small", passed=None)
    more = ("--trial", f"{code}:build", "--trial-requests", 3, "--attach-verdict", "--max-relative-deviation", 0.01)
    with served(path, *more) as (process, url, _):
        for _ in range(3):
            assert_close(answer(infer(url, x)[2]), network()(x).detach())
        assert "small: the trial passed" in process.stderr.readline()
        wait_for(lambda: read_manifest(path)["verdict"] is not None)
        switch = json.dumps({"answer_from": "reorganized"})
        assert call(url, "/v2/models/small/trial", switch)[2]["answer_from"] == "reorganized"
        assert_close(answer(infer(url, x)[2]), network()(x).detach())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_two_ports_and_a_log(folder, model, x):
    grpc = pytest.importorskip("grpc", reason="needs grpcio")
    from tests.helpers import grpc_client

    with served(folder, "--grpc-port", 0, "--log", "json") as (process, url, said):
        target = re.search(r"grpc://(\S+)", said)[1]
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
        (["--trial-requests", 5], "--trial-requests needs --trial"),
        (["--trial", "torch.nn:Identity", "--engine", "ray"], "--trial: both systems run in one process"),
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
    assert "never validated; run crystallite validate, or pass --unvalidated" in capsys.readouterr().err
