"""One step of generation as ONNX: driven step by step, it writes what `generate` writes, token for token."""

import pytest
import torch

import crystallite as cx
from tests.helpers import tiny_transformers as tiny

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")

NEW = 12  # tokens: more than the windows of those that see one


def generated(path, prompts):
    """What follows prompts that may have padding in front, by the likeliest token each time."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {each.name: each for each in session.get_inputs()}
    tokens, mask = prompts["input_ids"], prompts["attention_mask"]
    pasts = [name for name in inputs if name.startswith("past_key_values.")]
    past = {}
    for name in pasts:
        heads, size = inputs[name].shape[1], inputs[name].shape[3]
        past[name] = torch.zeros(len(tokens), heads, 0, size).numpy()
    read = 0
    for _ in range(NEW):
        step = {"input_ids": tokens[:, read:].numpy(), "attention_mask": mask.numpy()}
        if "position_ids" in inputs:
            step["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, read:].numpy()
        names = [each.name for each in session.get_outputs()]
        found = dict(zip(names, session.run(None, step | past), strict=True))
        read = tokens.shape[1]
        chosen = torch.from_numpy(found["logits"])[:, -1:].argmax(-1)
        tokens, mask = torch.cat([tokens, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
        past = {name: found[name.replace("past_key_values", "present")] for name in pasts}
    return tokens


def prompts(count=3, length=7):
    made = tiny.texts(count, length, seed=3)
    made["attention_mask"][0, :3] = 0  # padding stands in front of what is to be continued
    return made


def expected(model, asked):
    model.generation_config.eos_token_id = None
    return model.generate(**asked, do_sample=False, max_new_tokens=NEW)


def check(model, path, data):
    done = cx.export(model, path, data, past=True)
    assert done.deviation < 1e-4
    for asked in (prompts(), tiny.texts(1, 2, seed=4)):
        assert torch.equal(generated(done.path, asked), expected(model, asked))
    return done


def test_a_step_of_generation(tmp_path):
    model = tiny.build("gpt2")
    done = check(model, tmp_path / "step.onnx", tiny.batches("gpt2"))
    text, past = ("batch_size", "sequence_length"), ("batch_size", 4, "past_sequence_length", 16)
    assert done.inputs == {
        "input_ids": text, "attention_mask": ("batch_size", "total_sequence_length"), "position_ids": text,
        "past_key_values.0.key": past, "past_key_values.0.value": past,
        "past_key_values.1.key": past, "past_key_values.1.value": past,
    }  # fmt: skip
    assert done.outputs == ("logits", *(f"present.{i}.{part}" for i in range(2) for part in ("key", "value")))
    assert model.config.use_cache


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tiny.DECODERS if name != "gpt2"])
def test_every_decoder(name, tmp_path):
    check(tiny.build(name), tmp_path / "step.onnx", tiny.batches(name))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["budget", "blocks", "exact"])
def test_rebuilt_decoders(way, tmp_path):
    """Whatever made the model smaller, a step of it is written like any other."""
    model = tiny.build("llama")
    calibration = [tiny.texts(16, 12, seed=seed) for seed in range(8)]
    if way == "exact":
        small = cx.reorganize(model, level=0.001, only_if_faster=False)
    else:
        small = cx.compress(model, calibration, **{way: {"budget": 0.5, "blocks": 2}[way]})
    check(small, tmp_path / "step.onnx", tiny.batches("llama"))


@pytest.mark.parametrize("name", [*tiny.STATES, "t5"])
def test_other_states_are_refused_by_name(name, tmp_path):
    reason = "past=True takes decoders" if name == "t5" else "whose state is keys and values, and this one's is not"
    with pytest.raises(cx.InvalidOption, match=reason) as error:
        cx.export(tiny.build(name), tmp_path / "step.onnx", tiny.batches(name), past=True)
    assert tiny.MODELS[name][0] in str(error.value)
    assert not list(tmp_path.iterdir())
