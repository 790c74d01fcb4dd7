"""Tables of tokens and heads of low rank: best where it counts, in every joint, refused where they cannot be."""

import filecmp

import pytest
import torch

import crystallite as cx
from crystallite.compression.decoders.on_disk import _Disk
from crystallite.compression.decoders.token_tables import HeadSums, Tables, fit_tables

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 160, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def llama(tied=True, **more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, **more)).eval()


def tokens(count=48, length=32, seed=0):
    return torch.randint(1, 120, (count, length), generator=torch.Generator().manual_seed(seed))


def batches():
    return [{"input_ids": part} for part in tokens().split(12)]


def numbers(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("objective", ["macs", "parameters"])
def test_a_smaller_table_goes_through_every_joint(tied, objective, tmp_path):
    model, x, asked = llama(tied), tokens(4, seed=1), {"budget": 0.75, "embeddings": 0.5, "objective": objective}
    model.save_pretrained(tmp_path / "dense")
    small = cx.compress(model, batches(), **asked)
    before, after = cx.summary(small).macs if objective == "macs" else (numbers(model), numbers(small))
    assert 0.7 < after / before <= 0.75
    table, head = small.get_input_embeddings(), small.lm_head
    assert [type(table), type(head)] == [cx.LowRankEmbedding, cx.LowRankHead]
    assert (table.weight is head.weight) == tied
    assert {c.name for c in cx.summary(small).changes if "rank" in c.became} == {"model.embed_tokens", "lm_head"}
    assert sum(c.parameters_after for c in cx.summary(small).changes) == sum(
        p.numel() for p in small.parameters() if p.ndim > 1
    )
    found = cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "small", **asked)
    assert found.macs == cx.summary(small).macs
    small.save_pretrained(tmp_path / "pretrained")
    with torch.no_grad():
        expected = small(x).logits
        for opened in (
            cx.load(tmp_path / "small"),
            cx.load(cx.save(small, tmp_path / "saved")),
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained"),
        ):
            assert torch.equal(opened(x).logits, expected)
            assert (opened.get_input_embeddings().weight is opened.lm_head.weight) == tied
            written = opened.generate(x[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert torch.equal(written, small.generate(x[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_a_table_that_has_a_low_rank_loses_nothing():
    model, x = llama(), tokens(4, seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.randn(120, 16) @ torch.randn(16, 48) * 0.02)
    small = cx.compress(model, batches(), budget=0.95, embeddings=0.75, objective="parameters")
    assert small.lm_head.rank == 16
    kept = transformers.LlamaForCausalLM(model.config).eval()
    kept.load_state_dict(model.state_dict())
    kept.lm_head, kept.model.embed_tokens = small.lm_head, small.model.embed_tokens
    with torch.no_grad():
        assert torch.allclose(kept(x).logits, model(x).logits, atol=1e-4)


def test_the_rank_is_the_best_under_both_metrics():
    model, rng = llama(), torch.Generator().manual_seed(3)
    expected = torch.rand(120, generator=rng).double() ** 4
    roots = [torch.randn(48, 48, generator=rng).double() * torch.logspace(0, -2, 48).double() for _ in range(2)]
    heads, squares = (root @ root.T for root in roots)
    tables = Tables.of(model, 0.5, {"model.embed_tokens", "lm_head"})
    found = fit_tables(model, tables, HeadSums(1, expected, heads), squares, 1)
    weight = model.lm_head.weight.detach().double()
    rows = expected / expected.sum() / 2 + 0.5 / 120

    def cost(other):
        wrong = (weight - other) * rows.sqrt()[:, None]
        return float(((wrong @ (heads + squares)) * wrong).sum())

    ours = cost(found["weight"].double() @ found["project"].double())
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    plain = cost(left[:, : tables.rank] * values[: tables.rank] @ right[: tables.rank])
    root = torch.linalg.cholesky(heads + squares + 1e-3 * (heads + squares).diagonal().mean() * torch.eye(48))
    least = float((torch.linalg.svdvals(rows.sqrt()[:, None] * weight @ root)[tables.rank :] ** 2).sum())
    assert ours <= least * (1 + 1e-4)
    assert ours < 0.5 * plain


def test_a_run_that_was_stopped_goes_on_to_the_same_files(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "dense")
    asked = {"budget": [0.8, 0.7], "embeddings": 0.5, "objective": "parameters"}
    cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "whole", **asked)
    write = _Disk.write

    def stops(self, result, number, layer, fitted):
        if number == 1:
            raise KeyboardInterrupt
        write(self, result, number, layer, fitted)

    monkeypatch.setattr(_Disk, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "again", **asked)
    monkeypatch.setattr(_Disk, "write", write)
    cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "again", **asked)
    files = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors"))
    assert len(files) == 2 * 4
    for file in files:
        assert filecmp.cmp(tmp_path / "whole" / file, tmp_path / "again" / file, shallow=False), file


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "uniform"}, 'form="uniform"'),
        ({"form": "dense"}, 'form="dense"'),
        ({"embeddings": 1.0}, "between 0 and 1"),
        ({"embeddings": 0.001}, "rank of 0"),
        ({"ignore": "lm_head"}, "lm_head may not change"),
        ({"objective": "latency"}, "fitted layer by layer"),
        ({"budget": 0.01}, "smallest that can be reached"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, said):
    with pytest.raises(cx.InvalidOption, match=said):
        cx.compress(llama(), batches(), **{"budget": 0.7, "embeddings": 0.5, **options})


def test_other_models_and_files_are_refused_by_name(tmp_path):
    with pytest.raises(cx.InvalidOption, match=r"embeddings= is for decoders.*Linear"):
        cx.compress(torch.nn.Linear(8, 8), torch.randn(99, 8), budget=0.5, embeddings=0.5)
    torch.manual_seed(0)
    scaled = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=12)).eval()
    with pytest.raises(cx.InvalidOption, match=r"model\.embed_tokens: expected PyTorch's Embedding, got a Gemma2"):
        cx.compress(scaled, batches(), budget=0.8, embeddings=0.5)
    small = cx.compress(llama(), batches(), budget=0.8, embeddings=0.5, objective="parameters")
    pytest.importorskip("gguf")
    with pytest.raises(cx.InvalidOption, match=r"model\.embed_tokens: a LowRankEmbedding.*form="):
        cx.export(small, tmp_path / "small.gguf")
