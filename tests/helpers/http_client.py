"""A client of the service over HTTP, and a piece that waits until it is let through."""

import http.client
import json
import threading
from urllib.parse import urlsplit

import torch

from crystallite.serving.interface import computed, only
from tests.helpers.waiting import PATIENCE

TOKEN = "a token that nobody guesses"


def call(url, path, body=None, method=None, headers=()):
    """(status, headers, body as JSON or text)."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, dict(headers))
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.headers.get("content-type", "") == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text
    finally:
        connection.close()


def request(x, **more):
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    return json.dumps({"inputs": [tensor], **more})


def infer(url, x, path="/v2/models/small/infer", **more):
    return call(url, path, request(x, **more))


def answer(body):
    (output,) = body["outputs"]
    return torch.tensor(output["data"]).reshape(output["shape"])


class Slow(torch.nn.Module):
    """A piece that waits until it is let through."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gate, self.calls = inner, threading.Event(), 0

    def forward(self, x):
        self.calls += 1
        assert self.gate.wait(PATIENCE)
        return only(computed(self.inner, {"input": x}))
