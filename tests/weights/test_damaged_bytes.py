"""Any bytes of a sound file changed: it is read, or refused with the one kind of error; never anything else."""

import gguf
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint, recognise

WEIGHT = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
STATE = {"fc.weight": torch.from_numpy(WEIGHT), "fc.bias": torch.zeros(4, dtype=torch.bfloat16)}


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", WEIGHT)
    packed = gguf.quants.quantize(WEIGHT, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_k.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_onnx(path):
    integers = helper.make_tensor("axes", onnx.TensorProto.INT64, (2,), [1, 2])
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="/fc/Gemm", transB=1)]
    arrays = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(WEIGHT[:, 0].copy(), "b"), integers]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [], arrays)), path)


WRITERS = {
    "w.safetensors": lambda path: save_file(STATE, path),
    "w.pt": lambda path: torch.save(STATE, path),
    "legacy.pt": lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
    "w.npz": lambda path: np.savez(path, a=WEIGHT, b=WEIGHT.T),
    "packed.npz": lambda path: np.savez_compressed(path, a=WEIGHT, b=WEIGHT.T),
    "w.npy": lambda path: np.save(path, WEIGHT),
    "w.gguf": write_gguf,
    "w.onnx": write_onnx,
}


@pytest.mark.filterwarnings("ignore")  # NumPy and torch warn of some oddities before they refuse them
@pytest.mark.parametrize("name", WRITERS)
def test_changed_bytes(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    sound = path.read_bytes()
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(150):
        damaged = bytearray(sound)
        for at in random.integers(0, len(sound), random.integers(1, 4)):
            damaged[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.integers(256)])
        if random.random() < 0.3:
            damaged = damaged[: random.integers(1, len(sound))]
        path.write_bytes(damaged)
        try:
            with open_checkpoint(path) as checkpoint:
                for layer in recognise(checkpoint):
                    layer.matrices(checkpoint)
                for tensor in checkpoint.tensors:
                    checkpoint.read(tensor)
        except CheckpointError:
            refused += 1
    assert refused > 20
