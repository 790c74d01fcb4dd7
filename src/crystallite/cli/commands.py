"""The table of commands. Nothing heavy is imported to read it; a test compares it with the functions' signatures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crystallite.cli.compress_options import COMPRESS
from crystallite.cli.options import Command, Option
from crystallite.cli.serve_options import SERVE
from crystallite.cli.shared_options import (
    ANNEALING,
    BATCH,
    CALIBRATION,
    CHECKPOINT,
    CHECKPOINT_FILE,
    DATA,
    DATA_NOTE,
    IGNORE,
    JSON,
    LENGTH,
    LEVEL,
    MODEL,
    MODEL_NOTE,
    ORIGINAL,
    OUT,
    RULES,
    SEED,
    SHAPE,
    TARGETS,
    TOKENS,
    WEIGHTS,
    swept_level,
)
from crystallite.cli.showing_commands import COMPLETION, DEMO, REPORT

__all__ = ["COMMANDS"]

_ANALYZE = Command(
    "analyze",
    "show what structure the weights of a checkpoint have",
    "Test and decompose every matrix of a checkpoint. Needs no data and no model code.",
    (
        CHECKPOINT_FILE,
        *ANNEALING,
        Option("fast", "find blocks at the one level only: no profile, no hubs", takes="nothing", default=False),
        TARGETS,
        IGNORE,
        Option("resume", "file that keeps finished matrices, so that the same command goes on after an interruption",
               Path, metavar="FILE"),
        Option("engine", "where to run: this process, or a Ray cluster", default="local", choices=("local", "ray")),
        JSON,
    ),
    "crystallite.cli.analyze:run",
    ("crystallite.analysis.run:analyze",),
    example="""\
  crystallite analyze model.safetensors
  crystallite analyze ./my-hf-model --level percolation --rule neyman --json > analysis.json
  crystallite analyze big-model/ --fast --resume done.jsonl
""",
)  # fmt: skip
_REORGANIZE = Command(
    "reorganize",
    "rebuild a model exactly from its blocks",
    "Save a model with its layers annealed, decomposed and rebuilt from their blocks. Exact, and without data.",
    (
        MODEL,
        OUT,
        ORIGINAL,
        WEIGHTS,
        *ANNEALING,
        Option("level", "anneal nothing: weights that are zero are the gaps", takes="nothing", value=None,
               default=0.01, flag="--as-it-is",
               excludes=tuple(option.word for option in ANNEALING)),
        Option("only_if_faster", "use blocks wherever they need fewer multiply-adds, even if they run slower",
               takes="nothing", value=False, default=True, flag="--even-if-slower"),
        Option("fold", "do not move the order of hidden neurons into the stored weights", takes="nothing",
               value=False, default=True, flag="--no-fold"),
        Option("channels", "channels that a d–cd–d feed-forward pair is cut into (c if not given)", int, metavar="N"),
        Option("feed_forward", "form that every feed-forward pair takes, whatever it saves",
               choices=("pair", "layers", "channels")),
        TARGETS,
        IGNORE,
        JSON,
    ),
    "crystallite.cli.reorganize:run",
    ("crystallite.reorganization.rewrite:reorganize",),
    example=f"""\
  crystallite reorganize ./my-hf-model --out small --level 0.001 --rule neyman
  crystallite reorganize my_package.models:build --weights trained.pt --out small --ignore "head*"
  crystallite reorganize my_models.py:build --weights trained.pt --out small

{MODEL_NOTE}
`crystallite compress` fits smaller layers to data instead.
""",
)  # fmt: skip
_VALIDATE = Command(
    "validate",
    "judge whether a smaller model may replace the original",
    "Run the original and the smaller model on the same inputs, compare their outputs, and keep the verdict in SMALL.",
    (
        replace(MODEL, name="original", metavar="ORIGINAL"),
        Option("reorganized", "folder that reorganize, compress or upgrade wrote", Path, metavar="SMALL",
               takes="argument", own=True),
        DATA,
        LENGTH,
        WEIGHTS,
        BATCH,
        *RULES,
        Option("levels", 'levels to sweep as well; "default" for a grid', swept_level, metavar="LEVEL", takes="many"),
        Option("ablate_blocks", "switch off one block at a time too, to show which classes, outputs and tokens suffer",
               takes="nothing", default=False),
        JSON,
    ),
    "crystallite.cli.validate:run",
    ("crystallite.validation.run:validate",),
    example=f"""\
  crystallite validate my_package.models:build small --data held_out.npz --metric accuracy --max-drop 0.01
  crystallite validate ./my-hf-model small --data tokens.safetensors --levels default --json > verdict.json
  crystallite validate ./my-decoder small --data held_out.txt --metric perplexity --max-drop 0.1

