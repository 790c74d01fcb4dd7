"""`crystallite bench --serve`: loads that end by themselves, and numbers that add up."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.serving.load import Ask, run


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_beside_the_dense_model(folder, capsys):
    words = ["--serve", folder, "--clients", 4, "--batch", 2, "--seconds", 0.3, "--rounds", 1]
    assert bench(*words, "--dense", "--json") == 0
    rows = {row["server"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["reorganized", "dense"]
    for row in rows.values():
        assert row["requests/s"] > 0
        assert 0 < row["p50 ms"] <= row["p99 ms"]
        assert 2 <= row["samples/batch"] <= 8
        assert row["refused"] == 0
        assert row["bare forward ms"] > 0
    assert bench(*words) == 0
    assert "4 clients × batch 2" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--clients", "--batch", "--seconds", "--rounds"])
def test_bad_options(folder, option, capsys):
    assert bench("--serve", folder, option, 0) == 2
    assert option in capsys.readouterr().err


def test_a_compressed_model_has_no_dense_form(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    small = cx.save(cx.compress(model, torch.randn(200, 16), budget=0.5), tmp_path / "small")
    assert bench("--serve", small, "--dense", "--json") == 2
    assert "this model was compressed: its dense weights are gone" in capsys.readouterr().err


def test_refusals_are_counted(url):
    where = urlsplit(url)
    ask = Ask(where.hostname, where.port, [("POST /v2/models/other/infer HTTP/1.1", "7b7d")], 2, 0.2, warmup=0.0)
    load = asyncio.run(run(ask))
    assert load.latencies == []
    assert load.refused.keys() == {"404"}


def test_answers_in_binary_are_read_to_their_end():
    """They have two headers whose names end in content-length, and may come in parts."""

    async def answer(reader, writer):
        while await reader.read(1024):
            writer.write(b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 3\r\nContent-Length: 9\r\n\r\n123")
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(b"456789")
        writer.close()

    async def loaded():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run(Ask("127.0.0.1", port, [("POST / HTTP/1.1", "7b7d")], 1, 0.3, warmup=0.0))

    load = asyncio.run(loaded())
    assert load.latencies
    assert load.refused == {}
