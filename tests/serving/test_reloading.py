"""New versions that cannot be opened, whatever the reason, and more reloads than there is time for."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import crystallite as cx
from crystallite.models.manifest import weights_sha256, write_manifest
from crystallite.serving import Listener, Refusal, Service
from tests.helpers.artifacts import network, saved
from tests.helpers.http_client import answer, call, infer
from tests.helpers.served_process import served
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for

LOAD = "/v2/repository/models/small/load"


def edited(change):
    """A folder whose manifest was changed, and signed by whoever changed it."""

    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        write_manifest(folder, manifest)

    return damage


def infinite(manifest):
    for layer in manifest["modules"][""]["children"]["1"]["layers"]:
        layer.update(dict.fromkeys(("in_features", "out_features"), float("inf")), stacks=[[float("inf")] * 3])


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    edited(lambda manifest: manifest.update(weights_sha256=weights_sha256(folder), verdict=None))(folder)


def no_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


DAMAGES = {
    "an Infinity in the manifest": edited(infinite),
    "a flattening at infinity": edited(
        lambda m: m["modules"][""]["children"]["0"]["arguments"].update(start_dim=float("inf"))
    ),
    "weights that end early": cut_short,
    "a folder for a file": no_file,
    "no JSON": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
    "deep JSON": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
}


@pytest.fixture
def versions(tmp_path):
    """A link to a sound version, its model, and what points it at another one, which is damaged."""
    model, link = network(), tmp_path / "small"
    link.symlink_to(saved(model, tmp_path / "sound"))

    def damaged(damage):
        folder = saved(network(seed=1), tmp_path / "damaged")
        damage(folder)
        link.unlink()
        link.symlink_to(folder)

    return link, model, damaged


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_version_leaves_the_old_one(versions, damage, x):
    link, model, damaged = versions
    with Service.load(link) as service, Listener(service, port=0) as listener:
        damaged(damage)
        status, _, body = call(listener.url, LOAD, b"")
        assert status == 409
        assert len(body["error"]) > 20
        with pytest.raises(cx.CrystalliteError):
            service.reload("small")
        assert_close(answer(infer(listener.url, x)[2]), model(x).detach())
        assert 'crystallite_reloads_total{model="small",outcome="refused"} 2' in call(listener.url, "/metrics")[2]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("PytorchStreamReader failed"),
        OverflowError("cannot convert float infinity to integer"),
        RecursionError("too deep"),
        OSError(24, "Too many open files"),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_whatever_is_raised_leaves_the_old_version(folder, model, error, x, monkeypatch):
    with Service.load(folder) as service, Listener(service, port=0) as listener:

        def fail(*_):
            raise error

        monkeypatch.setattr(service, "_opened", fail)
        status, _, body = call(listener.url, LOAD, b"")
        assert status == 409
        assert type(error).__name__ in body["error"]
        with pytest.raises(Refusal, match=type(error).__name__):
            service.reload("small")
        assert_close(answer(infer(listener.url, x)[2]), model(x).detach())
        assert 'outcome="refused"} 2' in service.metrics.text({})


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_signal_for_a_damaged_version_does_not_end_the_server(versions, x):
    link, model, damaged = versions
    with served(link) as (process, url, _):
        damaged(DAMAGES["an Infinity in the manifest"])
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert "small stays as it is" in process.stderr.readline()
            assert_close(answer(infer(url, x)[2]), model(x).detach())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_reloads_wait_in_a_short_queue(folder, x, monkeypatch):
    with Service.load(folder) as service, Listener(service, port=0) as listener, ThreadPoolExecutor(20) as pool:
        gate, opened, begun = threading.Event(), service._opened, []

        def slow(*given):
            begun.append(given)
            assert gate.wait(PATIENCE)
            return opened(*given)

        monkeypatch.setattr(service, "_opened", slow)
        waiting = [pool.submit(call, listener.url, LOAD, b"") for _ in range(20)]
        wait_for(lambda: sum(done.done() for done in waiting) == 16)
        refused = [done.result() for done in waiting if done.done()]
        assert {status for status, _, _ in refused} == {429}
        assert all(int(headers["Retry-After"]) >= 1 for _, headers, _ in refused)
        assert len(begun) == 1  # one at a time
        assert infer(listener.url, x)[0] == 200
        gate.set()
        assert sorted(done.result()[0] for done in waiting) == [200] * 4 + [429] * 16


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_thousand_signals_are_few_reloads(folder, x):
    with served(folder) as (process, url, _):
        for _ in range(1000):
            os.kill(process.pid, signal.SIGHUP)
        assert process.stdout.readline().startswith("small: version ")
        assert infer(url, x)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert len(process.stdout.readlines()) < 500
