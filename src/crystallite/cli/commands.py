"""The table of commands. Nothing heavy is imported to read it; a test compares it with the functions' signatures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crystallite.cli.options import Command, Option
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
_COMPRESS = Command(
    "compress",
    "fit smaller layers to a budget, so that they keep a model's function",
    "Save a model whose layers are smaller ones, fitted to data in closed form and without labels.",
    (
        MODEL,
        OUT,
        WEIGHTS,
        CALIBRATION,
        LENGTH,
        TOKENS,
        BATCH,
        Option("budget", "share of the layers' cost to keep, above 0 and up to 1", float, metavar="SHARE"),
        Option("blocks", "number of independent blocks that every layer becomes", int, metavar="K"),
        Option("tolerance", "largest risk that the cheapest model may have, for which the budget is searched", float,
               metavar="RISK"),
        Option("objective", "what the budget is a share of", default="macs",
               choices=("macs", "parameters", "latency", "int8"), excludes=("--blocks",)),
        Option("form", "what layers may become: anything, ordinary layers of other sizes, or (decoders) of the same "
               "sizes throughout, which load without crystallite", default="any", choices=("any", "dense", "uniform"),
               excludes=("--blocks",)),
        Option("memory", "memory that a decoder may take, such as 3GB: layers are then read, fitted and written one by "
               "one", metavar="BYTES", own=True,
               excludes=("--blocks", "--tolerance", "--polish-steps", "--weights")),
        Option("own_text", "tokens that a decoder writes itself and is fitted to as well, to hold on other text",
               int, 0, metavar="TOKENS", excludes=("--memory",)),
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
  crystallite compress ./my-decoder --budget 0.8 --form uniform --memory 3GB --calibration prose.txt --out small
  crystallite compress my_package.models:build --tolerance 0.05 --calibration inputs.npz --out small

{MODEL_NOTE}
{DATA_NOTE}""",
)  # fmt: skip
_VALIDATE = Command(
    "validate",
    "judge whether a smaller model may replace the original",
    "Run the original and the smaller model on the same inputs, and compare what they return.",
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
        Option("partition", "how neurons are shared out to blocks", default="auto",
               choices=("auto", "regions", "spread", "random"), excludes=("--modules",)),
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
_LISTENING = (
    Option("host", "address to listen on; any but this machine's own needs --token-file", default="127.0.0.1"),
    Option("port", "port to listen on; 0 for a free one", int, 8000),
    Option("grpc_port", "port to answer gRPC on as well; 0 for a free one", int),
    Option("tls_cert", "certificate and its chain, PEM, for both protocols", Path, metavar="FILE", own=True,
           needs="--tls-key"),
    Option("tls_key", "private key of the certificate, PEM", Path, metavar="FILE", own=True, needs="--tls-cert"),
    Option("log", "print a line for every request on standard error", choices=("json",), own=True),
    Option("token_file", "file with the token that requests must carry", Path, metavar="FILE", own=True,
           must_be="there"),
    Option("max_batch", "samples that are computed together", int, 64, metavar="N"),
    Option("max_wait", "seconds to wait for a fuller batch", float, 0.0, metavar="SECONDS"),
    Option("max_queue", "requests that may wait", int, 256, metavar="N"),
    Option("timeout", "seconds that a request may take", float, 30.0, metavar="SECONDS"),
    Option("max_bytes", "bytes that a request may have", int, 64 << 20, metavar="N"),
    Option("unvalidated", "serve without a verdict that the model passed", takes="nothing", default=False),
    SHAPE,
    Option("engine", "where to run: this process, or a Ray cluster", default="local", choices=("local", "ray")),
)  # fmt: skip
_SERVE = Command(
    "serve",
    "serve saved models over the network",
    "Serve saved models: one tier collects requests and deals them out, the other computes.",
    (
        Option("models", "folder that crystallite wrote, with a name of its own if given", metavar="[NAME=]FOLDER",
               takes="arguments", own=True),
        Option("plan", "print which pieces would be services, and end", takes="nothing", own=True, default=False,
               excludes=tuple(option.word for option in _LISTENING)),
        replace(JSON, help="print the plan as JSON", needs="--plan"),
        Option("batch", "samples of a request to plan for", int, 1, metavar="N"),
        ORIGINAL,
        *_LISTENING,
    ),
    "crystallite.cli.serve:run",
    ("crystallite.serving.service:Service.load", "crystallite.serving.limits:Limits",
     "crystallite.serving.listening:Listener"),
    example="""\
  crystallite serve small --plan
  crystallite serve small --port 8000 --grpc-port 8001
  crystallite serve fraud=models/fraud prices=models/prices --host 10.0.0.5 --token-file token \\
    --tls-cert server.pem --tls-key server.key --log json

Clients of the Open Inference Protocol v2 work unchanged, such as tritonclient. SIGTERM answers what was accepted and
ends; SIGHUP, or POST /v2/repository/models/NAME/load, opens the folders again (point a link at the new version) and
keeps the old version where the new one may not be served. Metrics for Prometheus: /metrics.
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
        replace(ORIGINAL, needs="--serve"),
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
_REPORT = Command(
    "report",
    "write one HTML page that shows what was found",
    "Analyse a checkpoint and write one self-contained HTML page: verdict, layers, pictures, levels.",
    (
        CHECKPOINT_FILE,
        Option("out", "page to write", Path, Path("report.html"), metavar="FILE", own=True),
        Option("title", "what the page calls the model"),
        Option("reorganized", "folder that reorganize, compress or upgrade wrote", Path, metavar="FOLDER"),
        Option("verdict", "file with what validate --json printed", Path, metavar="FILE", must_be="there"),
        Option("front", "file with JSON rows: name, family, macs, latency_ms, quality", Path, metavar="FILE",
               must_be="there"),
        Option("monitor", "file with the JSON lines that training wrote", Path, metavar="FILE", must_be="there"),
        Option("figures", "folder to write each figure to as a file of its own", Path, metavar="FOLDER", own=True),
        Option("format", "format of these figures", default="svg", choices=("svg", "png"), own=True,
               needs="--figures"),
        *ANNEALING,
        TARGETS,
        IGNORE,
        replace(JSON, help="print what was written as JSON on standard output"),
    ),
    "crystallite.cli.report:run",
    ("crystallite.report.build:report",),
    example="""\
  crystallite report model.safetensors --out report.html
  crystallite validate original small --data held_out.npz --levels default --json > verdict.json
  crystallite report ./my-hf-model --out report.html --reorganized small --verdict verdict.json --figures figures
""",
)  # fmt: skip
_DEMO = Command(
    "demo",
    "take a tour on a network trained on the spot, or on MiniLM",
    "Take a real network apart, rebuild it smaller, judge, save and serve it, and write a report.",
    (
        Option("out", "folder for what the demo writes", Path, Path("demo-output"), metavar="FOLDER", own=True),
        Option("model", "network to take: one trained here, or a sentence encoder from PyPI", default="digits",
               choices=("digits", "minilm"), own=True),
        Option("paper", "print the paper's worked examples beside the results here, and nothing else", takes="nothing",
               default=False, own=True, excludes=("--model", "--out")),
    ),
    "crystallite.cli.demo:run",
    example="""\
  crystallite demo --out demo-output
  crystallite demo --model minilm
  crystallite demo --paper
""",
)  # fmt: skip
_COMPLETION = Command(
    "completion",
    "print a script that completes commands and options in a shell",
    "Print a completion script; it knows commands, options and their choices.",
    (Option("shell", "shell that the script is for", choices=("bash", "zsh"), takes="argument", own=True),),
    "crystallite.cli.completion:run",
    example="""\
  crystallite completion bash >> ~/.bashrc
  crystallite completion zsh >> ~/.zshrc
""",
)

COMMANDS = {
    command.name: command
    for command in (
        _ANALYZE, _REORGANIZE, _COMPRESS, _VALIDATE, _UPGRADE, _EXPORT, _SERVE, _BENCH, _REPORT, _DEMO, _COMPLETION,
    )
}  # fmt: skip
