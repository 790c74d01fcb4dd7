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


class Characters(nn.Module):
    """Texts as how often each character comes; also what tokenizes them."""

    def __call__(self, *texts, input_ids=None, **_):
        if texts:
            ids = [torch.tensor([ord(c) for c in text]) for text in texts[0]]
            ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}
        counts = nn.functional.one_hot(input_ids, 128)[..., 1:].sum(1).float()
        return nn.functional.normalize(counts, dim=1)


@pytest.mark.parametrize(("mixed_with", "columns"), [([], ["b, 1,000 paragraphs"]), (["b"], ["b"]), (["a"], None)])
def test_paragraphs_judge_or_calibrate(wordnet, monkeypatch, mixed_with, columns):
    """In several pools where the calibration has none of their kind; a paragraph of two kinds is noticed."""
    both, model = [f"paragraph {i} of both kinds" for i in range(1300)], Characters()
    monkeypatch.setattr("benchmarks.texts.paragraphs", lambda kind: list(both))
    monkeypatch.setattr(fitted_tasks, "_minilm", lambda: (model, model))
    monkeypatch.setattr(fitted_tasks, "_bert_groups", lambda model: [])

    def made():
        return fitted_tasks.retrieval(
            wordnet, 0, 8, queries=5, pools=1, kinds=["b"], mixed_with=mixed_with, paragraph_pools=2
        )

    if columns is None:
        with pytest.raises(ValueError, match="are both calibrated with and judged by"):
            made()
        return
    task = made()
    judged = task.judge(task.model)
    assert [name for name in judged if name.startswith(fitted_tasks.ELSEWHERE)] == [f"acc@1 {c}" for c in columns]
    assert len(task.judged_on) == 10 + 500 * (1 if mixed_with else 2)
    assert len(task.calibrated_on) == 8 + bool(mixed_with) * 800
