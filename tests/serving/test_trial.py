"""What a service finds out about a model by running it: inputs, outputs, free axes, and who may share a batch."""

from pathlib import Path

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding
from crystallite.serving.model import CutModel, Source
from tests.helpers import tiny_transformers as tiny
from tests.helpers.artifacts import TOGETHER
from tests.helpers.block_models import block_linear
from tests.helpers.tolerance import assert_close


def opened(model, **options):
    return CutModel.of("small", "0", Path(), model, Source(Path(), machine=TOGETHER, **options))


def together(cut, parts):
    """The answers to requests that are one batch."""
    complete = [cut.joining.completed(part) for part in parts]
    return cut.joining.split(cut.network(cut.joining.joined(complete)), parts)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_models_of_transformers_say_what_they_take(name):
    """By their config alone; whatever they are called with, whoever they share a batch with, answers are theirs."""
    torch.manual_seed(0)
    model = tiny.build(name)
    cut = opened(model)
    batches = tiny.batches(name)
    known = {spec.name for spec in cut.signature.inputs}
    for batch in batches:
        given = {key: value for key, value in batch.items() if key in known}
        assert cut.signature.check(given) == len(next(iter(batch.values())))
        expected = Batch(0, 2, (), given).run(model)
        for key, found in cut.network(given).items():
            assert equal_up_to_rounding(found, expected[key]), key
    if not cut.joining.alone:
        parts = [{key: value[:1] for key, value in batch.items() if key in known} for batch in batches]
        if cut.joining.key(parts[0]) == cut.joining.key(parts[1]):
            for part, answer in zip(parts, together(cut, parts), strict=True):
                for key, found in cut.network(part).items():
                    assert found.shape == answer[key].shape
                    assert equal_up_to_rounding(valid(answer[key], part), valid(found, part)), key


def valid(y, given):
    """Without positions that the request calls padding, whose answers mean nothing."""
    mask = given.get("attention_mask")
    return y if mask is None or y.shape[:2] != mask.shape else y[mask.bool()]


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_texts_of_all_lengths_share_a_batch(name):
    joining = opened(tiny.build(name)).joining
    assert joining.padded == ({"length"} if name != "t5" else {"length", "decoder_length"})
    assert "filled up to one" in str(joining)


def test_tokens_and_positions_have_their_ends():
    cut = opened(tiny.build("bert"))
    bounds = {spec.name: spec.below for spec in cut.signature.inputs}
    assert bounds == {"input_ids": tiny.VOCABULARY, "attention_mask": 2, "token_type_ids": 2}
    assert cut.signature.longest == {"length": 80}
    assert opened(tiny.build("roberta")).signature.longest == {"length": 79}  # whose positions begin behind the padding
    assert opened(tiny.build("gpt2")).signature.longest == {"length": 64}


def test_only_chosen_outputs_are_answered():
    model = tiny.build("bert")
    assert [spec.name for spec in opened(model).signature.outputs] == ["last_hidden_state", "pooler_output"]
    assert [spec.name for spec in opened(model, outputs=("pooler_output",)).signature.outputs] == ["pooler_output"]
    with pytest.raises(cx.InvalidOption, match=r"some of last_hidden_state, pooler_output.*'hidden'"):
        opened(model, outputs=("hidden",))


def test_pictures_of_one_size_or_of_many():
    assert [spec.shape for spec in opened(tiny.build("vit")).signature.inputs] == [(3, 32, 32)]
    cut = opened(tiny.build("convnext"))
    assert [spec.shape for spec in cut.signature.inputs] == [(3, "height", "width")]
    assert not cut.joining.padded  # zeros beside a picture are a part of it
    assert "of equal shapes" in str(cut.joining)


class Centred(nn.Module):
    """Looks at the whole batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(0)


class Mean(nn.Module):
    """Of a sequence without a mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).mean(1)


