"""`crystallite compress` in the table of commands: its options."""

from __future__ import annotations

from dataclasses import replace

from crystallite.cli.options import Command, Option
from crystallite.cli.shared_options import (
    BATCH,
    CALIBRATION,
    CHECKPOINT,
    DATA_NOTE,
    IGNORE,
    JSON,
    LENGTH,
    MODEL,
    MODEL_NOTE,
    ORIGINAL,
    OUT,
    SEED,
    TARGETS,
    TOKENS,
    WEIGHTS,
)

__all__ = ["COMPRESS"]

COMPRESS = Command(
    "compress",
    "fit smaller layers to a budget, so that they keep a model's function",
    "Save a model whose layers are smaller ones, fitted to data in closed form and without labels.",
    (
        MODEL,
        OUT,
        ORIGINAL,
        WEIGHTS,
        CALIBRATION,
        LENGTH,
        TOKENS,
        BATCH,
        Option("budget", "share of the model's cost to keep, above 0 and up to 1; several give a folder each, in OUT",
               float, metavar="SHARE", takes="many"),
        Option("blocks", "number of independent blocks that every layer becomes", int, metavar="K"),
        Option("tolerance", "largest risk that the cheapest model may have, for which the budget is searched", float,
               metavar="RISK"),
        Option("objective", "what the budget is a share of", default="macs",
               choices=("macs", "parameters", "latency", "int8"), excludes=("--blocks",)),
        Option("form", "what layers may become: anything, ordinary layers of other sizes, or (decoders) of the same "
               "sizes throughout, which load without crystallite", default="any", choices=("any", "dense", "uniform"),
               excludes=("--blocks",)),
        Option("embeddings", "share of a decoder's table of tokens and head to keep, as a low rank; left out, they "
               "stay", float, metavar="SHARE", excludes=("--blocks", "--tolerance")),
        Option("memory", "memory that a decoder may take, such as 3GB: layers are then read, fitted and written one by "
               "one", metavar="BYTES", own=True,
               excludes=("--blocks", "--tolerance", "--polish-steps", "--weights", "--original")),
        Option("engine", "where a decoder's layers are run: in this process, or on a Ray cluster whose nodes share the "
               "calibration data", own=True, default="local", choices=("local", "ray"),
               excludes=("--blocks", "--tolerance", "--polish-steps", "--weights", "--original")),
        Option("own_text", "tokens that a decoder writes itself and is fitted to as well, to hold on other text",
               int, 0, metavar="TOKENS", excludes=("--memory", "--engine")),
        Option("general_text", "fit to English prose that comes with Python as well, as many tokens as of each text "
               "given, so that an encoder holds on other text", takes="nothing", own=True, default=False),
        Option("joint", "use one partition through consecutive layers", takes="nothing", default=False,
               needs="--blocks"),
        Option("confidence", "confidence with which the tolerance must be shown", float, 0.95, needs="--tolerance"),
        Option("risk", "what the tolerance limits", default="deviation", choices=("deviation", "disagreement"),
               needs="--tolerance"),
        Option("polish_steps", "steps of training inside the structure afterwards", int, 0, metavar="N"),
        replace(CHECKPOINT, needs="--polish-steps"),
        Option("ridge", "how strongly weights are pulled to the original ones", float, 0.01),
        SEED,
        TARGETS,
        IGNORE,
        JSON,
    ),
    "crystallite.cli.reorganize:run_compress",
    ("crystallite.compression.compress:compress",),
    one_of=("--budget", "--blocks", "--tolerance"),
    example=f"""\
  crystallite compress ./my-hf-model --budget 0.5 --calibration tokens.safetensors --out small
  crystallite compress ./my-hf-model --budget 0.8 --calibration prose.txt --calibration code.txt --out small
  crystallite compress ./my-hf-model --budget 0.9 0.8 0.7 --calibration tokens.safetensors --out sizes
  crystallite compress ./my-decoder --budget 0.8 --form uniform --memory 3GB --calibration prose.txt --out small
  crystallite compress ./my-decoder --budget 0.8 --engine ray --calibration prose.txt --out small
  crystallite compress my_package.models:build --tolerance 0.05 --calibration inputs.npz --out small

{MODEL_NOTE}
{DATA_NOTE}""",
)  # fmt: skip
