"""Sound files and folders of every kind that crystallite opens: what mutations and fuzzing begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import crystallite as cx
from crystallite.statistics.checkpoints import Checkpoints, State

_WEIGHT = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)


def _state() -> dict[str, Tensor]:
    return {"fc.weight": torch.from_numpy(_WEIGHT), "fc.bias": torch.zeros(4, dtype=torch.bfloat16)}


def _safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(_state(), path)


def _gguf(path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", _WEIGHT)
    packed = gguf.quants.quantize(_WEIGHT, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_k.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _onnx(path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    integers = helper.make_tensor("axes", onnx.TensorProto.INT64, (2,), [1, 2])
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "v"], ["z"], name="/in/MatMul")],
        "inner", [], [], [numpy_helper.from_array(_WEIGHT[:, :3].copy(), "v")],
    )  # fmt: skip
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="/fc/Gemm", transB=1),
        helper.make_node("If", ["c"], ["o"], name="/if", then_branch=inner),
    ]
    arrays = [numpy_helper.from_array(_WEIGHT, "w"), numpy_helper.from_array(_WEIGHT[:, 0].copy(), "b"), integers]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], arrays)), path)


def _shards(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    names = {}
    for i, (name, value) in enumerate(_state().items()):
        save_file({name: value}, folder / f"model-{i}.safetensors")
        names[name] = f"model-{i}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "num_attention_heads": 2}))


FILES: dict[str, Callable[[Path], None]] = {
    "safetensors": _safetensors,
    "torch": lambda path: torch.save(_state(), path),
    "torch legacy": lambda path: torch.save(_state(), path, _use_new_zipfile_serialization=False),
    "npz": lambda path: np.savez(path, a=_WEIGHT, b=_WEIGHT.T),
    "npz deflated": lambda path: np.savez_compressed(path, a=_WEIGHT, b=_WEIGHT.T),
    "npy": lambda path: np.save(path, _WEIGHT),
    "gguf": _gguf,
    "onnx": _onnx,
    "shards": _shards,
}
SUFFIXES = {"torch": ".pt", "torch legacy": ".pt", "npz deflated": ".npz", "shards": ""}


def _blocks(outputs: int, inputs: int, groups: int, seed: int, gates: int = 1) -> Tensor:
    """A weight of shuffled blocks."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(outputs) % groups, rng.permutation(inputs) % groups
    weight = rng.normal(size=(gates, outputs, inputs)) * (rows[:, None] == columns)
    return torch.from_numpy(weight.reshape(gates * outputs, inputs).astype(np.float32))


def _linear(outputs: int, inputs: int, groups: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.weight.data = _blocks(outputs, inputs, groups, seed)
    return layer


def _block_linear(seed: int = 1) -> Any:
    dense = _linear(12, 16, 2, seed)
    return cx.BlockLinear.from_dense(dense.weight, dense.bias, cx.decompose(dense.weight.detach()))


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Any:
    """Blocks in a triangle: each hears itself and those before it."""
    network = kind(5, 12, **options)
    rng = np.random.default_rng(3)
    unit = rng.permutation(12) // 3
    heard = torch.from_numpy(unit[:, None] >= unit)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.startswith("weight_hh"):
                weight *= heard.repeat(len(weight) // 12, 1)
    return cx.BlockRecurrent.from_dense(network, smallest=1)


def _convolutions() -> nn.Module:
    conv = nn.Conv2d(8, 12, 3, padding=1)
    conv.weight.data = _blocks(12, 8, 2, 4)[:, :, None, None] * torch.randn(12, 8, 3, 3)
    blocks = cx.BlockConv.from_dense(conv)
    return nn.Sequential(blocks, nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 3))


def _low_rank() -> nn.Module:
    linear = cx.LowRankLinear(nn.Linear(16, 3, False), nn.Linear(3, 8))
    return nn.Sequential(linear, nn.GELU(), nn.LayerNorm(8), _with_chain())


def _with_chain() -> nn.Module:
    layers = [_linear(24, 8, 4, 5), _linear(8, 24, 4, 6)]
    return cx.BlockChain.from_dense(layers, [nn.GELU("tanh")])


def _feed_forward(gate: bool) -> nn.Module:
    first, second, other = _linear(24, 8, 4, 7), _linear(8, 24, 4, 8), _linear(24, 8, 4, 7)
    return cx.BlockFeedForward.from_dense(first, nn.SiLU(), second, other if gate else None, form="layers")


def _attention() -> nn.Module:
    from crystallite.operators.attention import ExpandedAttention

    return ExpandedAttention.from_dense(nn.MultiheadAttention(8, 2, batch_first=True))


def _experts() -> nn.Module:
    from crystallite.operators.experts import Expert, Experts, Gating

    gated = [Expert(nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6), nn.SiLU()) for _ in range(2)]
    clipped = Expert(
        None, cx.LowRankLinear(nn.Linear(6, 2, False), nn.Linear(2, 4)), nn.Linear(4, 6), None, Gating(1.7, 7.0)
    )
    return Experts([*gated, clipped])