def test_models_that_mix_samples_get_each_request_alone():
    torch.manual_seed(0)
    cut = opened(Centred(), shape=(4,))
    x = torch.randn(2, 4)
    assert cut.joining.alone
    assert cut.joining.key({"input": x}) != cut.joining.key({"input": x})
    assert "alone" in str(cut.joining)


def test_sequences_without_a_mask_share_a_batch_only_where_nothing_looks_ahead():
    torch.manual_seed(0)
    assert opened(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), shape=(-1, 4)).joining.padded == {"axis_1"}
    assert opened(Mean(), shape=(-1, 4)).joining.padded == frozenset()
    lstm = {"input_size": 4, "hidden_size": 4, "batch_first": True}
    assert opened(nn.LSTM(**lstm), shape=(-1, 4), outputs=("output[0]",)).joining.padded == {"axis_1"}
    both = opened(nn.LSTM(**lstm, bidirectional=True), shape=(-1, 4), outputs=("output[0]",))
    assert both.joining.padded == frozenset()
    assert both.signature.outputs[0].shape == ("axis_1", 8)


class Pair(nn.Module):
    """Two inputs with names of their own, one of them tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), block_linear(8, 8, 2, 1)

    def forward(self, words, weights):
        return {"scores": self.layer(self.table(words)).sum(-1) * weights}


def test_a_recorded_call_says_it_for_models_with_code_of_their_own(tmp_path):
    torch.manual_seed(0)
    model = Pair().eval()
    calls = [(torch.randint(11, (3, length)), torch.rand(3, length)) for length in (5, 7)]
    small = cx.reorganize(model, level=None, only_if_faster=False, example=calls[0])
    folder = cx.save(small, tmp_path / "pair")
    with cx.Service.load(folder, into=model, unvalidated=True) as service:
        signature = service.models["pair"].signature
        assert [(spec.name, spec.shape, spec.below) for spec in signature.inputs] == [
            ("words", (5,), 11),
            ("weights", (5,), None),
        ]
        words, weights = calls[0]
        assert_close(service.infer(calls[0]), model(words, weights)["scores"].detach())
        assert_close(service.infer(weights=weights, words=words), model(words, weights)["scores"].detach())


def test_axes_that_varied_are_free(tmp_path):
    torch.manual_seed(0)
    model = Pair().eval()
    data = [{"words": torch.randint(11, (16, n)), "weights": torch.rand(16, n)} for n in (5, 7) * 4]
    small = cx.compress(model, data, budget=0.5)
    folder = cx.save(small, tmp_path / "pair")
    with cx.Service.load(folder, into=model, unvalidated=True) as service:
        served = service.models["pair"]
        assert [spec.shape for spec in served.signature.inputs] == [("words_1",), ("words_1",)]
        assert served.signature.outputs[0].shape == ("words_1",)
        given = {"words": torch.randint(11, (2, 3)), "weights": torch.rand(2, 3)}
        assert_close(service.infer(given), small(**given)["scores"].detach())


def test_validation_says_it_where_nothing_else_did(tmp_path):
    torch.manual_seed(0)
    model = Pair().eval()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    folder = cx.save(small, tmp_path / "pair")
    with pytest.raises(cx.InvalidOption, match="shape"):
        cx.Service.load(folder, into=model, unvalidated=True)
    data = [{"words": torch.randint(11, (16, n)), "weights": torch.rand(16, n)} for n in (5, 7)]
    assert cx.validate(model, folder, data).passed
    with cx.Service.load(folder, into=model) as service:
        assert_close(service.infer(data[0]), model(**data[0])["scores"].detach())


def test_an_example_that_is_no_call(tmp_path):
    small = cx.reorganize(block_linear(8, 8, 2, 1), level=None, only_if_faster=False)
    with pytest.raises(cx.InvalidOption, match="example: expected tensors whose first axis"):
        cx.save(small, tmp_path / "small", example={"x": torch.zeros(2, 4), "y": 3})
