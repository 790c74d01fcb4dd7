"""TLS: real handshakes with a certificate made here, over both protocols."""

import http.client
import shutil
import socket
import ssl
import subprocess
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.serving import Listener, Service
from tests.helpers.http_client import TOKEN, request
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import PATIENCE

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate for this machine, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "server.pem", folder / "server.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def listener(folder, pair):
    with Service.load(folder) as service, Listener(service, port=0, token=TOKEN, grpc_port=0, tls=pair) as listener:
        yield listener


def post(listener, context, x):
    connection = http.client.HTTPSConnection(urlsplit(listener.url).netloc, timeout=PATIENCE, context=context)
    try:
        connection.request("POST", "/v2/models/small/infer", request(x), {"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        response.read()
        return response.status, connection.sock.version()
    finally:
        connection.close()


def test_https(listener, pair, x):
    assert listener.url.startswith("https://")
    status, version = post(listener, ssl.create_default_context(cafile=pair[0]), x)
    assert status == 200
    assert version in ("TLSv1.2", "TLSv1.3")


def test_what_is_no_handshake(listener, pair, x):
    with pytest.raises(ssl.SSLCertVerificationError):
        post(listener, ssl.create_default_context(), x)  # nobody vouches for it
    where = urlsplit(listener.url)
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in connection.recv(100)
    assert post(listener, ssl.create_default_context(cafile=pair[0]), x)[0] == 200


def test_grpc(listener, pair, model, x):
    triton = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]")
    given = triton.InferInput("input", [5, 12], "FP32").set_data_from_numpy(x.numpy())
    allowed = {"authorization": f"Bearer {TOKEN}"}
    with triton.InferenceServerClient(listener.grpc_target, ssl=True, root_certificates=str(pair[0])) as client:
        found = client.infer("small", [given], headers=allowed).as_numpy("output")
    assert_close(torch.from_numpy(found.copy()), model(x).detach())
    with (
        triton.InferenceServerClient(listener.grpc_target) as client,
        pytest.raises(triton.InferenceServerException, match="UNAVAILABLE"),
    ):
        client.infer("small", [given], headers=allowed, client_timeout=PATIENCE)


def test_files_that_do_not_belong_together(folder, pair, tmp_path):
    other = tmp_path / "other.key"
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    locked = tmp_path / "locked.key"
    words = ["openssl", "ec", "-in", pair[1], "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(words, check=True, capture_output=True)
    with Service.load(folder) as service:
        for files in [(pair[0], other), (pair[1], pair[0]), (pair[0], locked), (pair[0], tmp_path / "missing")]:
            with pytest.raises(cx.InvalidOption, match="expected a certificate and its private key"):
                Listener(service, port=0, tls=files)


def test_numbers_are_the_same_as_without(listener, pair, model, x):
    connection = http.client.HTTPSConnection(
        urlsplit(listener.url).netloc, timeout=PATIENCE, context=ssl.create_default_context(cafile=pair[0])
    )
    body = request(x, parameters={"binary_data_output": True})
    connection.request("POST", "/v2/models/small/infer", body, {"Authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    content = response.read()[int(response.headers["Inference-Header-Content-Length"]) :]
    connection.close()
    assert_close(torch.from_numpy(np.frombuffer(content, np.float32).reshape(5, 8).copy()), model(x).detach())
