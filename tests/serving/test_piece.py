"""Pieces opened alone: what was planned, from their own part of the file."""

import sys

import pytest
import torch
from benchmarks.timing import peak_extra_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.models.manifest import source_sha256
from crystallite.serving import Machine
from crystallite.serving.model import CutModel, Source
from crystallite.serving.piece import open_piece
from crystallite.serving.plan import arrange
from tests.helpers.artifacts import APART, TOGETHER, network, saved, small
from tests.helpers.block_models import Gated, block_linear


def assert_pieces_are_as_planned(folder, machine=APART, into=None):
    found, cut = arrange(cx.load(folder, into).eval(), 1, machine)
    for piece in found.pieces:
        opened = open_piece(folder, piece, into)
        assert source_sha256(opened) == source_sha256(cut.modules[piece.name])
        assert not opened.training
    return found.pieces


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # parts that read no input, in ChainLayer.part
@given(hop=st.floats(1e-10, 1e-6), groups=st.integers(2, 6), dead=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 5))
@settings(max_examples=25)
def test_parts_of_a_network(tmp_path_factory, hop, groups, dead, seed):
    model = network((13, 25, 22, 9), groups, torch.float64, seed, dead)
    folder = saved(model, tmp_path_factory.mktemp("parts") / "small")
    assert_pieces_are_as_planned(folder, Machine(hop, 1e9, 1e9))


def test_parts_of_single_layers_and_what_lies_between(tmp_path):
    torch.manual_seed(0)
    first, last = block_linear(16, 16, 4, 1), block_linear(16, 16, 2, 2)
    with torch.no_grad():
        last.weight[[3, 7]] = 0  # dormant outputs, which emit their bias
    model = nn.Sequential(first, nn.LayerNorm(16), nn.ReLU(), last).eval()
    pieces = assert_pieces_are_as_planned(saved(model, tmp_path / "small"))
    assert [piece.name for piece in pieces] == ["0.0", "0.1", "0.2", "0.3", "1-2", "3.0", "3.1"]


def test_whole_models(folder):
    (piece,) = assert_pieces_are_as_planned(folder, TOGETHER)
    assert piece.name == "model"


def test_models_with_code_of_their_own(tmp_path):
    torch.manual_seed(0)
    model = Gated().eval()
    folder = saved(model, tmp_path / "gated")
    (piece,) = assert_pieces_are_as_planned(folder, TOGETHER, into=model)
    assert (piece.modules, piece.site) == ((), None)
    pieces = assert_pieces_are_as_planned(folder, into=model)
    assert {piece.modules for piece in pieces} == {("one",), ("two",), ("three",)}
    assert len(pieces) == 12


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_belongs_to_others_is_not_read(tmp_path):
    folder = saved(network((8192, 4096), 16, head=False), tmp_path / "wide")
    total = (folder / "model.safetensors").stat().st_size
    piece = arrange(cx.load(folder), 1, APART)[0].pieces[5]
    open_piece(folder, piece)  # whatever is compiled or imported first
    assert piece.nbytes < total / 15
    assert peak_extra_bytes(lambda: open_piece(folder, piece)) < total  # of which 2 MB may come with any byte read
    assert peak_extra_bytes(lambda: cx.load(folder)) > total  # that it can be seen


def test_a_file_that_is_written_to_does_not_change_what_is_served(tmp_path, x):
    model = network()
    for machine in (APART, TOGETHER):
        folder = saved(model, tmp_path / f"{machine.hop}")
        cut = CutModel.open("small", Source(folder, machine=machine))
        file = folder / "model.safetensors"
        with file.open("r+b") as stream:
            stream.seek(-64, 2)
            stream.write(b"\xff" * 64)
        assert torch.allclose(cut.network({"input": x})["output"], model(x).detach(), atol=1e-5)


def test_the_transform_tier_holds_no_weights(folder):
    cut = CutModel.open("small", Source(folder, machine=APART)).without_pieces()
    assert not cut.network.modules
    assert not [p for step in cut.network.steps for p in step.module.parameters()]


def test_inputs_that_pieces_are_warmed_up_with(folder):
    cut = CutModel.open("small", Source(folder, machine=APART))
    shapes = {name: [tuple(given["input"].shape) for given in both] for name, both in cut.inputs.items()}
    assert shapes == {f"1.{i}": [(1, 3), (4, 3)] for i in range(4)}  # few samples and many run in different kernels


def test_a_chain_shares_the_blocks_of_a_layer():
    from crystallite.reorganization.subnetworks import as_chain

    layer = small(block_linear(16, 16, 4, 1))
    chain = as_chain(layer)
    x = torch.randn(3, 16)
    assert torch.allclose(chain(x), layer(x), atol=1e-6)
    assert chain.layers[0].weights[0].data_ptr() == layer.weights[0].data_ptr()
