"""A sentence encoder from a transformers folder, calibrated with plain text.

python examples/minilm.py                              a tiny encoder that is made here, in seconds
python examples/minilm.py FOLDER [TEXT_FILE]           yours, such as all-MiniLM-L6-v2: minutes
"""

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import crystallite as cx

WORDS = ["the", "a", "small", "large", "old", "new", "cat", "dog", "house", "tree", "sees", "finds", "near", "slowly"]


def tiny_encoder(folder):
    """A BERT of two layers with random weights, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS) + 2, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def sentences(count, seed):
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(count)) + "\n"


def main(folder=None, text=None):
    with TemporaryDirectory() as place:
        if folder is None:
            folder = Path(place) / "encoder"
            tiny_encoder(folder)
        if text is None:
            text = Path(place) / "text.txt"
            text.write_text(sentences(400, 0))
        from transformers import AutoModel

        model = AutoModel.from_pretrained(folder).eval()
        data = list(cx.texts(text, folder, batch=32))  # a paragraph is a sample, padded, with its attention mask
        fitted, held_out = data[: -len(data) // 5], data[-len(data) // 5 :]
        print(len(data), "batches of", text)

        small = cx.compress(model, fitted, budget=0.5, ignore="pooler*")  # a pooler sees each text once
        print(cx.summary(small), "\n")
        verdict = cx.validate(model, small, held_out, max_relative_deviation=0.9)
        print(verdict, "\n")

        cx.save(small, Path(place) / "small", source=model, files=folder)
        again = AutoModel.from_pretrained(Path(place) / "small").eval()  # once crystallite is imported
        batch = held_out[0]
        with torch.no_grad():
            difference = again(**batch).last_hidden_state - small(**batch).last_hidden_state
        print("opened again by transformers; largest difference:", float(difference.abs().max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
