"""The protocol over HTTP: what is wrong is said with a 4xx, and the server stays up."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import torch
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import crystallite as cx
from crystallite.serving import Limits, Listener, Service
from tests.helpers.artifacts import TOGETHER, network, saved
from tests.helpers.http_client import TOKEN, Slow, answer, call, infer, request
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE, wait_for


@pytest.fixture
def alive(url, model, x):
    """Whatever a test sent, the server answers afterwards."""
    yield
    status, _, body = infer(url, x)
    assert status == 200
    assert_close(answer(body), model(x).detach())


def test_health_and_metadata(url, service):
    version = service.models["small"].version
    paths = [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/small/ready",
        f"/v2/models/small/versions/{version}/ready",
    ]
    assert [call(url, path)[0] for path in paths] == [200] * 4
    assert call(url, "/v2")[2]["name"] == "crystallite"
    assert call(url, "/v2/models/small")[2] == {
        "name": "small",
        "versions": [version],
        "platform": "crystallite",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 12]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 8]}],
    }
    assert call(url, "/v2/repository/index", b"")[2] == [
        {"name": "small", "version": version, "state": "READY", "reason": ""}
    ]


def test_answers(url, model, x):
    status, _, body = infer(url, x, id="seven")
    assert status == 200
    assert body["id"] == "seven"
    assert_close(answer(body), model(x).detach())


def test_answers_do_not_wait_for_acknowledgements(folder, x, monkeypatch):
    """Nagle's algorithm would hold the second part of an answer back until the client confirms the first."""
    found = []

    def connection_made(self, transport):
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    made = HttpToolsProtocol.connection_made
    monkeypatch.setattr(HttpToolsProtocol, "connection_made", connection_made)
    with Service.load(folder) as service, Listener(service, port=0) as listener:
        assert infer(listener.url, x)[0] == 200
    assert found == [1]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/large", 404, "no model 'large'; there are small"),
        ("/v2/models/small/versions/9", 404, "small has version"),
        ("/v2/models/large/ready", 404, "no model"),
        ("/nowhere", 404, "/nowhere"),
        ("/v2/models/small/", 404, "Not Found"),  # and not sent on to where the Host header says
        ("/v2/models/small/infer", 405, "GET"),
        ("/v2/../../etc/passwd", 404, "passwd"),
    ],
)
@pytest.mark.usefixtures("alive")
def test_paths(url, path, status, message):
    found, _, body = call(url, path)
    assert found == status
    assert message in body["error"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{", {}, 400, "JSON"),
        (b"\x00" * 100, {"Inference-Header-Content-Length": "10"}, 400, "JSON"),
        (b"{}", {"Inference-Header-Content-Length": "999"}, 400, "Inference-Header-Content-Length"),
        (request(torch.zeros(1, 11)), {}, 400, "expected shape [samples, 12], got [1, 11]"),
        (request(torch.zeros(1, 12)).replace("FP32", "FP16"), {}, 400, "expected datatype FP32"),
        (request(torch.full((1, 12), torch.nan)), {}, 400, "finite"),
        (b"\x1f\x8b", {"Content-Encoding": "gzip"}, 415, "compression"),
    ],
)
@pytest.mark.usefixtures("alive")
def test_bad_requests(url, body, headers, status, message):
    found, _, answered = call(url, "/v2/models/small/infer", body, headers=headers)
    assert found == status
    assert message in answered["error"]


@pytest.mark.usefixtures("alive")
def test_headers_that_are_too_large(url):
    with suppress(ConnectionError):  # the rest of them is not read, so the answer may be lost on its way
        assert call(url, "/v2", headers={"X": "x" * 200_000})[0] in (400, 431)


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
@pytest.mark.usefixtures("alive")
def test_headers_without_an_end(url, start):
    chunk = b"X: x\r\n" * 1000 if start.endswith(b"\n") else b"x" * 6000
    sent = 0
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=PATIENCE) as connection:
        with suppress(ConnectionError):
            connection.sendall(start)
            while sent < 50_000_000:
                connection.sendall(chunk)
                sent += len(chunk)
        with suppress(ConnectionError):  # what was said may be lost, as the server does not read on
            assert connection.recv(4096)[9:12] in (b"431", b"")
    assert sent < 50_000_000


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01 not http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50, b"POST /v2"]
)
@pytest.mark.usefixtures("alive")
def test_what_is_not_http(url, raw):
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=PATIENCE) as connection:
        connection.sendall(raw)


@pytest.mark.parametrize("chunked", [True, False])
def test_bodies_that_are_too_large(folder, x, chunked):
    with Service.load(folder, limits=Limits(max_bytes=2000)) as service, Listener(service, port=0) as listener:
        body = (b"[" * 1000 for _ in range(5)) if chunked else b"[" * 5000
        status, _, answered = call(listener.url, "/v2/models/small/infer", body)
        assert status == 413
        assert "2000 bytes" in answered["error"]
        assert infer(listener.url, x)[0] == 200


