"""Text becomes windows or padded paragraphs, nothing of it is lost unsaid, and what is no text is refused."""

import numpy as np
import pytest
import torch

import crystallite as cx
from tests.helpers.text_models import WORDS, language_model, prose, word_tokenizer

IDS = {word: i + 3 for i, word in enumerate(WORDS)}


def joined(data):
    return torch.cat([batch["input_ids"] for batch in data])


def ids(text):
    return torch.tensor([IDS[word] for word in text.split()])


def test_windows_go_through_the_text(tmp_path):
    (tmp_path / "a.txt").write_text(prose(100))
    data = cx.texts(tmp_path / "a.txt", word_tokenizer(), length=8, batch=3)
    assert [batch["input_ids"].shape for batch in data] == [(3, 8)] * 4
    assert torch.equal(joined(data).flatten(), ids(prose(100))[:96])
    assert (data.tokens, data.left_out, data.samples) == (96, 4, 12)
    assert repr(data).endswith("12 windows of 8 tokens, 96 tokens, 4 left out")


def test_every_window_begins_as_the_tokenizer_begins_texts():
    found = joined(cx.texts([prose(60)], word_tokenizer(beginning=True), length=7))
    assert (found[:, 0] == 2).all()
    assert torch.equal(found[:, 1:].flatten(), ids(prose(60)))


def test_pieces_that_are_read_at_once_do_not_show(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(prose(500))
    whole = joined(cx.texts(tmp_path / "a.txt", word_tokenizer(), length=8))
    monkeypatch.setattr("crystallite.data.text._PIECE", 64)
    assert torch.equal(joined(cx.texts(tmp_path / "a.txt", word_tokenizer(), length=8)), whole)


@pytest.mark.parametrize("piece", [64, 2**16])
def test_fewer_tokens_are_spread_over_the_text(tmp_path, monkeypatch, piece):
    """A long text whose words say where they stand."""
    monkeypatch.setattr("crystallite.data.text._PIECE", piece)
    (tmp_path / "a.txt").write_text("".join(f"{' '.join([WORDS[i // 100]] * 10)}\n" for i in range(4000)))
    data = cx.texts(tmp_path / "a.txt", word_tokenizer(), length=8, tokens=80)
    assert data.tokens == 80
    places = joined(data)[:, 0] - 3
    assert places[0] == 0
    assert places[-1] >= 38
    assert (places.diff() <= 10).all()


def test_several_texts_take_turns():
    found = joined(cx.texts([f"{WORDS[0]} " * 32, f"{WORDS[1]} " * 80], word_tokenizer(), length=8))
    assert found[:, 0].tolist() == [3, 4, 3, 4, 3, 4, 3, 4, 4, 4, 4, 4, 4, 4]
    mixed = joined(cx.texts([f"{WORDS[0]} " * 320, f"{WORDS[1]} " * 80], word_tokenizer(), length=8, tokens=64))
    assert sorted(mixed[:, 0].tolist()) == [3] * 4 + [4] * 4


def test_short_and_long_paragraphs_take_turns_by_their_tokens():
    short, long = f"{WORDS[0]} {WORDS[0]}\n\n" * 40, f"{' '.join([WORDS[1]] * 10)}\n\n" * 20
    data = cx.texts([short, long], word_tokenizer(), padded=True, batch=6)
    rows = [row[mask.bool()] for batch in data for row, mask in zip(*batch.values(), strict=True)]
    tokens = torch.cat(rows)[:160]  # as long as there are some of both
    assert abs(int((tokens == tokens[0]).sum()) - 80) <= 10
    assert data.tokens == 280


def test_the_folder_says_what_its_model_takes(tmp_path):
    (tmp_path / "a.txt").write_text(prose(100) + "\n" + prose(5, seed=1))
    language_model(tmp_path / "decoder")
    assert joined(cx.texts(tmp_path / "a.txt", tmp_path / "decoder")).shape == (3, 32)  # its maximum
    language_model(tmp_path / "encoder", "BertForSequenceClassification")
    (batch,) = data = cx.texts(tmp_path / "a.txt", tmp_path / "encoder")
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 32)
    assert batch["attention_mask"].sum(1).tolist() == [32, 5]
    assert torch.equal(batch["input_ids"][1, :5], ids(prose(5, seed=1)))
    assert data.tokens == 37
    lines = cx.texts([prose(100)], tmp_path / "encoder", length=6)  # no empty line: lines are the samples
    assert lines.samples == 12
    with pytest.raises(cx.InvalidOption, match="length: the model takes at most 32 tokens, got 64"):
        cx.texts(tmp_path / "a.txt", tmp_path / "decoder", length=64)


