"""A server under attack: mixed requests of every kind that is refused, new versions that are damaged, and connections
that never ask.

`python -m benchmarks.attacks.requests [--count 20000]` starts `crystallite serve` with 256 descriptors, attacks it from
eight threads, and prints how each kind was answered, what the server's memory and descriptors did, and how long 300
connections that send nothing, or half of a header, kept others from an answer. Sound requests among them are compared
with the model. An answer counts as undocumented if its status is 5xx and not in docs/security.md and docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import numpy as np
import torch
from torch import nn

import crystallite as cx
from benchmarks.attacks.mutators import mutate_bytes
from benchmarks.server_process import SERVE, Server, started
from benchmarks.timing import show, store
from crystallite.models.manifest import attach_verdict, write_manifest
from crystallite.serving.grpc_messages import message

THREADS, TENTHS, FILES, HALF_OPEN, INPUTS = 8, 10, 256, 300, 12
PATIENCE, SHORT = 60.0, 1.2  # seconds: ends what hangs; after which one leaves whose request may have no end
DOCUMENTED = {503, 504}  # of 5xx
FAULTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "ABORTED", "no answer"}  # of gRPC, and of both
INFER = "POST /v2/models/small/infer HTTP/1.1"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def network(seed: int) -> nn.Sequential:
    """Two layers of two blocks each, their neurons in no order."""
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, 24), nn.Linear(24, 8)]
    for layer in layers:
        rows, columns = (torch.randperm(n) % 2 for n in layer.weight.shape)
        with torch.no_grad():
            layer.weight *= rows[:, None] == columns
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]).eval()


def saved(model: nn.Module, path: Path) -> Path:
    cx.save(cx.reorganize(model, level=None, only_if_faster=False, fold=False), path)
    attach_verdict(path, {"passed": True, "reasons": ["planted"]})
    return path


def http(head: str, body: bytes = b"", length: int | None = None, host: str = "localhost") -> bytes:
    size = len(body) if length is None else length
    return f"{head}\r\nHost: {host}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body


def tensor(x: torch.Tensor, **more: object) -> dict:
    return {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()} | more


def asked(*tensors: dict) -> bytes:
    return json.dumps({"inputs": list(tensors)}).encode()


class Attack:
    """Kinds of requests against one server: each method sends one and says how it was answered."""

    def __init__(
        self, server: Server, link: Path, versions: list[Path], damaged: Path, models: list[nn.Module]
    ) -> None:
        self.server, self.link, self.versions, self.damaged, self.models = server, link, versions, damaged, models
        self.channel = grpc.insecure_channel(server.grpc)
        self.seen: Counter[tuple[str, str]] = Counter()
        self.wrong, self.undocumented = 0, Counter[str]()
        self.left_open: list[socket.socket] = []
        self.lock = threading.Lock()  # on the link

    # what is sent

    def sound_json(self, rng: np.random.Generator) -> str:
        x = _x(rng)
        status, body = self._exchange(http(INFER, asked(tensor(x))))
        if status == "200":
            self._compare(x, torch.tensor(json.loads(body)["outputs"][0]["data"]))
        return status

    def sound_grpc(self, rng: np.random.Generator) -> str:
        x = _x(rng)
        code, answer = self._call(_message(x))
        if code is grpc.StatusCode.OK:
            found = message("ModelInferResponse").FromString(answer).raw_output_contents[0]
            self._compare(x, torch.frombuffer(bytearray(found), dtype=torch.float32))
        return code.name

    def pipelined(self, rng: np.random.Generator) -> str:
        """Several at once, with bodies that together are larger than headers may be; the last one closes."""
        body = asked(tensor(_x(rng, 64)))
        one = f"{INFER}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        status, rest = self._exchange(one * 7 + http(INFER, body))
        return status if status != "200" else f"200 × {1 + len(_STATUS.findall(rest))}"

    def mutated(self, rng: np.random.Generator) -> str:
        """A sound request with damaged bytes anywhere, headers included."""
        return self._exchange(mutate_bytes(rng, http(INFER, asked(tensor(_x(rng))))), SHORT)[0]

    def mutated_body(self, rng: np.random.Generator) -> str:
        return self._exchange(http(INFER, mutate_bytes(rng, asked(tensor(_x(rng))))))[0]

    def odd_tensors(self, rng: np.random.Generator) -> str:
        x = _x(rng)
        odd = [
            asked(tensor(x, shape=[1, INPUTS + 1])), asked(tensor(x, shape=[2**62, 2**62])),
            asked(tensor(x, shape=[-1])), asked(tensor(x, datatype="FP8")), asked(tensor(x, name="../../etc")),
            asked(tensor(x), tensor(x)),
            asked(tensor(x, data=[float("nan")] * INPUTS)), asked(tensor(x, data=[1e300] * INPUTS)), asked(),
            asked(tensor(x, data="x")), b"[" * 100_000, b"", b"\xff" * 100, b'{"inputs": null}',
            json.dumps({"inputs": [tensor(x)], "parameters": {"timeout": -5}}).encode(),
            asked(tensor(x, parameters={"binary_data_size": 2**40})),
        ]  # fmt: skip
        return self._exchange(http(INFER, odd[rng.integers(len(odd))]))[0]

    def headers(self, rng: np.random.Generator) -> str:
        body = asked(tensor(_x(rng)))
        odd = [
            http(f"{INFER}\r\nX-Large: {'x' * 70_000}", body),
            http(INFER + "".join(f"\r\nX-{i}: 1" for i in range(250)), body),
            http(f"{INFER}\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b", body),
            http(INFER, body, host="attacker.example"), http(f"{INFER}\r\nOrigin: http://attacker.example", body),
            http(f"{INFER}\r\nContent-Encoding: gzip", body), http(INFER, body[:10], length=10**12),
            http(f"{INFER}\r\nInference-Header-Content-Length: -1", body),
            http("POST /v2/models/none/infer HTTP/1.1", body),
            http("DELETE /v2 HTTP/1.1"), http(f"GET /{'a' * 70_000} HTTP/1.1"), http("GET /../../etc/passwd HTTP/1.1"),
            http(f"{INFER}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked", body),
            b"\x16\x03\x01" + body, b"\n" * 1000,
        ]  # fmt: skip
        return self._exchange(odd[rng.integers(len(odd))], SHORT)[0]

    def leaves(self, rng: np.random.Generator) -> str:
        """Goes away in the middle of a body, or before the answer."""
        whole = http(INFER, asked(tensor(_x(rng))))
        with suppress(OSError), self._connected() as one:
            one.sendall(whole[: rng.integers(1, len(whole) + 1)])
        return "left"

    def half_open(self, _rng: np.random.Generator) -> str:
        """Sends half of a header, and stays."""
        with suppress(OSError):
            one = self._connected()
            one.sendall(b"GET /v2 HTTP/1.1\r\nHost: lo")
            self.left_open.append(one)
        while len(self.left_open) > 100:
            with suppress(IndexError):
                self.left_open.pop(0).close()
        return "left open"

    def odd_grpc(self, rng: np.random.Generator) -> str:
        return self._call(mutate_bytes(rng, _message(_x(rng))))[0].name

    def grpc_noise(self, rng: np.random.Generator) -> str:
        """Bytes on the gRPC port that are no HTTP/2."""
        host, _, port = self.server.grpc.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), PATIENCE) as one:
            one.sendall(rng.bytes(int(rng.integers(1, 2000))))
        return "left"

    def damaged_version(self, rng: np.random.Generator) -> str:
        """A link to a folder with Infinity in its manifest, by `load` or by SIGHUP."""
        with self.lock:
            self._point_at(self.damaged)
            if rng.random() < 0.3:
                self.server.process.send_signal(signal.SIGHUP)
                time.sleep(0.05)
                status = "signal"
            else:
                status = self._exchange(http("POST /v2/repository/models/small/load HTTP/1.1"))[0]
            self._point_at(self.versions[0])
        return status

    def new_version(self, rng: np.random.Generator) -> str:
        with self.lock:
            self._point_at(self.versions[rng.integers(len(self.versions))])
            return self._exchange(http("POST /v2/repository/models/small/load HTTP/1.1"))[0]

    def reload_flood(self, _rng: np.random.Generator) -> str:
        with ThreadPoolExecutor(12) as pool:
            load = http("POST /v2/repository/models/other/load HTTP/1.1")
            found = list(pool.map(lambda _: self._exchange(load)[0], range(12)))
        return " ".join(sorted(set(found)))

    # how

    def run(self, kind: str, seed: int) -> None:
        status = getattr(self, kind)(np.random.default_rng(seed))
        self.seen[kind, status] += 1
        said = {int(word) for word in status.split() if word.isdigit()}
        if status in FAULTS or any(code >= 500 and code not in DOCUMENTED for code in said):
            self.undocumented[f"{kind}: {status}"] += 1

    def _compare(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            right = [model(x).flatten() for model in self.models]
        self.wrong += not any(torch.allclose(y.flatten(), own, rtol=1e-4, atol=1e-5) for own in right)

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), PATIENCE)

    def _exchange(self, sent: bytes, patience: float = PATIENCE) -> tuple[str, bytes]:
        """The first status and what came behind, until the server closes; "waits": for more than was sent."""
        received = b""
        try:
            with self._connected() as one:
                one.settimeout(patience)
                with suppress(BrokenPipeError, ConnectionResetError):
                    one.sendall(sent)
                while chunk := one.recv(1 << 16):
                    received += chunk
        except ConnectionResetError:
            pass
        except TimeoutError:
            if not received:
                return "waits" if patience < PATIENCE else "no answer", b""
        found = _STATUS.match(received)
        return ("closed" if found is None else found[1].decode()), received.partition(b"\r\n\r\n")[2]

    def _call(self, content: bytes) -> tuple[grpc.StatusCode, bytes]:
        try:
            return grpc.StatusCode.OK, self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                content, timeout=PATIENCE
            )
        except grpc.RpcError as error:
            return error.code(), b""

    def _point_at(self, folder: Path) -> None:
        new = self.link.with_name("next")
        new.symlink_to(folder)
        os.replace(new, self.link)


def _x(rng: np.random.Generator, samples: int = 1) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((samples, INPUTS), np.float32))


def _message(x: torch.Tensor) -> bytes:
    given = {"name": "input", "datatype": "FP32", "shape": list(x.shape)}
    content = {"model_name": "small", "inputs": [given], "raw_input_contents": [x.numpy().tobytes()]}
    sent: bytes = message("ModelInferRequest")(**content).SerializeToString()
    return sent


KINDS = {  # of a thousand
    "sound_json": 250, "sound_grpc": 100, "pipelined": 20, "mutated": 200, "mutated_body": 150, "odd_tensors": 100,
    "headers": 70, "leaves": 40, "half_open": 25, "odd_grpc": 25, "grpc_noise": 10, "damaged_version": 5,
    "new_version": 4, "reload_flood": 1,
}  # fmt: skip


def replayed(attack: Attack, count: int) -> list[dict]:
    """What the server holds after every tenth of the requests, and how they were answered."""
    rng = np.random.default_rng(0)
    kinds = rng.choice(list(KINDS), count, p=np.array(list(KINDS.values())) / sum(KINDS.values()))
    rows = []
    with ThreadPoolExecutor(THREADS) as pool:
        for tenth, part in enumerate(np.array_split(np.arange(count), TENTHS), 1):
            list(pool.map(lambda i: attack.run(str(kinds[i]), int(i)), part))
            while attack.left_open:
                attack.left_open.pop().close()
            time.sleep(1.0)
            rows.append({
                "requests": int(part[-1]) + 1, "resident MB": attack.server.resident() / 1e6,
                "descriptors": attack.server.descriptors(), "threads": attack.server.threads(),
                "wrong answers": attack.wrong, "undocumented": sum(attack.undocumented.values()),
                "runs": attack.server.process.poll() is None,
            })  # fmt: skip
            show(f"after {tenth} of {TENTHS} parts", rows[-1:])
    return rows


def half_open(attack: Attack) -> list[dict]:
    """How long others wait for answers while connections are open that send nothing, or half of a header."""
    host, _, port = attack.server.grpc.rpartition(":")
    ports = {"HTTP": attack.server.port, "gRPC": int(port)}
    rows = []
    for protocol, at in ports.items():
        for name, ask in (("HTTP", attack.sound_json), ("gRPC", _new_channel(attack))):
            quiet = _longest(ask, 5.0)
            with ExitStack() as stack:
                for i in range(HALF_OPEN):
                    one = stack.enter_context(socket.create_connection((host, at), PATIENCE))
                    with suppress(OSError):
                        one.sendall(b"GET /v2 HTTP/1.1\r\nHost: lo" if protocol == "HTTP" and i % 2 else b"")
                held = attack.server.descriptors()
                loaded = _longest(ask, 15.0)
            rows.append({
                "connections to": protocol, "others ask over": name, "longest wait before s": quiet[0],
                "longest wait s": loaded[0], "answers": loaded[1], "refused": loaded[2], "descriptors": held,
            })  # fmt: skip
            time.sleep(1.0)
    return rows


def _new_channel(attack: Attack) -> Callable[[np.random.Generator], str]:
    """A call of a client that has just come, and that does not wait longer each time, as channels do by themselves."""

    def ask(rng: np.random.Generator) -> str:
        with grpc.insecure_channel(attack.server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                call(_message(_x(rng)), timeout=1.0)
            except grpc.RpcError:
                time.sleep(0.2)
                return "refused"
        return "200"

    return ask


def _longest(ask: Callable[[np.random.Generator], str], seconds: float) -> tuple[float, int, int]:
    """The longest wait for an answer, repeated while it is refused; answers, refusals."""
    rng, until, longest, answers, refused = np.random.default_rng(1), time.monotonic() + seconds, 0.0, 0, 0
    while time.monotonic() < until:
        begun = time.monotonic()
        while ask(rng) != "200":
            refused += 1
        longest, answers = max(longest, time.monotonic() - begun), answers + 1
    return longest, answers, refused


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [network(seed) for seed in range(2)]
        versions = [saved(model, folder / f"v{i}") for i, model in enumerate(models)]
        damaged = saved(network(2), folder / "damaged")
        manifest = json.loads((damaged / "manifest.json").read_text())
        for layer in manifest["modules"][""]["children"]["0"]["layers"]:
            layer["in_features"] = float("inf")
        write_manifest(damaged, manifest)
        link = folder / "small"
        link.symlink_to(versions[0])
        words = [*SERVE, f"small={link}", f"other={versions[1]}", "--max-bytes", "1000000"]
        with started(words, files=FILES, errors=folder / "errors") as server:
            attack = Attack(server, link, versions, damaged, models)
            rows = replayed(attack, options.count)
            answers = [
                {"kind": kind, "answered": status, "requests": n} for (kind, status), n in sorted(attack.seen.items())
            ]
            show("how each kind was answered", answers)
            waits = half_open(attack)
            show(f"{HALF_OPEN} half-open connections, {FILES} descriptors", waits)
            runs = server.process.poll() is None
        lines = (folder / "errors").read_text().splitlines()
        growth = 100 * (rows[-1]["resident MB"] / rows[0]["resident MB"] - 1)
        total = {
            "requests": options.count, "server runs": runs, "exit code": server.process.returncode,
            "wrong answers": attack.wrong, "undocumented": dict(attack.undocumented),
            "memory growth after the first tenth %": growth, "lines on standard error": len(lines),
        }  # fmt: skip
        show("in all", [total])
        print("\n".join(lines[:5]))
    store("attack_requests", [*rows, *answers, *waits, total])


if __name__ == "__main__":
    main()
