"""What the benchmark of fitted models judges by is never calibrated with, whatever the data repeats."""

import pytest
import torch
from benchmarks import fitted_tasks
from benchmarks.fitted_tasks import Entry, Task, calibration_images, glosses, split
from torch import nn


def line(number, word, gloss):
    return f"{number:08} 03 n 01 {word} 0 000 | {gloss}  "


@pytest.fixture
def wordnet(tmp_path):
    """Words that come several times, definitions that several words share, and one that names its word."""
    lines = ["  1 This is the licence."]
    for i in range(60):
        lines.append(line(i, f"word_{i % 40}", f'a kind of thing number {i % 25}; "an example"'))
    lines.append(line(99, "circle", "a round circle of things"))
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text("\n".join(lines) + "\n", encoding="latin-1")
    return tmp_path


def test_words_and_definitions_come_once_without_examples(wordnet):
    found = glosses(wordnet)
    assert len(found) == len({e.word for e in found}) == len({e.gloss for e in found}) == 25
    assert all(";" not in e.gloss and "example" not in e.gloss and e.word != "circle" for e in found)
    assert found == glosses(wordnet)


@pytest.mark.parametrize("seed", range(5))
def test_no_text_is_calibrated_with_and_judged_by(wordnet, seed):
    entries = [*glosses(wordnet), Entry("a kind of thing number 3", "x"), Entry("y", "word 3"), Entry("word 3", "z")]
    used, judged = split(entries, seed, 10, 12)
    texts = [{text for e in part for text in (e.word, e.gloss)} for part in (used, judged)]
    assert len(used) == 10
    assert judged == entries[:12]
    assert not texts[0] & texts[1]


@pytest.mark.parametrize("seed", range(3))
def test_images_that_are_in_both_sets_only_judge(seed):
    images = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    used = calibration_images(images, torch.cat([images[5:25], torch.rand(9, 6) + 1]), seed, 15)
    assert used.shape == (15, 6)
    assert not (used[:, None] == images[None, 5:25]).all(2).any()


def test_a_task_whose_sets_overlap_is_refused():
    def made(calibrated, judged):
        return Task("t", nn.Linear(1, 1), [], lambda model: {}, [], [], (), frozenset(calibrated), frozenset(judged))

    assert made("ab", "cd").name == "t"
    with pytest.raises(ValueError, match="t: 1 samples are both"):
        made("abc", "cd")


def test_the_real_sets_are_disjoint():
    try:
        entries = glosses(fitted_tasks.WORDNET)
    except FileNotFoundError:
        pytest.skip("WordNet is not installed")
    used, judged = split(entries, 0, 500, 1000)
    assert len(used) == 500
    assert not {t for e in used for t in (e.word, e.gloss)} & {t for e in judged for t in (e.word, e.gloss)}
