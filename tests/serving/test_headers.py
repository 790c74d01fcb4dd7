"""One policy for the headers of both protocols: sizes, names of requests, traces, and who may ask without a token."""

import http.client
import re
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

import crystallite as cx
from crystallite.serving import Listener, Service
from crystallite.serving.headers import Caller, Trace
from tests.helpers.artifacts import network, saved
from tests.helpers.http_client import TOKEN, call, infer, request
from tests.helpers.waiting import PATIENCE

ZEROS, TRACE, SPAN = "0" * 32, "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"01-{TRACE}-{SPAN}-01-what-comes-later", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{ZEROS}-{SPAN}-01", False),
        (f"00-{TRACE}-{ZEROS[:16]}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-01\n", False),
        ("", False),
    ],
)
def test_traces_are_valid_as_the_standard_says(given, valid):
    assert (Trace.of(given) is not None) == valid


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:80", True),
        ("127.9.9.9", True),
        ("[::1]:8000", True),
        ("attacker.example", False),  # its name was made to point at 127.0.0.1
        ("attacker.example:8000", False),
        ("localhost.attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("10.0.0.1", False),
        ("[::2]", False),
        ("user@localhost", False),
        ("", False),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(url, x, host, answered):
    for path, body in [("/v2", None), ("/metrics", None), ("/v2/models/small/infer", request(x))]:
        status, _, said = call(url, path, body, headers={"Host": host})
        assert status == (200 if answered else 403)
        assert answered or "Host: expected this machine" in said["error"]
    assert call(url, "/v2/health/live", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    ("origin", "answered"),
    [
        ("http://{host}", True),
        ("https://{host}", True),  # a proxy in front of us may encrypt
        ("http://attacker.example", False),
        ("http://localhost:1", False),  # another service of this machine
        ("http://{host}.attacker.example", False),
        ("null", False),
        ("file://", False),
        ("http://[", False),
    ],
)
def test_pages_of_other_sites_may_not_ask(url, x, origin, answered):
    headers = {"Origin": origin.format(host=urlsplit(url).netloc), "Content-Type": "text/plain"}
    status, _, said = call(url, "/v2/models/small/infer", request(x), headers=headers)
    assert status == (200 if answered else 403)
    assert answered or "Origin: expected a page of this service" in said["error"]
    assert call(url, "/v2/repository/models/small/load", b"", headers=headers)[0] == status


def test_hosts_that_are_allowed_by_name(service, x):
    with Listener(service, port=0, allow_hosts=["API.example.org"]) as listener:
        for host, origin, status in [
            ("api.example.org", "https://api.example.org", 200),
            ("api.example.org:443", "https://api.example.org:8443", 200),
            ("localhost", "https://api.example.org", 200),
            ("api.example.org", "https://www.example.org", 403),
            ("www.example.org", "https://api.example.org", 403),
        ]:
            headers = {"Host": host, "Origin": origin}
            assert call(listener.url, "/v2", headers=headers)[0] == status
    for name in ("http://api.example.org", "api.example.org:80", "*", ""):
        with pytest.raises(cx.InvalidOption, match="allow_hosts"):
            Listener(service, port=0, allow_hosts=[name])


def test_with_a_token_names_do_not_matter(service):
    with Listener(service, port=0, token=TOKEN) as listener:
        headers = {"Host": "api.example.org", "Origin": "https://elsewhere.example"}
        assert call(listener.url, "/v2", headers=headers)[0] == 401
        assert call(listener.url, "/v2", headers={**headers, "Authorization": f"Bearer {TOKEN}"})[0] == 200


@pytest.mark.parametrize("name", ["Authorization", "X-Request-Id", "traceparent", "Host", "Origin"])
def test_headers_that_come_twice(url, name):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    connection.putrequest("GET", "/v2", skip_host=True)
    for value in ("localhost", "127.0.0.1"):
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 400
    assert b"several times" in response.read()
    connection.close()


def test_sizes(url):
    assert call(url, "/v2", headers={"X": "x" * 60_000})[0] == 200
    assert call(url, "/v2", headers={f"x-{i}": "" for i in range(150)})[0] == 200
    status, _, said = call(url, "/v2", headers={f"x-{i}": "" for i in range(250)})
    assert (status, "at most 200 headers" in said["error"]) == (431, True)


def test_the_same_over_grpc(tmp_path, x):
    grpc = pytest.importorskip("grpc", reason="needs grpcio")
    from tests.helpers import grpc_client
    from tests.helpers.grpc_client import Code

    with (
        Service.load(saved(network(), tmp_path / "f32")) as service,
        Listener(service, port=0, grpc_port=0) as listener,
        grpc.insecure_channel(listener.grpc_target) as channel,
    ):

        def code(*metadata):
            return grpc_client.infer(channel, grpc_client.request(x), metadata=metadata)[:2]

        assert code(("x", "x" * 60_000))[0] == Code.OK
        assert code(("x", "x" * 66_000))[0] == Code.RESOURCE_EXHAUSTED
        assert code(*((f"x-{i}", "") for i in range(250)))[0] == Code.RESOURCE_EXHAUSTED
        assert code(("x-bin", b"\xff\x00"))[0] == Code.OK
        assert code(("origin", "http://attacker.example"))[0] == Code.PERMISSION_DENIED
        found, said = code(("x-request-id", "a"), ("x-request-id", "b"))
        assert (found, "several times" in said) == (Code.INVALID_ARGUMENT, True)
        assert code()[0] == Code.OK


def test_pipelined_requests_are_never_refused_for_their_bodies(url, x):
    """Requests behind each other in one segment: the end of a body and the beginning of the next request's headers."""
    content = request(x, id="a" * 40_000)
    one = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n{content}"
    whole = one.encode() * 12
    for step in (len(whole), 65_000, 40_311):  # all at once, or cut anywhere
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=PATIENCE) as connection:
            for start in range(0, len(whole), step):
                connection.sendall(whole[start : start + step])
            received = b""
            while len(re.findall(rb"HTTP/1.1 \d+", received)) < 12:
                part = connection.recv(1 << 20)
                assert part, received[-300:]
                received += part
            assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200"] * 12


def test_trailers_without_an_end(url, x):
    """What follows a chunked body is kept as headers are."""
    start = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = 0
    with (
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=PATIENCE) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(start + b"2\r\n{}\r\n0\r\n")
        while sent < 50_000_000:
            connection.sendall(b"X: x\r\n" * 1000)
            sent += 6000
    assert sent < 50_000_000
    assert infer(url, x)[0] == 200


def test_what_is_no_name_counts_as_not_given():
    assert Caller.of([("X-Request-Id", "two words"), ("Traceparent", "00")]) == Caller()
