"""What is saved is judged by lm-evaluation-harness as any other transformers folder. Needs `pip install lm_eval`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import crystallite as cx
from tests.helpers.text_models import WORDS, language_model, prose, word_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")

SCRIPT = """
import json, sys
{imports}
import lm_eval
from lm_eval.tasks import TaskManager
folder, tasks = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={{"pretrained": folder, "dtype": "float32"}}, tasks=["counting"], device="cpu", batch_size=4,
    task_manager=TaskManager(include_path=tasks, include_defaults=False), bootstrap_iters=0,
)
print(json.dumps(found["results"]["counting"]["acc,none"]))
print(json.dumps("crystallite" in sys.modules))
"""
TASK = """
task: counting
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: context
doc_to_choice: ends
doc_to_target: right
target_delimiter: " "
metric_list:
  - metric: acc
"""


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"context": f"w{i} w{i + 1}", "ends": [WORDS[i], WORDS[i + 3]], "right": i % 2} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "counting.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    return folder, rows


def expected(model, rows):
    """The share of questions whose right word is the likelier one."""
    coder, right = word_tokenizer(), 0
    for row in rows:
        ids = coder(row["context"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, -1]
        first, second = (float(scores[coder(end)["input_ids"][0]]) for end in row["ends"])
        right += int(second > first) == row["right"]
    return right / len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["any", "uniform"])
def test_the_harness_judges_what_was_saved(tmp_path, tasks, form):
    model = language_model(tmp_path / "model")
    data = cx.texts([prose(2000)], word_tokenizer(), length=16)
    small = cx.compress(model, data, budget=0.6, form=form)
    cx.save(small, tmp_path / "small", files=tmp_path / "model")
    script = SCRIPT.format(imports="import crystallite" if form == "any" else "")
    paths = [str(Path(cx.__file__).parents[1]), *filter(None, sys.path)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": ":".join(paths),
    }
    words = [sys.executable, "-c", script, str(tmp_path / "small"), str(tasks[0])]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    accuracy, known = map(json.loads, done.stdout.splitlines()[-2:])
    assert accuracy == pytest.approx(expected(small, tasks[1]))
    assert known == (form == "any")
