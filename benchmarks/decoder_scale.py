"""What it takes to compress a decoder on disk: processor time and memory, for Llamas of several sizes.

`python -m benchmarks.decoder_scale 135M 360M 1.5B` writes each model, with random weights and layer by layer, into the
folder for temporary files, compresses it in a process of its own, and removes it. Memory is the most that the process
held at any time (VmHWM), beside what `--memory` would have asked for. `--kill` does it a second time, ends that run
with SIGKILL in the middle of a layer, lets it go on, and compares all files with those of the first.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.timing import show, store, stored

WINDOW = 512
STD = 0.02


@dataclass(frozen=True)
class Size:
    """A Llama with tied embeddings."""

    layers: int
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    vocabulary: int = 49152
    dtype: str = "bfloat16"

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        width = self.hidden // self.heads * self.kv_heads
        inside = {
            "self_attn.q_proj": (self.hidden, self.hidden), "self_attn.k_proj": (width, self.hidden),
            "self_attn.v_proj": (width, self.hidden), "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.neurons, self.hidden), "mlp.up_proj": (self.neurons, self.hidden),
            "mlp.down_proj": (self.hidden, self.neurons), "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }  # fmt: skip
        return {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}


SIZES = {
    "135M": Size(30, 576, 1536, 9, 3, dtype="float32"),  # the shape of SmolLM2-135M
    "tenth": Size(3, 576, 1536, 9, 3, dtype="float32"),
    "1.5B, 2 layers": Size(2, 2048, 8192, 32, 8),  # what they hold and take is that of each layer
    "360M, 3 layers": Size(3, 960, 2560, 15, 5),
    "360M": Size(32, 960, 2560, 15, 5),
    "1.5B": Size(20, 2048, 8192, 32, 8),
    "3B": Size(64, 2048, 5632, 32, 4, 32000),  # layers of TinyLlama's shape
    "3B wide": Size(28, 3072, 8192, 24, 8, 128256),  # that of Llama-3.2-3B
    "3B, 2 layers": Size(2, 2048, 5632, 32, 4, 32000),
    "3B wide, 2 layers": Size(2, 3072, 8192, 24, 8, 128256),
}


def make(size: Size, folder: Path) -> int:
    """A sharded folder, never more than one layer in memory; how many parameters."""
    from transformers import LlamaConfig

    folder.mkdir()
    rng, dtype = torch.Generator().manual_seed(0), getattr(torch, size.dtype)
    count, places = size.layers + 1, {}
    ends = {"model.embed_tokens.weight": (size.vocabulary, size.hidden), "model.norm.weight": (size.hidden,)}
    parameters = 0
    for number in range(count):
        shapes = size.shapes(number) if number < size.layers else ends
        made = {
            name: torch.empty(shape, dtype=dtype).normal_(0, STD, generator=rng)
            if len(shape) > 1
            else torch.ones(shape, dtype=dtype)
            for name, shape in shapes.items()
        }
        parameters += sum(value.numel() for value in made.values())
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(made, folder / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.neurons,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        tie_word_embeddings=True, dtype=dtype, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return parameters


def run(options: argparse.Namespace) -> None:
    """Compress a folder in this process, and print what it took."""
    import cProfile
    import pstats

    import transformers

    import crystallite as cx
    from crystallite.compression.decoders.on_disk import compress_folder, memory_needed
    from crystallite.compression.decoders.stack import Stack
    from crystallite.models.layered_folder import LayeredFolder

    config = transformers.AutoConfig.from_pretrained(options.run)
    transformers.models.llama.modeling_llama.LlamaForCausalLM  # noqa: B018  imported before memory is looked at
    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, config.vocab_size, (options.tokens // WINDOW, WINDOW), generator=rng)
    given = {"budget": options.share, "form": options.form, "memory": options.memory}
    before, start = _status("VmRSS"), time.process_time()
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    parts = [{"input_ids": part} for part in tokens.split(max(1, min(4, len(tokens) // 4)))]
    compress_folder(options.run, parts, options.out, **given)
    profile.disable()
    took = time.process_time() - start
    if options.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    assert cx.__version__
    peak, source = _status("VmHWM"), LayeredFolder.open(options.run)
    asked = sum(memory_needed(Stack(source.model, source.name)).values())
    print(json.dumps({"seconds": took, "imports": before, "peak": peak, "asked": asked}))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Make a model, compress it in another process, and say what that took."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "dense"
        parameters = make(SIZES[name], folder)
        head = SIZES[name].vocabulary * SIZES[name].hidden
        budget = options.share + (1 - options.share) * head / parameters  # of the whole model: the head stays
        command = [
            sys.executable, "-m", "benchmarks.decoder_scale", "--run", str(folder), "--out", f"{place}/small",
            "--tokens", str(options.tokens), "--share", str(budget), "--form", options.form,
        ]  # fmt: skip
        command += ["--memory", options.memory] if options.memory else []
        command += ["--profile"] if options.profile else []
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        killed = {"killed_in": _killed(command, Path(place), SIZES[name].layers)} if options.kill else {}
    model = parameters * getattr(torch, SIZES[name].dtype).itemsize
    return {
        "model": name, "parameters": parameters, "tokens": options.tokens, "model_GB": model / 1e9,
        "processor_s": found["seconds"], "imports_GB": found["imports"] / 1e9, "peak_GB": found["peak"] / 1e9,
        "held_over_model": (found["peak"] - found["imports"]) / model,
        "asked_GB": found["asked"] / 1e9,
        "ns_per_parameter_and_token": found["seconds"] / parameters / options.tokens * 1e9,
        "s_per_layer": found["seconds"] / SIZES[name].layers, **killed,
    }  # fmt: skip


def _killed(command: list[str], place: Path, layers: int) -> str:
    """Where a second run was killed, which then went on to the files of the first; else an error."""
    again = [argument.replace(f"{place}/small", f"{place}/again") for argument in command]
    partial, middle = place / "again.partial", layers // 2
    running = subprocess.Popen(again, stdout=subprocess.DEVNULL)
    while running.poll() is None:
        done = len([*partial.glob("*/layer-*.json")])
        if done >= middle and [*partial.glob("state/wrote-*")]:
            running.kill()
            break
        time.sleep(0.002)
    assert running.wait() == -signal.SIGKILL, "it was done before it could be killed"
    subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
    names = sorted(path.name for path in (place / "small").iterdir())
    assert names == sorted(path.name for path in (place / "again").iterdir())
    for name in names:
        same = filecmp.cmp(place / "small" / name, place / "again" / name, shallow=False)
        assert same or name == "manifest.json", name  # which names folders
    return f"layer {middle} of {layers}: all files the same"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["135M"], help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", type=int, default=2**15, help="of the calibration")
    parser.add_argument("--share", type=float, default=0.8, help="of the layers' weights to keep")
    parser.add_argument("--form", default="dense")
    parser.add_argument("--memory", help="bound for the run, such as 3GB")
    parser.add_argument("--kill", action="store_true", help="kill a second run in the middle, and let it go on")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run is not None:
        run(options)
        return
    rows = []
    for name in options.models:
        rows.append(measure(name, options))
        if not options.profile:  # what is measured is kept, whatever happens to the next
            others = [row for row in stored("decoder_scale") if _run_of(row) != _run_of(rows[-1])]
            store("decoder_scale", [*others, rows[-1]])
    show("a decoder compressed from disk", rows)


def _run_of(row: dict[str, object]) -> tuple[object, ...]:
    return row["model"], row["tokens"]


if __name__ == "__main__":
    main()
