"""Named tensors are checked before anything is computed."""

import pytest
import torch

from crystallite.serving import Refusal
from crystallite.serving.signature import Signature, TensorSpec

IDS = TensorSpec("input_ids", torch.int64, ("length",), below=10)
MASK = TensorSpec("attention_mask", torch.int64, ("length",), optional=True, below=2)
PICTURE = TensorSpec("pixels", torch.float32, (3, "height"), optional=True)
STATES = TensorSpec("states", torch.float32, ("length", 4))
SIGNATURE = Signature((IDS, MASK, PICTURE), (STATES,), {"length": 6})
TEXT = Signature(
    (IDS, MASK), (STATES,), {}, TensorSpec("text", None, ()), (TensorSpec("embedding", torch.float32, (4,)),)
)


def ids(*shape, value=1):
    return torch.full(shape, value)


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": ids(2, 6)},
        {"attention_mask": ids(2, 3), "input_ids": ids(2, 3)},
        {"input_ids": ids(1, 1), "pixels": torch.zeros(1, 3, 9)},
    ],
)
def test_what_is_taken(given):
    assert SIGNATURE.check(given) == len(given["input_ids"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected 'input_ids', got none"),
        ({"attention_mask": ids(2, 3)}, "expected 'input_ids', got attention_mask"),
        ({"input_ids": ids(2, 3), "position_ids": ids(2, 3)}, "expected one of 'input_ids', .*got 'position_ids'"),
        ({"input_ids": ids(2, 7)}, "length of at most 6"),
        ({"input_ids": ids(2, 0)}, r"expected shape \[samples, length\], got \[2, 0\]"),
        ({"input_ids": ids(0, 2)}, "expected shape"),
        ({"input_ids": ids(2)}, "expected shape"),
        ({"input_ids": ids(2, 3, 1)}, "expected shape"),
        ({"input_ids": ids(2, 3), "attention_mask": ids(2, 4)}, "attention_mask: expected length 3, as input_ids has"),
        ({"input_ids": ids(2, 3), "attention_mask": ids(1, 3)}, "attention_mask: expected samples 2, as input_ids has"),
        ({"input_ids": ids(2, 3, value=10)}, "input_ids: expected integers from 0 to 9, got 10"),
        ({"input_ids": ids(2, 3, value=-1)}, "input_ids: expected integers from 0 to 9, got -1"),
        ({"input_ids": ids(2, 3), "attention_mask": ids(2, 3, value=2)}, "attention_mask: expected integers from 0"),
        ({"input_ids": ids(2, 3).int()}, "input_ids: expected datatype INT64, got INT32"),
        ({"input_ids": ids(1, 3), "pixels": torch.zeros(1, 4, 9)}, r"pixels: expected shape \[samples, 3, height\]"),
        ({"input_ids": ids(1, 3), "pixels": torch.full((1, 3, 9), torch.nan)}, "pixels: expected finite numbers"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(Refusal, match=message) as caught:
        SIGNATURE.check(given)
    assert caught.value.status == 400


def test_text_comes_alone():
    TEXT.check_names(["text"])
    TEXT.check_names(["input_ids"])
    for names, message in (
        (["text", "input_ids"], "expected 'text' alone"),
        (["text", "text"], "'text' twice"),
        (["attention_mask"], "expected 'input_ids', or 'text' alone"),
        (["input_ids", "attention_mask", "input_ids"], "'input_ids' twice"),
    ):
        with pytest.raises(Refusal, match=message):
            TEXT.check_names(names)


def test_lines_say_it_all():
    assert list(SIGNATURE.lines()) == [
        "takes input_ids INT64 [samples, length], length up to 6",
        "takes attention_mask INT64 [samples, length], optional, length up to 6",
        "takes pixels FP32 [samples, 3, height], optional",
        "returns states FP32 [samples, length, 4]",
    ]
    assert list(TEXT.lines())[2:] == [
        "takes text BYTES [samples]",
        "returns states FP32 [samples, length, 4]",
        "returns embedding FP32 [samples, 4]",
    ]
