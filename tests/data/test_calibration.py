"""How much calibration data is read, and that it is said."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.compression.guarantee import set_aside
from crystallite.data.calibration import Calibration, FittedOn
from tests.helpers import compressible as networks

SEQUENCES = [torch.randn(16, 512, 8)] * 25  # 8,192 positions each, of which four batches are enough


def endless():
    while True:
        yield SEQUENCES[0]


def test_how_many_samples_of_how_many_are_fitted_on():
    assert Calibration.read(SEQUENCES).size == FittedOn(48, 48 * 512, 16, 16 * 512, 64, 400)
    assert Calibration.read(endless()).size.given is None
    assert Calibration.read(SEQUENCES[:4]).size == FittedOn(48, 48 * 512, 16, 16 * 512, 64, 64)
    assert Calibration.read(torch.zeros(10, 3)).size == FittedOn(8, 8, 2, 2, 10, 10)


def test_polishing_reads_more():
    found = Calibration.read(SEQUENCES, training=True).size
    assert (found.read, found.given, found.trained_on) == (64, 400, 336)
    assert str(found).endswith("the first 64 of 400 given; polishing learns from 336 more")


def test_samples_set_aside_are_no_samples_left_out():
    rest, aside = set_aside(Calibration.read(torch.zeros(100, 3)), 0)
    assert rest.size.samples + rest.size.held_out + len(aside[0].positional[0]) + len(aside[1].positional[0]) == 100
    assert (rest.size.read, rest.size.given) == (100, 100)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            SEQUENCES,
            "fitted on 48 samples (24,576 positions) and judged by 16 others (8,192), the first 64 of 400 given",
        ),
        (endless(), "judged by 16 others (8,192), the first 64 of more given"),
        (torch.randn(250, 8), "layers were fitted on 200 samples and judged by 50 others"),
    ],
)
def test_the_summary_says_how_much_was_fitted_on(data, said, tmp_path):
    small = cx.compress(networks.mlp(8, 32, 8), data, budget=0.5)
    notes = cx.summary(small).notes
    assert any(note.endswith(said) for note in notes), notes
    cx.save(small, tmp_path / "small")
    assert cx.record(cx.load(tmp_path / "small")).options.data == cx.record(small).options.data


def test_an_older_record_does_not_say_it():
    small = cx.compress(nn.Sequential(nn.Linear(8, 8)), torch.randn(100, 8), budget=0.5)
    plain = cx.record(small).to_plain()
    del plain["options"]["data"]
    assert cx.Record.from_plain(plain, "here").options.data is None
