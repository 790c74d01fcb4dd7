"""Options that several commands share: one name, one default and one phrase for each."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from crystallite.cli.options import Option

__all__ = [
    "ANNEALING",
    "BATCH",
    "CALIBRATION",
    "CHECKPOINT",
    "CHECKPOINT_FILE",
    "DATA",
    "DATA_NOTE",
    "IGNORE",
    "JSON",
    "LENGTH",
    "LEVEL",
    "MODEL",
    "MODEL_NOTE",
    "NULL",
    "ORIGINAL",
    "OUT",
    "RULES",
    "SEED",
    "SHAPE",
    "TARGETS",
    "TOKENS",
    "WEIGHTS",
    "swept_level",
]


def _level(text: str) -> float | str:
    if text == "percolation":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "percolation", got {text!r}') from None


def swept_level(text: str) -> float | str:
    try:
        return text if text in ("default", "percolation", "bonferroni") else float(text)
    except ValueError:
        expected = 'expected numbers, "percolation", "bonferroni", or "default" alone'
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None


def _number_auto_or_none(text: str) -> float | str | None:
    try:
        return None if text == "none" else text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number, "auto" or "none", got {text!r}') from None


MODEL = Option(
    "model",
    "transformers folder, folder that crystallite wrote, package.module:factory or file.py:factory",
    metavar="MODEL",
    takes="argument",
    own=True,
)
WEIGHTS = Option(
    "weights", "weights for the model that the factory returns", Path, metavar="FILE", own=True, must_be="there"
)
OUT = Option(
    "out", "folder to save the result in; must not exist", Path, metavar="FOLDER", own=True, required=True,
    must_be="new",
)  # fmt: skip
DATA = Option(
    "data", "inputs to run the model on: .npz, .safetensors, plain text, or a folder of images; text files may be "
    "repeated", Path, metavar="PATH", takes="repeated", own=True, required=True, must_be="readable",
)  # fmt: skip
CALIBRATION = replace(
    DATA, name="calibration",
    help="inputs to fit to: .npz, .safetensors, plain text, or a folder of images; text files may be repeated, which "
    "mixes them",
)  # fmt: skip
LENGTH = Option(
    "length", "tokens in a window of text (default: 512, or the most that the model takes)", int, metavar="N", own=True
)
TOKENS = Option("tokens", "tokens of text to fit to, spread evenly over it", int, 2**15, metavar="N", own=True)
BATCH = Option("batch", "samples to run at once", int, 64, metavar="N", own=True)
JSON = Option("json", "print everything as JSON on standard output", takes="nothing", own=True, default=False)
TARGETS = Option(
    "targets", "pattern of the layers to take; may be repeated", default=("*",), metavar="PATTERN", takes="repeated"
)
IGNORE = Option(
    "ignore", "pattern of the layers to leave alone; may be repeated", default=(), metavar="PATTERN", takes="repeated"
)
SEED = Option("seed", "seed of everything that is drawn at random", int, 0, metavar="N")
LEVEL = Option("level", 'significance level that a weight must reach, or "percolation"', _level, 0.01, metavar="LEVEL")
NULL = Option(
    "null", "what weights without structure look like: the initialisation, the bulk of the matrix, or what fits",
    default="auto", choices=("auto", "init", "empirical"),
)  # fmt: skip
ANNEALING = (
    LEVEL,
    NULL,
    Option("correction", "correction for testing many weights at once", choices=("bonferroni", "holm", "bh")),
    Option("rule", "tests that a weight must pass to be kept", default="both", choices=("both", "neyman")),
    Option("random_walk", "version of the random-walk test", default="calibrated", choices=("calibrated", "literal")),
    Option("alpha", "significance level of the random-walk test, the paper's α", float, metavar="LEVEL"),
    Option("delta0", "first bandwidth δ₀ of the random-walk test, times n", float, 1 / 64, metavar="WIDTH"),
    Option("tau", "step τ of its bandwidth, times n", float, 1 / 64, metavar="WIDTH"),
)
CHECKPOINT = Option(
    "checkpoint", "folder that keeps the state of training, so that the same command goes on after an interruption",
    Path, metavar="FOLDER",
)  # fmt: skip
ORIGINAL = Option(
    "original", "package.module:factory or file.py:factory, for a saved model with code of its own", metavar="MODEL",
    own=True,
)  # fmt: skip
SHAPE = Option(
    "shape", "shape of one sample, where neither a recorded call nor a first layer tells it; -1 for any size", int,
    metavar="N", takes="many",
)  # fmt: skip
CHECKPOINT_FILE = Option(
    "source", "safetensors, .pt/.pth/.bin, .npz, .onnx or .gguf file, or a Hugging Face model folder", metavar="PATH",
    takes="argument", own=True,
)  # fmt: skip
RULES = (
    Option(
        "metric", "quality of the task that may not drop; needs labels in the data, but for perplexity, and for "
        "retrieval in plain text: does one half of a paragraph find the other? loss: cross-entropy of classes, mean "
        "squared error of numbers, or what the model itself returns as loss",
        choices=("accuracy", "loss", "retrieval", "perplexity"),
    ),
    Option("max_drop", "largest drop of the metric that is accepted, in its units; of perplexity, as a share", float,
           0.01, needs="--metric"),
    Option("min_agreement", "smallest share of samples that must keep their argmax", float),
    Option("max_relative_deviation", 'largest relative deviation of an output that is accepted, "none" for any; "auto" '
           "is 0.1, or none with --metric perplexity", _number_auto_or_none, "auto", metavar="DEVIATION"),
    Option("quantile", "share of the samples that must keep to the largest deviation", float, 1.0),
    Option("confidence", "confidence with which a drop or an agreement must be shown", float, 0.95),
)  # fmt: skip
MODEL_NOTE = """\
MODEL is a transformers folder, a folder that crystallite saved, or an import path to a function (or a module class)
that returns an nn.Module when called without arguments: package.module:factory, or file.py:factory. An import path runs
that code, which is yours: a file of weights alone does not say how a model computes.
"""
DATA_NOTE = """\
A file of arrays holds `inputs`, or the model's keyword arguments by name, and `labels` where they are needed; the first
axis counts samples. Any other file is text in UTF-8: it is read with the tokenizer in the model's folder, for a causal
language model as windows of --length tokens, for others paragraph by paragraph. A folder is one of images, prepared by
the processor in the model's folder; without one, all of one size, as pixels from 0 to 1.
"""
