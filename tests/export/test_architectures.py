"""Models of transformers as ONNX: named inputs and outputs, batches and texts of any size."""

from functools import reduce

import pytest
import torch

import crystallite as cx
from tests.helpers import tiny_transformers as tiny
from tests.helpers.tolerance import assert_close

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")


def run(path, batch):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {each.name: batch[each.name].numpy() for each in session.get_inputs()})
    return {each.name: torch.from_numpy(value) for each, value in zip(session.get_outputs(), found, strict=True)}


def check(model, path, batches, fresh):
    """fresh: a batch of other sizes than those that the file was checked with."""
    done = cx.export(model, path, batches)
    assert done.deviation < 1e-4
    assert done.samples == sum(len(next(iter(batch.values()))) for batch in batches)
    with torch.no_grad():
        expected = model(**fresh)
    for name, value in run(done.path, fresh).items():
        assert_close(value, reduce(lambda found, field: found[field], name.split("."), expected))
    return done


def test_a_decoder_takes_whole_texts(tmp_path):
    model = tiny.build("opt")
    done = check(model, tmp_path / "a.onnx", tiny.batches("opt"), tiny.texts(1, 5, seed=2))
    assert done.inputs == dict.fromkeys(("input_ids", "attention_mask"), ("batch_size", "sequence_length"))
    assert done.outputs == ("logits",)
    assert done.notes == ()
    assert model.config.use_cache


LOOPING = ("mamba", "rwkv")  # over the tokens of a text
FREE = [*tiny.DECODERS, *tiny.ENCODERS, *tiny.ENCODER_DECODERS, *tiny.VISION, *tiny.AUDIO]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FREE if name != "opt"])
def test_every_architecture(name, tmp_path):
    model, batches = tiny.build(name), tiny.batches(name)
    fresh = {key: value[:1] for key, value in batches[0].items()}
    if name not in tiny.VISION:
        fresh = {key: value[:, :-3] if value.ndim == 2 else value for key, value in fresh.items()}
    check(model, tmp_path / "a.onnx", batches, fresh)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPING)
def test_loops_over_tokens_take_one_length(name, tmp_path):
    model, (first, other) = tiny.build(name), tiny.batches(name)
    with pytest.raises(cx.InvalidOption, match=r"takes input_ids with 9 in axis 1 only.* and the data has 13"):
        cx.export(model, tmp_path / "a.onnx", [first, other])
    done = cx.export(model, tmp_path / "a.onnx", [first])
    assert any("input_ids is taken in this shape only: batch_size, 9" in note for note in done.notes)


@pytest.mark.slow
def test_an_axis_that_is_only_said_to_be_free_is_fixed(tmp_path):
    """DINOv2 has a branch for pictures of the size it was made for, which alone comes into the graph."""
    model = tiny.build("dinov2")
    sizes = [torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0)) for side in (32, 48)]
    with pytest.raises(cx.InvalidOption, match="takes pixel_values with 32 in axis 2 only"):
        cx.export(model, tmp_path / "a.onnx", [{"pixel_values": pixels} for pixels in sizes])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["budget", "blocks", "exact"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_rebuilt_models(name, way, tmp_path):
    model = tiny.build(name)
    calibration = [tiny.texts(16, 12, seed=seed) for seed in range(8)]
    if way == "exact":
        small = cx.reorganize(model, level=0.001, only_if_faster=False)
    else:
        small = cx.compress(model, calibration, **{way: {"budget": 0.5, "blocks": 2}[way]})
    check(small.eval(), tmp_path / "a.onnx", tiny.batches(name), tiny.texts(1, 5, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_single(dtype, tmp_path):
    model = tiny.build("llama").to(dtype)
    done = cx.export(model, tmp_path / "a.onnx", tiny.batches("llama"))
    assert any(f"the weights were {dtype}" in note for note in done.notes)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    fresh = tiny.texts(2, 5, seed=2)
    with torch.no_grad():
        assert_close(run(done.path, fresh)["logits"], model.float()(**fresh).logits)