def _low_rank_tables() -> nn.Module:
    """A table of tokens and a head that share their rows."""
    table, head = cx.LowRankEmbedding(9, 8, 3, padding_idx=0), cx.LowRankHead(8, 9, 3, bias=True)
    head.weight = table.weight
    for parameter in nn.Sequential(table, head).parameters():
        nn.init.normal_(parameter)
    return nn.Sequential(table, nn.Tanh(), head)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # and the shape of what each is called with
    "BlockLinear": (lambda: nn.Sequential(_block_linear(), nn.Softmax(-1)), (20, 16)),
    "BlockChain": (_with_chain, (2, 8)),
    "BlockConv": (_convolutions, (2, 8, 6, 6)),
    "BlockFeedForward": (lambda: _feed_forward(False), (20, 8)),
    "BlockFeedForward gated": (lambda: _feed_forward(True), (3, 8)),
    "BlockRecurrent LSTM": (lambda: _recurrent(nn.LSTM, bidirectional=True), (6, 4, 5)),
    "BlockRecurrent GRU": (lambda: _recurrent(nn.GRU, num_layers=2), (6, 4, 5)),
    "BlockRecurrent RNN": (lambda: _recurrent(nn.RNN, bias=False), (6, 4, 5)),
    "LowRankLinear": (_low_rank, (5, 16)),
    "LowRankConv": (
        lambda: nn.Sequential(cx.LowRankConv(nn.Conv2d(4, 2, 3, bias=False), nn.Conv2d(2, 6, 1)), nn.MaxPool2d(2)),
        (2, 4, 6, 6),
    ),
    "ExpandedAttention": (_attention, (2, 3, 8)),
    "Experts": (_experts, (5, 6)),
    "LowRankRecurrent": (lambda: cx.LowRankRecurrent("GRU", 5, 8, [(2, 2), (0, 3)], num_layers=2), (6, 4, 5)),
    "LowRankTables": (_low_rank_tables, (2, 5)),
}


def artifact(name: str, folder: Path) -> tuple[Tensor, ...]:
    """Save a model as an artifact; returns what to call it with."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    cx.save(make().eval(), folder)
    if name == "LowRankTables":
        return (torch.arange(10).view(shape) % 9,)
    x = torch.randn(shape)
    if name == "ExpandedAttention":
        return x, x, x
    if name == "Experts":  # which of them each token is sent to, and what they count
        return x, torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]), torch.rand(5, 2)
    return (x,)


def pretrained(folder: Path) -> None:
    """A reorganized transformers model."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=8))
    pair = model.encoder.layer[0]
    pair.intermediate.dense.weight.data = _blocks(16, 8, 2, 1)
    pair.output.dense.weight.data = _blocks(8, 16, 2, 2)
    smaller = cx.reorganize(model.eval(), level=None, only_if_faster=False, targets="*.dense")
    cx.save(smaller, folder)


def training_state(folder: Path) -> None:
    """The checkpoint of an unfinished run."""
    tensors = _state() | {"rng": torch.zeros(16, dtype=torch.uint8)}
    Checkpoints(folder, {"seed": 1}).write(7, State(tensors, {"history": [0.5, 0.25], "step": 7}))
