"""A language model from a folder and plain text: compress, compare perplexities, open with transformers, write GGUF.

python examples/language_model.py                      a tiny Llama that is made and trained here, in seconds
python examples/language_model.py FOLDER TEXT OTHER    yours, fitted to one text file and judged by another
"""

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import crystallite as cx

SENTENCES = [
    "the cat sees the dog near the river.", "an old dog finds a small house.", "the river leaves the trees behind.",
    "a new tree grows under the house.", "the small cat sleeps in the old tree.",
]  # fmt: skip


def prose(count, seed):
    rng = random.Random(seed)
    return " ".join(rng.choices(SENTENCES, k=count)) + "\n"


def tiny_llama(folder, text):
    """A Llama of two layers that has read the text a few times, with a tokenizer of byte pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    made.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    ))  # fmt: skip
    ids = torch.tensor(tokenizer(text)["input_ids"])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        starts = torch.randint(0, len(ids) - 32, (16, 1))
        batch = ids[starts + torch.arange(32)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def main(folder=None, text=None, other=None):
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as place:
        place = Path(place)
        if folder is None:
            folder, text, other = place / "model", place / "text.txt", place / "other.txt"
            text.write_text(prose(400, 0))
            other.write_text(prose(100, 1))
            tiny_llama(folder, text.read_text())
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        data = cx.texts(text, folder, tokens=32_768)
        print(data)

        small = cx.compress(model, data, budget=0.8, form="uniform")  # a stock config with a smaller width
        print(cx.summary(small), "\n")
        print(cx.validate(model, small, cx.texts(other, folder), metric="perplexity", max_drop=0.5), "\n")

        cx.save(small, place / "small", source=model, files=folder)  # with the tokenizer
        again = AutoModelForCausalLM.from_pretrained(place / "small")
        print("intermediate size:", model.config.intermediate_size, "→", again.config.intermediate_size)
        try:
            print(cx.export(again, place / "small.gguf", type="q8_0"))
        except cx.CrystalliteError as error:  # the gguf package is missing: pip install 'crystallite[gguf]'
            print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
