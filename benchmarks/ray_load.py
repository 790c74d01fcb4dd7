"""Requests over HTTP to a service on Ray, each with an answer of its own to compare with, and what became of them."""

import asyncio
import json
import time
from collections import Counter

import torch

AT_ONCE = 32  # requests
PATIENCE = 600  # seconds: ends a scenario that hangs, never one that is slow
CLOSE = 1e-5  # of the largest answer, in float32
DATATYPES = {torch.float32: "FP32", torch.int64: "INT64"}
URL = "http://127.0.0.1:8000/v2/models/small/infer"


class Load:
    """Requests of which some are under way at a time."""

    def __init__(self, requests, known):
        """known: what is asked in turn, named tensors, and the answers that are right, named tensors each."""
        self.requests, self.known, self.started, self.event = requests, known, 0, None
        self.seen, self.latencies, self.times = Counter(), [], []

    @property
    def done(self):
        return sum(self.seen.values())

    async def send(self):
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
            await asyncio.gather(*(self._one_after_the_other(session) for _ in range(AT_ONCE)))

    async def _one_after_the_other(self, session):
        while self.started < self.requests:
            given, expected = self.known[self.started % len(self.known)]
            self.started += 1
            begun = time.monotonic()
            status, answer = await ask(session, given)
            self.latencies.append(time.monotonic() - begun)
            if status == 200:
                right = any(difference(answer, each) <= CLOSE for each in expected)
                self.seen["right" if right else "wrong"] += 1
                self.times.append(time.monotonic())
            else:
                self.seen[f"lost: {status}"] += 1

    def outcome(self):
        found = {"right": self.seen["right"], "wrong": self.seen["wrong"]}
        found["lost"] = {name: count for name, count in self.seen.items() if name.startswith("lost")}
        ordered = sorted(self.latencies)
        found["latency"] = {"median": ordered[len(ordered) // 2], "99 %": ordered[int(len(ordered) * 0.99)]}
        found["longest silence"] = max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0)
        found["requests per second"] = len(self.times) / (self.times[-1] - self.times[0])
        return found


async def ask(session, given):
    """The status, and the answer if there is one."""
    import aiohttp

    inputs = [
        {"name": name, "shape": list(x.shape), "datatype": DATATYPES[x.dtype],
         "parameters": {"binary_data_size": x.nbytes}}
        for name, x in given.items()
    ]  # fmt: skip
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    body = text + b"".join(x.contiguous().numpy().tobytes() for x in given.values())
    try:
        async with session.post(URL, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                return response.status, None
            end = int(response.headers["Inference-Header-Content-Length"])
            found = {}
            for output in json.loads(answer[:end])["outputs"]:
                raw = bytearray(answer[end : end + output["parameters"]["binary_data_size"]])
                end += len(raw)
                found[output["name"]] = torch.frombuffer(raw, dtype=torch.float32).reshape(output["shape"])
            return 200, found
    except aiohttp.ClientError as error:
        return type(error).__name__, None


async def ask_once(given):
    """The status, and the answer if there is one, of a request in a session of its own."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        return await ask(session, given)


def difference(found, expected):
    """The largest of all outputs, in shares of each one's largest number."""
    return max(((found[name] - y).abs().max() / y.abs().max()).item() for name, y in expected.items())


def wait_for(condition):
    """Seconds until it held."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > PATIENCE:
            raise TimeoutError
        time.sleep(0.2)
    return time.monotonic() - started