def test_bodies_that_do_not_come(folder):
    with Service.load(folder, limits=Limits(timeout=0.2)) as service, Listener(service, port=0) as listener:
        with socket.create_connection(("127.0.0.1", urlsplit(listener.url).port), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
            )
            assert b" 408 " in connection.recv(4096)
        assert call(listener.url, "/v2/health/live")[0] == 200


@pytest.fixture
def slow(folder):
    """A server whose only piece waits, and the piece."""
    limits = Limits(max_queue=2, max_batch=1)
    with Service.load(folder, machine=TOGETHER, limits=limits) as service, Listener(service, port=0) as listener:
        pieces = service.models["small"].engine._pieces
        pieces["model"] = piece = Slow(pieces["model"])
        try:
            yield listener.url, piece, service
        finally:
            piece.gate.set()


def test_a_full_queue(slow, x):
    url, piece, service = slow
    with ThreadPoolExecutor(3) as pool:
        accepted = [pool.submit(infer, url, x)]
        wait_for(lambda: piece.calls == 1)
        accepted += [pool.submit(infer, url, x) for _ in range(2)]
        wait_for(lambda: service.models["small"].batcher.waiting == 2)
        assert 'crystallite_queue_requests{model="small"} 2' in call(url, "/metrics")[2]
        status, headers, body = infer(url, x)
        assert status == 429
        assert int(headers["Retry-After"]) >= 1
        assert "2 requests wait" in body["error"]
        piece.gate.set()
        assert [done.result()[0] for done in accepted] == [200] * 3
    assert 'crystallite_requests_total{model="small",status="429"} 1' in call(url, "/metrics")[2]


def test_a_deadline(slow, x):
    url, piece, _ = slow
    status, _, body = infer(url, x, parameters={"timeout": 100_000})
    assert status == 504
    assert "0.1 s" in body["error"]
    piece.gate.set()
    assert infer(url, x)[0] == 200


def test_a_client_that_hangs_up_is_not_computed(slow, x):
    url, piece, service = slow
    waiting = service.models["small"].batcher
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(infer, url, x)
        wait_for(lambda: piece.calls == 1)
        content = request(x)
        head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=PATIENCE) as connection:
            connection.sendall((head + content).encode())
            wait_for(lambda: waiting.waiting == 1)
        wait_for(lambda: waiting.waiting == 0)
        piece.gate.set()
        assert busy.result()[0] == 200
    assert piece.calls == 1
    assert 'status="499"} 1' in call(url, "/metrics")[2]


def test_a_piece_that_fails(folder, x):
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise MemoryError("no room")

    with Service.load(folder, machine=TOGETHER) as service, Listener(service, port=0) as listener:
        pieces = service.models["small"].engine._pieces
        whole = pieces["model"]
        pieces["model"] = Broken()
        status, headers, body = infer(listener.url, x)
        assert status == 503
        assert headers["Retry-After"]
        assert "piece model of small failed 3 times" in body["error"]
        pieces["model"] = whole
        assert infer(listener.url, x)[0] == 200


def test_tokens(folder, x):
    with Service.load(folder) as service, Listener(service, port=0, token=TOKEN) as listener:
        url = listener.url
        for headers in [
            {},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer \xff"},
        ]:
            for path, body in [("/v2", None), ("/metrics", None), ("/v2/models/small/infer", request(x))]:
                status, given, answered = call(url, path, body, headers=headers)
                assert status == 401
                assert given["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in answered["error"]
        assert call(url, "/v2/health/live")[0] == 200
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        assert call(url, "/v2/models/small/infer", request(x), headers=allowed)[0] == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "needs a token"),
        ({"host": "::"}, "needs a token"),
        ({"host": "example.org"}, "needs a token"),
        ({"token": "short"}, "16 printable"),
        ({"token": "a token\nwith two lines"}, "16 printable"),
    ],
)
def test_doors_that_stay_shut(service, options, message):
    with pytest.raises(cx.InvalidOption, match=message):
        Listener(service, port=0, **options)


def test_reloading_over_http(tmp_path, x):
    link = tmp_path / "small"
    link.symlink_to(saved(network(), tmp_path / "v0"))
    bad = saved(network(seed=1), tmp_path / "v1", passed=False)
    with Service.load(link) as service, Listener(service, port=0) as listener:
        before = service.models["small"].version
        assert call(listener.url, "/v2/repository/models/small/load", b"")[2]["version"] == before
        link.unlink()
        link.symlink_to(bad)
        status, _, body = call(listener.url, "/v2/repository/models/small/load", b"")
        assert status == 409
        assert "failed its validation" in body["error"]
        assert call(listener.url, "/v2/repository/models/other/load", b"")[0] == 404
        assert infer(listener.url, x)[2]["model_version"] == before


def test_metrics(url, x):
    infer(url, x)
    text = call(url, "/metrics")[2]
    assert 'crystallite_requests_total{model="small",status="200"}' in text
    assert 'crystallite_batch_samples_bucket{le="8.0",model="small"}' in text
    for piece in range(4):
        assert f'crystallite_piece_seconds_count{{model="small",piece="1.{piece}"}}' in text
        assert f'crystallite_replicas{{model="small",piece="1.{piece}"}} 1' in text
    assert 'crystallite_queue_seconds_count{model="small"}' in text