def test_halves_of_paragraphs_share_a_label():
    paragraphs = [prose(n, seed=n).replace("\n", " ") for n in (9, 4, 1, 6)]
    data = cx.texts(
        ["\n\n".join(paragraphs), f"{WORDS[0]} {WORDS[1]}"], word_tokenizer(), padded=True, halves=True, batch=3
    )
    rows = [ids_[m.bool()] for b in data for ids_, m in zip(b["input_ids"], b["attention_mask"], strict=True)]
    labels = torch.cat([batch["labels"] for batch in data]).tolist()
    assert labels == [0, 0, 1, 1, 2, 2, 3, 3]  # a paragraph of one word has no halves
    whole = [torch.cat(rows[i : i + 2]).tolist() for i in range(0, 8, 2)]
    expected = [paragraphs[0], f"{WORDS[0]} {WORDS[1]}", paragraphs[1], paragraphs[3]]
    assert whole == [ids(text).tolist() for text in expected]
    few = cx.texts(["\n\n".join(prose(8, seed=n).replace("\n", " ") for n in range(40))], word_tokenizer(), padded=True,
                   halves=True, length=4, tokens=80)  # fmt: skip
    found = torch.cat([batch["labels"] for batch in few])
    assert few.samples == 20
    assert (found.bincount() == 2).all()
    with pytest.raises(cx.InvalidOption, match="halves: expected an encoder"):
        cx.texts([prose(100)], word_tokenizer(), halves=True)


def test_batches_have_a_bounded_number_of_tokens():
    data = cx.texts([prose(9000)], word_tokenizer(), length=1000)
    assert [len(batch["input_ids"]) for batch in data] == [4, 4, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected text, but there is none"),
        (b" \n\n ", "expected text, but there is none"),
        (b"w1 w2 w3", r"3 tokens, which is 0 windows of 8; at least 2 \(16 tokens\) are needed"),
        (b"w1\0w2", "expected text in UTF-8, but it has zero bytes"),
        (b"\xff\xfe\x00w", "expected text in UTF-8, but 'utf-8' codec"),
    ],
)
def test_what_is_no_text_or_too_little_is_refused(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(cx.CrystalliteError, match=rf"a\.txt: {message}"):
        cx.texts(tmp_path / "a.txt", word_tokenizer(), length=8, least=2)


def test_missing_tokenizers_and_files_are_named(tmp_path):
    (tmp_path / "a.txt").write_text(prose(50))
    (tmp_path / "empty").mkdir()
    with pytest.raises(cx.InvalidOption, match="no tokenizer in this folder"):
        cx.texts(tmp_path / "a.txt", tmp_path / "empty")
    with pytest.raises(cx.InvalidOption, match="nowhere: no such folder"):
        cx.texts(tmp_path / "a.txt", tmp_path / "nowhere")
    with pytest.raises(cx.InvalidOption, match="text needs a tokenizer"):
        cx.texts(tmp_path / "a.txt", "my_package:build")
    with pytest.raises(cx.InvalidOption, match=r"b\.txt: no such text file"):
        cx.texts(tmp_path / "b.txt", word_tokenizer())
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    with pytest.raises(cx.CheckpointError, match="cannot open the tokenizer"):
        cx.texts(tmp_path / "a.txt", tmp_path / "empty")
    for option in ({"length": 1}, {"tokens": 0}, {"batch": 0}):
        with pytest.raises(cx.InvalidOption, match=f"{next(iter(option))} must be at least"):
            cx.texts(tmp_path / "a.txt", word_tokenizer(), **option)
    with pytest.raises(cx.InvalidOption, match="expected a text file, got none"):
        cx.texts([], word_tokenizer())


def test_windows_are_data_for_any_verb():
    data = cx.texts([prose(64)], word_tokenizer(), length=8)
    from crystallite.data.batch import batches

    assert [(batch.size, list(batch.named)) for batch in batches(data)] == [(8, ["input_ids"])]
    assert np.prod([len(data), data.length]) == 8
