"""Tasks of `benchmarks.fitted` with other units than linear layers: a convolutional network, and the GRUs of g2p-en."""

from __future__ import annotations

import importlib.util
import random
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fitted_tasks import WORDNET, Task

_START, _END = 2, 3  # phonemes that begin and end a word
_MOST_PHONEMES = 20  # that are spoken for a word
_LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
_DRAWN = 1000  # words to judge by


class Speller(nn.Module):
    """g2p-en: a GRU reads the letters of a word, another one speaks its phonemes; logits of the next phoneme."""

    def __init__(self, stored: dict[str, np.ndarray]) -> None:
        super().__init__()
        numbers = {name: torch.from_numpy(value) for name, value in stored.items()}
        self.letters, self.phonemes = (nn.Embedding.from_pretrained(numbers[f"{p}_emb"]) for p in ("enc", "dec"))
        self.encoder, self.decoder = (nn.GRU(256, 256, batch_first=True) for _ in range(2))
        for gru, part in ((self.encoder, "enc"), (self.decoder, "dec")):
            names = ("w_ih", "w_hh", "b_ih", "b_hh")
            for parameter, name in zip(gru.parameters(), names, strict=True):
                parameter.data.copy_(numbers[f"{part}_{name}"])
        self.head = nn.Linear(256, 74)
        self.head.weight.data.copy_(numbers["fc_w"])
        self.head.bias.data.copy_(numbers["fc_b"])

    def forward(self, letters: Tensor, spoken: Tensor) -> Tensor:
        """(words, letters) and (words, phonemes so far) → (words, phonemes so far, 74)."""
        _, state = self.encoder(self.letters(letters))
        states, _ = self.decoder(self.phonemes(spoken), state)
        return self.head(states)

    @torch.inference_mode()
    def speak(self, letters: Tensor) -> Tensor:
        """(words, 21) the likeliest phoneme after each other, from the start on; what follows the end is the end."""
        _, state = self.encoder(self.letters(letters))
        said = [torch.full((len(letters),), _START)]
        for _ in range(_MOST_PHONEMES):
            states, state = self.decoder(self.phonemes(said[-1])[:, None], state)
            following = self.head(states[:, 0]).argmax(1)
            said.append(torch.where(said[-1] == _END, _END, following))
        return torch.stack(said, 1)


def lemmas(folder: str) -> list[str]:
    """Words of WordNet that consist of 3 to 14 small letters, in the order of the alphabet."""
    found = set()
    for part in ("noun", "verb", "adj", "adv"):
        for line in (Path(folder) / f"index.{part}").read_text(encoding="latin-1").splitlines():
            word = line.partition(" ")[0]
            if re.fullmatch("[a-z]{3,14}", word):
                found.add(word)
    return sorted(found)


def by_length(words: list[str]) -> dict[int, Tensor]:
    """Letters of the words of each length, with the end."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for word in words:
        found[len(word)].append([_LETTERS.index(letter) for letter in word] + [_LETTERS.index("</s>")])
    return {length: torch.tensor(some) for length, some in sorted(found.items())}


def speller() -> Speller:
    """The network of g2p-en."""
    found = importlib.util.find_spec("g2p_en")
    if found is None or found.origin is None:
        raise SystemExit("g2p needs the weights of g2p-en: pip install --no-deps g2p-en")
    with np.load(Path(found.origin).parent / "checkpoint20.npz") as stored:
        return Speller(dict(stored)).eval()


def agreement(model: Speller, words: list[str]) -> Callable[[nn.Module], float]:
    """How many of these words, in %, another network speaks exactly as the model does."""
    test = list(by_length(words).values())
    expected = [model.speak(letters) for letters in test]

    def judge(some: nn.Module) -> float:
        assert isinstance(some, Speller)
        same = torch.cat([(some.speak(x) == y).all(1) for x, y in zip(test, expected, strict=True)])
        return 100 * float(same.float().mean())

    return judge


def spoken(model: Speller, words: list[str], seed: int) -> list[dict[str, Tensor]]:
    """Batches of words and what the model says of them, in random order."""
    found = []
    for letters in by_length(words).values():
        said = model.speak(letters)
        length = (said != _END).sum(1).clamp_max(_MOST_PHONEMES)  # with the start
        for count in length.unique().tolist():  # of equal length, so that nothing is padded
            mine = length == count
            pairs = zip(letters[mine].split(32), said[mine, :count].split(32), strict=True)
            found += [{"letters": a, "spoken": b} for a, b in pairs]
    random.Random(seed).shuffle(found)
    return found


def g2p(seed: int, words: int = 4000, wordnet: str = WORDNET) -> Task:
    """The GRUs of g2p-en. Quality: how many words are spoken exactly as the dense model speaks them.

    Calibrated with other words, drawn by the seed, and what the dense model says of them; no dictionary is looked at.
    """
    model, known = speller(), lemmas(wordnet)
    random.Random(0).shuffle(known)
    judged, rest = known[:_DRAWN], known[_DRAWN:]
    used = random.Random(seed).sample(rest, words)
    same = agreement(model, judged)

    def judge(some: nn.Module) -> dict[str, float]:
        return {"quality": same(some)}

    calibration = spoken(model, used, seed)
    test = list(by_length(judged).values())
    timed = [{"letters": x[:64], "spoken": model.speak(x[:64])[:, :-1]} for x in test[3:6]]
    return Task("GRUs, g2p-en", model, calibration, judge, timed, [], (), frozenset(used), frozenset(judged))


def digits_network() -> nn.Sequential:
    """Three convolutions and a linear layer for images of 8 × 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def digits_cnn(seed: int, epochs: int = 12) -> Task:
    """A small convolutional network for digits; calibrated with training images, judged by the others."""
    from sklearn.datasets import load_digits

    stored = load_digits()
    images, labels = torch.from_numpy(stored.images).float()[:, None] / 16, torch.from_numpy(stored.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, test, y, test_y = images[order[:1200]], images[order[1200:]], labels[order[:1200]], labels[order[1200:]]
    torch.manual_seed(seed)
    model = digits_network()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for some in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
    model.eval()

    @torch.inference_mode()
    def judge(some: nn.Module) -> dict[str, float]:
        return {"quality": 100 * float((some(test).argmax(1) == test_y).float().mean())}

    seen = {image.numpy().tobytes() for image in test}
    some = x[[i for i in range(len(x)) if x[i].numpy().tobytes() not in seen]]
    some = some[torch.randperm(len(some), generator=torch.Generator().manual_seed(seed))]
    return Task(
        "CNN, digits", model, list(some.split(64)), judge, list(test[:512].split(64)), [], (),
        frozenset(image.numpy().tobytes() for image in some), frozenset(seen),
    )  # fmt: skip
