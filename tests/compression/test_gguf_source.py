"""A GGUF file is compressed layer by layer into what the model in it becomes in memory."""

import pytest
import torch

import crystallite as cx
from crystallite.cli.main import main
from tests.helpers.tiny_decoders import TEXT, decoder, tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")


def file_of(model, folder, type="q8_0"):
    cx.export(model, folder / "dense.gguf", type=type, tokenizer=tokenizer())
    return folder / "dense.gguf"


def opened(file):
    """By transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()


def tokens(seed=0):
    return torch.randint(3, 320, (48, 32), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "stored"), [("LlamaForCausalLM", "q8_0"), ("Qwen2ForCausalLM", "f16")])
def test_a_file_becomes_what_the_model_in_it_does(kind, stored, tmp_path):
    file = file_of(decoder(kind), tmp_path, stored)
    data = [{"input_ids": part} for part in tokens().split(12)]
    found = cx.compress_folder(file, data, tmp_path / "small", budget=0.8, form="uniform")
    small = cx.compress(opened(file), data, budget=0.8, form="uniform")
    assert found.macs == cx.summary(small).macs
    again, x = cx.load(tmp_path / "small"), tokens(1)
    with torch.no_grad():
        assert torch.equal(again(x).logits, cx.load(cx.save(small, tmp_path / "saved"))(x).logits)
    assert type(again).__name__ == kind
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    given = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    if kind == "LlamaForCausalLM":  # transformers opens the others by their own rules for splitting text
        assert written(TEXT).input_ids == given(TEXT).input_ids


def test_the_command_takes_a_file_and_plain_text(tmp_path, capsys):
    file = file_of(decoder(), tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    asked = [str(file), "--budget", "0.8", "--calibration", str(tmp_path / "text.txt"), "--length", "32"]
    assert main(["compress", *asked, "--form", "uniform", "--out", str(tmp_path / "small")]) == 0
    assert "Saved in" in capsys.readouterr().out
    assert cx.load(tmp_path / "small").config.intermediate_size < 96
    assert main(["compress", *asked, "--polish-steps", "2", "--out", str(tmp_path / "other")]) == 2
    assert "--polish-steps needs the model in memory" in capsys.readouterr().err


def test_what_transformers_would_leave_out_is_refused(tmp_path):
    import gguf

    file = file_of(decoder(), tmp_path)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", torch.ones(8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(cx.CheckpointError, match=r"would leave out tensors of this llama: rope_freqs\.weight"):
        cx.compress_folder(tmp_path / "scaled.gguf", tokens(), tmp_path / "small", budget=0.8)
