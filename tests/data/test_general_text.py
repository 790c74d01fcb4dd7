"""English prose that comes with Python."""

import subprocess
import sys

import pytest

import crystallite as cx
from crystallite.data import general_text


def test_it_is_prose_in_paragraphs_without_repetition():
    paragraphs = cx.general_text().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 500
    assert min(len(text.split()) for text in paragraphs) >= 25
    assert all(text[-1] in ".?!" and "\n" not in text for text in paragraphs)
    words = cx.general_text().lower().split()
    assert words.count("the") > 0.04 * len(words)  # as in English


def test_it_is_the_same_in_every_process():
    code = "import crystallite as cx, hashlib; print(hashlib.sha256(cx.general_text().encode()).hexdigest())"
    found = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(found) == 1


def test_files_that_are_no_python_and_a_missing_reference_are_left_out(tmp_path, monkeypatch):
    prose = "This sentence says what a function of a library does for those who call it, and why they should do it."
    (tmp_path / "good.py").write_text(f'"""{prose} {prose}"""')
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_good.py").write_text(f'"""Tests. {prose} {prose}"""')
    monkeypatch.setattr(general_text.os, "__file__", str(tmp_path / "os.py"))
    monkeypatch.setattr(general_text, "_topics", list)
    assert general_text.general_text.__wrapped__() == f"{prose} {prose}"
    (tmp_path / "good.py").unlink()
    with pytest.raises(cx.InvalidOption, match="without the sources of its standard library"):
        general_text.general_text.__wrapped__()


@pytest.mark.parametrize("text", ["too short.", "x = f(1) + g[2] * 3 / 4 - 5 " * 9, "no end of a sentence " * 10])
def test_what_is_no_prose_is_left_out(text):
    assert not general_text._is_prose(text)