{DATA_NOTE}
The verdict is printed and, where SMALL has a manifest, kept in it. Exit code 0: passed, 1: failed, 2: bad input.
""",
)  # fmt: skip
_UPGRADE = Command(
    "upgrade",
    "train a model on until it separates exactly",
    "Continue the training of a model until it consists of exactly k independent blocks, and save it.",
    (
        MODEL,
        OUT,
        DATA,
        LENGTH,
        ORIGINAL,
        WEIGHTS,
        Option("blocks", "number of blocks to make", int, metavar="K"),
        Option("modules", "split along the functional modules that the data show", takes="nothing", own=True,
               default=False),
        Option("loss", "loss of the task, or match: no labels, learn what MODEL returns", default="cross-entropy",
               choices=("cross-entropy", "match", "mse"), own=True),
        Option("epochs", "times that training goes through the data", int, 5, metavar="N"),
        Option("learning_rate", "highest learning rate (default: found by short trials)", float),
        Option("smoothing", "share of each label spread over classes (default: 0, or found with --held-out)", float),
        Option("block_loss", "weight of the loss of each block alone (default: 1, or found with --held-out)", float),
        replace(DATA, name="held_out", required=False,
                help="data that MODEL was not trained on, by which trials of all of these are judged"),
        replace(BATCH, default=128),
        replace(LEVEL, type=float, default=0.001, help="level of the Neyman test that all weights must pass"),
        Option("shared_inputs", "pattern of layers whose inputs every block reads, as copies; may be repeated",
               default=(), metavar="PATTERN", takes="repeated"),
        Option("partition", "how neurons are shared out to blocks (auto: of MLPs, what a short trial finds)",
               default="auto", choices=("auto", "regions", "spread", "random"), excludes=("--modules",)),
        SEED,
        CHECKPOINT,
        replace(TARGETS, default=None),
        IGNORE,
        JSON,
    ),
    "crystallite.cli.upgrade:run",
    ("crystallite.separation.upgrade:upgrade",),
    one_of=("--blocks", "--modules"),
    example=f"""\
  crystallite upgrade my_package.models:build --weights trained.pt --data train.npz --blocks 4 --ignore head --out small
  crystallite upgrade my_package.models:build --weights trained.pt --data train.npz --modules --out small
  crystallite upgrade ./my-hf-model --data tokens.safetensors --blocks 4 --loss match --checkpoint state --out small

{MODEL_NOTE}
{DATA_NOTE}""",
)  # fmt: skip
_EXPORT = Command(
    "export",
    "write a model as ONNX or GGUF, also with 8- and 4-bit weights",
    "Write a model as ONNX, and check the file in ONNX Runtime against the model; or as GGUF, the file of llama.cpp.",
    (
        MODEL,
        Option("out", "file to write; must not exist", Path, metavar="FILE.onnx|FILE.gguf", takes="argument", own=True,
               must_be="new"),
        replace(DATA, required=False, help="arrays or text to trace and check ONNX with: .npz, .safetensors or .txt"),
        LENGTH,
        Option("type", "how weights are stored (default: f32 as ONNX, f16 as GGUF); ONNX has f32, q8_0, q4_1, q4_0",
               choices=("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")),
        Option("past", "write one step of a decoder's generation: keys and values of past tokens go in, those of all "
               "come out", takes="nothing", default=False, needs="--data"),
        Option("int8", "store the weights of linear layers as 8-bit integers, and quantise activations as they come",
               takes="nothing", default=False, needs="--data", excludes=("--type",)),
        Option("max_deviation", "largest relative deviation that 8-bit or rounded weights may cause (default: 0.1 with "
               "8 bits, 0.3 with 4)", float, needs="--data"),
        Option("tokenizer", "folder with tokenizer.json, or GGUF file of the same model, with the vocabulary for GGUF "
               "(default: MODEL)", Path, metavar="PATH"),
        ORIGINAL,
        WEIGHTS,
        replace(BATCH, default=32),
        JSON,
    ),
    "crystallite.cli.export:run",
    ("crystallite.export.run:export",),
    example=f"""\
  crystallite export small small.onnx --data inputs.npz
  crystallite export small small.onnx --data inputs.npz --int8
  crystallite export ./my-decoder step.onnx --data tokens.safetensors --past --type q4_0
  crystallite export ./my-decoder small.gguf --type q8_0

