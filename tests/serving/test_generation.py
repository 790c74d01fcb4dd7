"""Generation is not served here: a compressed folder runs under transformers' own `generate`, in a fresh process."""

import subprocess
import sys

import crystallite as cx
from tests.helpers.text_models import language_model, prose, transformers
from tests.helpers.waiting import PATIENCE

PROGRAM = """
import sys
import crystallite, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
given = tokenizer("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
print(*model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())
"""


def test_a_compressed_folder_generates(tmp_path):
    model = language_model(tmp_path / "decoder")
    data = cx.texts([prose(2000)], tmp_path / "decoder", length=16)
    small = cx.compress(model, data, budget=0.6)
    folder = cx.save(small, tmp_path / "small", files=tmp_path / "decoder")
    given = transformers.AutoTokenizer.from_pretrained(folder)(
        "w1 w2 w3", return_tensors="pt", return_token_type_ids=False
    )
    expected = small.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    words = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [int(number) for number in done.stdout.split()] == expected.tolist()
    assert len(expected) == 11
