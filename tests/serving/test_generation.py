"""Generation is not served here: compressed folders run under transformers' own `generate` and `transformers serve`."""

import json
import socket
import subprocess
import sys
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import crystallite as cx
from tests.helpers.text_models import language_model, prose, transformers
from tests.helpers.waiting import PATIENCE, wait_for

PROGRAM = """
import sys
import crystallite, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
given = tokenizer("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
print(*model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())
"""


SERVE = """
import sys
import crystallite
from transformers.cli.transformers import main
sys.argv[:1] = ["transformers", "serve"]
main()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A compressed language model, and its folder."""
    path = tmp_path_factory.mktemp("generation")
    model = language_model(path / "decoder")
    small = cx.compress(model, cx.texts([prose(2000)], path / "decoder", length=16), budget=0.6)
    return small, cx.save(small, path / "small", files=path / "decoder")


def expected(small):
    """Eight more tokens, by `generate`."""
    model, folder = small
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer("w1 w2 w3", return_tensors="pt", return_token_type_ids=False)
    return model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0], tokenizer


def test_a_compressed_folder_generates(small):
    tokens, _ = expected(small)
    words = [sys.executable, "-c", PROGRAM, str(small[1])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert [int(number) for number in done.stdout.split()] == tokens.tolist()
    assert len(tokens) == 11


@pytest.mark.slow
def test_a_compressed_folder_under_transformers_serve(small, tmp_path):
    if not pytest.importorskip("transformers.cli.serve").is_serve_available():
        pytest.skip("needs pip install 'transformers[serving]'")
    tokens, tokenizer = expected(small)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, words = (
        f"http://127.0.0.1:{port}",
        [str(small[1]), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
    )

    def answers():
        try:
            return urlopen(f"{url}/health").status == 200
        except URLError:
            return False

    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen([sys.executable, "-c", SERVE, *words], stdout=log, stderr=log) as server,
    ):
        try:
            wait_for(answers)
            body = {"model": str(small[1]), "prompt": "w1 w2 w3", "max_tokens": 8, "temperature": 0}
            asked = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
            with urlopen(asked, timeout=PATIENCE) as answer:
                (choice,) = json.load(answer)["choices"]
        finally:
            server.terminate()
    assert choice["text"].split() == tokenizer.decode(tokens[3:], skip_special_tokens=True).split()