{DATA_NOTE}
ONNX Runtime and the model run on the data, and the file is written only if they agree: to rounding, or with --int8 or
another --type within --max-deviation. GGUF takes language models of the Llama family whose layers are plain ones of any
size, and no data.
""",
)  # fmt: skip
_BENCH = Command(
    "bench",
    "measure how fast a saved model answers, or how a compressed one compares with other methods",
    "Measure a model on this machine: as a service under load, or beside other methods at the same cost.",
    (
        Option("serve", "folder that crystallite wrote, to put a server of it under load", Path, metavar="FOLDER",
               own=True),
        replace(MODEL, name="baselines", help="model to compress, beside other methods at the same cost",
                takes="one"),
        Option("batch", "samples per request (default: 1), or timed at once (default: 32)", int, metavar="N",
               own=True),
        JSON,
        Option("dense", "measure the dense model behind the same server as well", takes="nothing", own=True,
               default=False, needs="--serve"),
        Option("clients", "connections that ask at the same time", int, 20, metavar="N", own=True, needs="--serve"),
        Option("seconds", "seconds of load on each server, over all rounds", float, 6.0, own=True, needs="--serve"),
        Option("rounds", "rounds in which the servers take turns; the best counts", int, 3, metavar="N", own=True,
               needs="--serve"),
        Option("max_batch", "samples that are computed together", int, 64, metavar="N", needs="--serve"),
        ORIGINAL,
        replace(SHAPE, needs="--serve"),
        Option("budget", "share of the layers' multiply-adds that all methods may keep", float, metavar="SHARE",
               needs="--baselines"),
        replace(CALIBRATION, required=False, needs="--baselines"),
        replace(DATA, help="other inputs to judge by, with `labels` if there are", required=False,
                needs="--baselines"),
        replace(LENGTH, needs="--baselines"),
        replace(TOKENS, needs="--baselines"),
        Option("metric", "quality to compare (default: accuracy with labels, else cosine to the dense model)",
               choices=("accuracy", "agreement", "cosine", "loss", "perplexity", "retrieval"), needs="--baselines"),
        replace(WEIGHTS, needs="--baselines"),
        replace(TARGETS, needs="--baselines"),
        replace(IGNORE, needs="--baselines"),
        replace(SEED, needs="--baselines"),
    ),
    "crystallite.cli.bench:run",
    ("crystallite.baselines.compare:compare", "crystallite.compression.compress:compress",
     "crystallite.serving.service:Service.load", "crystallite.serving.limits:Limits"),
    one_of=("--serve", "--baselines"),
    example=f"""\
  crystallite bench --serve small --dense
  crystallite bench --serve small --clients 50 --batch 8 --seconds 20 --json
  crystallite bench --baselines my_package.models:build --budget 0.5 --calibration inputs.npz --data held_out.npz
  crystallite bench --baselines ./my-hf-model --budget 0.5 --calibration a.npz --data b.npz --json > front.json
  crystallite report ./my-hf-model --front front.json

--serve: clients are connections of another process on this machine; each asks again as soon as it is answered.

--baselines fits MODEL to the budget, without training, and prints it beside the dense model, magnitude and Wanda
pruning, Torch-Pruning, plain SVD and random blocks at the same multiply-adds, and beside what a CPU user would pick
instead: ONNX Runtime in fp32 and with dynamic int8. Methods that do not apply, or whose package is missing, are skipped
and say why. A narrow network trained anew needs labels and training: only benchmarks/fitted.py has it. All models are
timed in turns.

{DATA_NOTE}""",
)  # fmt: skip

COMMANDS = {
    command.name: command
    for command in (
        _ANALYZE, _REORGANIZE, COMPRESS, _VALIDATE, _UPGRADE, _EXPORT, SERVE, _BENCH, REPORT, DEMO, COMPLETION,
    )
}  # fmt: skip
