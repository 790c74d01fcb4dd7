"""Decoders layer by layer: the same in memory, on disk and after a kill; nothing is lost that does something."""

import itertools
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import torch

import crystallite as cx
from crystallite.compression.decoders import run
from crystallite.compression.decoders.layer_parts import find_parts
from crystallite.compression.decoders.sensitivity import probe_of
from crystallite.compression.decoders.share_out import SizeCurve, share_out
from crystallite.compression.decoders.shares import Chunks
from crystallite.compression.decoders.stack import find_stack
from crystallite.compression.pruning import eliminate, elimination_order_
from crystallite.data.batch import Batch
from crystallite.models.familiarity import describe, known_inputs
from crystallite.operators.linear import BlockLinear
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression, Weighed

transformers = pytest.importorskip("transformers")

SMALL = {
    **{"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 120, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 160}
MODELS = {
    "Llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=160, num_key_value_heads=2),
    "Qwen2": lambda: transformers.Qwen2Config(**SMALL, intermediate_size=160, num_key_value_heads=2),
    "Gemma2": lambda: transformers.Gemma2Config(**SMALL, intermediate_size=160, num_key_value_heads=2, head_dim=12),
    "GPTNeoX": lambda: transformers.GPTNeoXConfig(**SMALL, intermediate_size=160),
    "Phi3": lambda: transformers.Phi3Config(**SMALL, intermediate_size=160, num_key_value_heads=2, pad_token_id=0),
    "GPT2": lambda: transformers.GPT2Config(**GPT2, attn_pdrop=0.0),
    "OPT": lambda: transformers.OPTConfig(**SMALL, ffn_dim=160, word_embed_proj_dim=48),  # joins samples and positions
}


def model_of(name):
    torch.manual_seed(0)
    config = MODELS[name]()
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config)
    return model.eval()


def tokens(count=48, length=32, seed=0):
    return torch.randint(1, 120, (count, length), generator=torch.Generator().manual_seed(seed))


def batches():
    return [{"input_ids": part} for part in tokens().split(12)]


@pytest.mark.parametrize("name", MODELS)
def test_every_decoder_is_run_as_a_stack_and_knows_its_parts(name):
    model = model_of(name)
    batch = Batch(0, 12, named=batches()[0])
    stack = find_stack(model, batch)
    assert stack is not None
    parts = find_parts(stack, stack.layers[1], batch, "any", ())
    kinds = {key.partition(" ")[0] for key in parts.groups}
    assert "neurons" in kinds
    assert kinds & {"values", "scores"}, parts.alone
    assert parts.adds == (name != "Gemma2")  # norms lie between its layers and the stream
    assert len(parts.readers) == 2
    few, small = stack.with_few_tokens(batch.first(1))
    assert len(few.model.get_input_embeddings().weight) == len(batch.first(1).named["input_ids"].unique())
    assert torch.equal(few.begin(small)[0], stack.begin(batch.first(1))[0])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "any") for name in ("Llama", "Gemma2", "GPTNeoX", "GPT2")),
        *(pytest.param(name, "any", marks=pytest.mark.slow) for name in ("Qwen2", "Phi3", "OPT")),
        *itertools.product(["Llama", "GPT2"], ["dense", "uniform"]),
    ],
)
def test_a_folder_and_a_model_in_memory_become_the_same(name, form, tmp_path):
    model = model_of(name)
    model.save_pretrained(tmp_path / "dense", max_shard_size="40KB")
    small = cx.compress(model, batches(), budget=0.7, form=form)
    (before, after), x = cx.summary(small).macs, tokens(4, seed=1)
    assert 0.6 < after / before <= 0.7
    if name == "GPTNeoX":  # stores its head under another name than the model has for it
        with pytest.raises(cx.CheckpointError, match=r"expected a tensor 'lm_head\.weight', found none"):
            cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "small", budget=0.7, form=form)
        return
    found = cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "small", budget=0.7, form=form)
    assert found.macs == (before, after)
    opened = cx.load(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(opened(x).logits, cx.load(cx.save(small, tmp_path / "saved"))(x).logits)
        assert torch.allclose(opened(x).logits, small(x).logits, atol=1e-5)
    assert not (tmp_path / "small.partial").exists()
    if form != "any":
        assert not any(isinstance(module, BlockLinear) for module in opened.modules())


def test_neurons_that_do_nothing_go_and_nothing_is_lost():
    model = model_of("Llama")
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, 32 + 32 * n :] *= 1e-6  # 32, 64 and 96 neurons are needed
    small = cx.compress(model, batches(), budget=0.66, form="dense")
    widths = [layer.mlp.gate_proj.out_features for layer in small.model.layers]
    assert widths[0] < widths[1] < widths[2]
    x = tokens(4, seed=1)
    with torch.no_grad():
        found, expected = small(x).logits, model(x).logits
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_a_width_that_all_layers_share_leaves_little_of_the_budget_over():
    config = transformers.LlamaConfig(**SMALL, intermediate_size=768, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for budget in (0.9, 0.75):
        small = cx.compress(model, batches(), budget=budget, form="uniform")
        before, after = cx.summary(small).macs
        assert budget * before - 3 * 3 * 48 * 8 < after <= budget * before  # less than one step of 8 neurons
        assert small.config.intermediate_size % 8 == 0


@pytest.mark.parametrize("name", ["Llama", "GPT2"])  # without biases and with them
def test_the_error_in_the_record_is_that_of_the_layer(name):
    model, x = model_of(name), tokens(12)
    layers = {"Llama": "model.layers", "GPT2": "transformer.h"}[name]
    reader = {"Llama": "mlp.down_proj", "GPT2": "mlp.c_proj"}[name]
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] += 0.3  # something is the same everywhere: biases would help
        for writer in model.get_submodule(f"{layers}.0.mlp").children():
            if hasattr(writer, "weight"):
                writer.weight *= 5
    small = cx.compress(model, [{"input_ids": x}] * 4, budget=0.6, form="uniform")  # held out is what is fitted to
    seen = {}

    def watch(at):
        return lambda _, __, output: seen.update({at: output[0] if isinstance(output, tuple) else output})

    for at, one in (("dense", model), ("small", small)):
        one.get_submodule(f"{layers}.0").register_forward_hook(watch(at))
        one.get_submodule(f"{layers}.0.{reader}").register_forward_hook(watch(f"{at} reader"))
        with torch.no_grad():
            one(x)
    scale = seen["dense"].pow(2).mean(-1, keepdim=True).rsqrt()
    wrong, meant = ((seen[at] * scale).flatten(0, 1) for at in ("small", "dense reader"))
    wrong = wrong - (seen["dense"] * scale).flatten(0, 1)
    expected = float(wrong.pow(2).sum() / (meant - meant.mean(0)).pow(2).sum())
    found = next(c.error for c in cx.summary(small).changes if c.name == f"{layers}.0.{reader}")
    assert expected > 1e-4
    assert found == pytest.approx(expected, rel=0.02)


@pytest.fixture
def python_without_crystallite(tmp_path):
    """An environment with all that this one has, but not crystallite, however it is installed here."""
    venv.create(tmp_path / "env", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in (path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")):
        for entry in place.iterdir() if place.is_dir() else ():
            link = packages / entry.name
            if "crystallite" not in entry.name.lower() and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    paths = {"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}
    Path(sysconfig.get_path("purelib", vars=paths), "packages.pth").write_text(str(packages))
    return tmp_path / "env" / "bin" / "python"


@pytest.mark.parametrize("form", ["any", pytest.param("dense", marks=pytest.mark.slow), "uniform"])
def test_results_write_text_in_a_fresh_process_and_uniform_ones_without_crystallite(form, tmp_path, request):
    model, x = model_of("Llama"), torch.arange(1, 9)[None]
    small = cx.compress(model, batches(), budget=0.7, form=form)
    cx.save(small, tmp_path / "small")
    if form == "uniform":
        python = [request.getfixturevalue("python_without_crystallite"), "-I"]
        tried = [*python, "-c", "import transformers, crystallite"]
        refused = subprocess.run(tried, capture_output=True, text=True)
        assert refused.stderr.endswith("ModuleNotFoundError: No module named 'crystallite'\n")
    else:
        python = [sys.executable]
    code = (
        f"import sys\n{'' if form == 'uniform' else 'import crystallite'}\nimport torch, transformers\n"
        "model, x = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]), torch.arange(1, 9)[None]\n"
        "print(model.config.intermediate_size, float(model(x).logits.double().sum()))\n"
        "print(*model.generate(x, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())"
    )
    ran = subprocess.run([*python, "-c", code, tmp_path / "small"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    sizes, written = ran.stdout.splitlines()
    width, total = sizes.split()
    if form == "uniform":
        assert int(width) == small.config.intermediate_size < 160
    with torch.no_grad():
        assert float(total) == pytest.approx(float(small(x).logits.double().sum()), rel=1e-4)
    expected = small.generate(x, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    assert [int(token) for token in written.split()] == expected


RUN = """
import sys, torch, crystallite as cx
torch.set_num_threads(1)
x = torch.randint(1, 120, (48, 32), generator=torch.Generator().manual_seed(0))
cx.compress_folder(sys.argv[1], [{"input_ids": p} for p in x.split(12)], sys.argv[2], budget=[0.8, 0.7])
"""


@pytest.mark.parametrize(
    "mark",
    [
        pytest.param("state/probe-1.safetensors", marks=pytest.mark.slow),
        pytest.param("0.8/layer-00001.json", marks=pytest.mark.slow),
        "state/wrote-0-self_attn.o_proj.safetensors",
    ],
)
def test_a_killed_run_goes_on_to_the_same_files(mark, tmp_path, monkeypatch):
    model_of("Llama").save_pretrained(tmp_path / "dense")
    command = [sys.executable, "-c", RUN, str(tmp_path / "dense")]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "dense"), str(tmp_path / "whole")])
    exec(RUN)
    killed = subprocess.Popen([*command, str(tmp_path / "again")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while killed.poll() is None and not (tmp_path / "again.partial" / mark).exists():
        time.sleep(0.001)
    if killed.poll() is None:
        os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    if (tmp_path / "again").exists():
        pytest.skip("it was done before it could be killed")
    assert (tmp_path / "again.partial").exists()
    subprocess.run([*command, str(tmp_path / "again")], check=True, capture_output=True)
    for budget in ("0.8", "0.7"):
        assert_same_files(tmp_path / "whole" / budget, tmp_path / "again" / budget)


def assert_same_files(expected, found):
    """But for manifests, which name folders."""
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in found.iterdir())
    for name in names:
        if name != "manifest.json":
            assert (expected / name).read_bytes() == (found / name).read_bytes(), name


@pytest.mark.parametrize("form", ["any", pytest.param("uniform", marks=pytest.mark.slow)])
def test_several_budgets_give_what_each_alone_does(form, tmp_path, monkeypatch):
    model, budgets, probed = model_of("Llama"), [0.85, 0.7], []
    model.save_pretrained(tmp_path / "dense")
    alone = [cx.compress(model, batches(), budget=budget, form=form) for budget in budgets]
    monkeypatch.setattr(run, "probe_of", lambda *given: probed.append(0) or probe_of(*given))
    together = cx.compress(model, batches(), budget=budgets, form=form)
    assert len(probed) == len(model.model.layers)
    for one, other in zip(alone, together, strict=True):
        assert cx.summary(one).to_json() == cx.summary(other).to_json()
        expected, found = one.state_dict(), other.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    summaries = cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "small", budget=budgets, form=form)
    for budget, found, small in zip(budgets, summaries, together, strict=True):
        assert found.macs == cx.summary(small).macs
        cx.compress_folder(tmp_path / "dense", batches(), tmp_path / str(budget), budget=budget, form=form)
        assert_same_files(tmp_path / str(budget), tmp_path / "small" / str(budget))
        opened = cx.load(tmp_path / "small" / str(budget))
        assert cx.record(opened).options.budget == budget
    assert together[0].lm_head.weight is not together[1].lm_head.weight


def test_budgets_that_are_equal_or_cannot_be_reached_are_refused():
    model = model_of("Llama")
    with pytest.raises(cx.InvalidOption, match="budget: expected shares that differ"):
        cx.compress(model, batches(), budget=[0.7, 0.7])
    with pytest.raises(cx.InvalidOption, match=r"above 0 and up to 1, got 1\.5"):
        cx.compress(model, batches(), budget=[0.7, 1.5])
    with pytest.raises(cx.InvalidOption, match=r"budget 0\.01 with form"):
        cx.compress(model, batches(), budget=[0.7, 0.01], form="dense")


def test_what_cannot_be_done_is_refused_before_work_begins(tmp_path):
    model_of("Llama").save_pretrained(tmp_path / "dense")

    def asked(out="out", **options):
        return cx.compress_folder(tmp_path / "dense", batches(), tmp_path / out, **{"budget": 0.7, **options})

    with pytest.raises(cx.InvalidOption, match=r"memory: expected at least .* GB .* got 0\.01 GB"):
        asked(memory="10MB")
    with pytest.raises(cx.InvalidOption, match="memory: expected bytes"):
        asked(memory="much")
    with pytest.raises(cx.InvalidOption, match="budget"):
        asked(budget=1.5)
    with pytest.raises(cx.InvalidOption, match="form"):
        asked(form="unifrom")
    (tmp_path / "taken").mkdir()
    with pytest.raises(cx.InvalidOption, match="exists already"):
        asked("taken")
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(cx.InvalidOption, match=r'budget 0\.01 with form="dense": the smallest that can be reached'):
        asked(budget=0.01, form="dense")
    assert not (tmp_path / "out.partial").exists()


def test_a_decoder_that_needs_low_ranks_is_not_probed_first(monkeypatch):
    def refuse(*_):
        raise run.OutOfReach("budget 0.5: too small")

    monkeypatch.setattr(run.DecoderFit, "probe", lambda *_: 1 / 0)
    with pytest.raises(cx.InvalidOption, match="the smallest that can be reached"):
        cx.compress(model_of("Llama"), batches(), budget=0.2, form="dense")
    monkeypatch.setattr(run.DecoderFit, "check", refuse)
    small = cx.compress(model_of("Llama"), batches(), budget=0.5)
    assert "not fitted layer by layer: budget 0.5: too small" in str(cx.summary(small))


def test_what_layers_read_is_known_without_running_the_whole_model(tmp_path):
    model, data = model_of("Llama"), [{"input_ids": part} for part in tokens(32).split(8)]
    model.save_pretrained(tmp_path / "dense")
    cx.compress_folder(tmp_path / "dense", data, tmp_path / "small", budget=0.7)
    small = cx.compress(model, data, budget=0.7)
    opened = cx.load(tmp_path / "small")
    assert cx.record(small).options.inputs == cx.record(opened).options.inputs
    known = describe(
        opened,
        [one.layer for one in known_inputs(opened)],
        *([Batch(0, 8, named=each) for each in some] for some in (data[:3], data[3:])),
    )  # by running the whole model
    for one, other in zip(known_inputs(opened), known, strict=True):
        assert one.mean == pytest.approx(other.mean, rel=1e-3, abs=1e-4)
        assert one.usual == pytest.approx(other.usual, rel=1e-2)


def test_padding_is_not_fitted_to():
    model = model_of("Llama")
    x, mask = tokens(), torch.ones(48, 32, dtype=torch.long)
    mask[:, 20:] = 0
    found = []
    for filler in (0, 7):
        padded = torch.where(mask.bool(), x, filler)
        data = [{"input_ids": a, "attention_mask": b} for a, b in zip(padded.split(12), mask.split(12), strict=True)]
        found.append(cx.compress(model, data, budget=0.7).state_dict())
    assert found[0].keys() == found[1].keys()
    assert all(torch.allclose(found[0][name].double(), found[1][name].double(), atol=1e-5) for name in found[0])


def test_models_that_are_no_such_decoders_are_refused_by_name(tmp_path):
    small = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = {
        "is no causal language model": transformers.BertModel(transformers.BertConfig(**small, intermediate_size=96)),
        "experts are not fitted": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**small, intermediate_size=32, num_local_experts=2, num_key_value_heads=2)
        ),
        "T5ForConditionalGeneration is no": transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=120, d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16)
        ),
    }
    for number, (why, model) in enumerate(made.items()):
        model.save_pretrained(tmp_path / str(number))
        with pytest.raises((cx.InvalidOption, cx.CheckpointError), match=why):
            cx.compress_folder(tmp_path / str(number), batches(), tmp_path / "out", budget=0.7)
        assert not (tmp_path / "out.partial").exists()


def test_half_precision_stays_what_it_was(tmp_path):
    model = model_of("Llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    cx.compress_folder(tmp_path / "dense", tokens(), tmp_path / "small", budget=0.7, form="uniform")  # a tensor alone
    small = cx.load(tmp_path / "small")
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert bool(small(tokens(2)).logits.isfinite().all())


def test_another_run_does_not_go_on_from_this_one(tmp_path, monkeypatch):
    model_of("Llama").save_pretrained(tmp_path / "dense")
    monkeypatch.setattr(run.DecoderFit, "fit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "out", budget=0.8, form="dense")
    with pytest.raises(cx.InvalidOption, match="another run"):
        cx.compress_folder(tmp_path / "dense", batches(), tmp_path / "out", budget=0.7, form="dense")


def test_layers_that_are_ignored_stay(tmp_path):
    model = model_of("Llama")
    small = cx.compress(model, batches(), budget=0.8, form="dense", ignore="model.layers.0.*")
    assert all(c.macs_after == c.macs_before for c in cx.summary(small).changes if ".layers.0." in c.name)
    assert small.model.layers[0].mlp.gate_proj.out_features == 160


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_sources_that_take_turns_all_have_part_in_the_probe(sources):
    """Which parts may go is chosen from some of the positions: not from those of one source of text."""
    windows = [Batch(n, 1, named={"input_ids": torch.full((1, 512), n % sources)}) for n in range(48)]
    probed = [windows[n].named["input_ids"][0, 0].item() for n in Chunks.of(windows, [], seed=0).probed]
    assert 8192 <= 512 * len(probed) <= 2 * 8192
    assert min(probed.count(source) for source in range(sources)) >= len(probed) // sources - 2


def test_sharing_out_is_as_good_as_trying_everything():
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        curves = {}
        for name in "abc":
            steps = torch.rand(4, generator=rng, dtype=torch.float64).sort().values  # convex
            each = float(torch.rand(1, generator=rng)) + 0.5
            weights = tuple(each * size for size in (8, 6, 4, 2, 0))
            curves[name] = SizeCurve((8, 6, 4, 2, 0), (0.0, *steps.cumsum(0).tolist()), weights)
        total = sum(curve.weights[0] for curve in curves.values())

        def judge(sizes, curves=curves):
            places = [(c, c.sizes.index(size)) for c, size in zip(curves.values(), sizes, strict=True)]
            return sum(c.errors[i] for c, i in places), sum(c.weights[i] for c, i in places)

        error, left = judge(share_out(curves, total, 0.6 * total).values())
        tried = map(judge, itertools.product((8, 6, 4, 2, 0), repeat=3))
        assert left <= 0.6 * total
        assert error <= min(error for error, left in tried if left <= 0.6 * total) + 1.0  # the last step at most


def test_what_elimination_order_is_what_the_weights_lose():
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    both = Moments("a")
    both.add(x, x[:, :0])
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    regression = Regression.of_layer(both, both, weight, None, 0.01)
    places = torch.arange(12)[:, None]
    spent = Weighed(regression.weight.clone(), regression.metric.clone())
    order, costs = elimination_order_(spent, [12, 8, 3], places)
    for size, (kept, found) in eliminate(regression, [12, 8, 3], places).items():
        assert sorted(order[:size].tolist()) == kept.tolist()
        lost = weight - found
        assert costs[size] == pytest.approx(float(((lost @ regression.metric) * lost).sum()), rel=1e-6, abs=1e-9)
    for size, (kept, _) in eliminate(regression, range(12, 3, -1), places).items():  # and in order between those sizes
        assert sorted(order[:size].tolist()) == kept.tolist()


def test_elimination_takes_what_would_be_missed_least_each_time():
    rng = torch.Generator().manual_seed(3)
    square = torch.randn(40, 60, generator=rng, dtype=torch.float64)
    weight, metric = torch.randn(7, 40, generator=rng, dtype=torch.float64), square @ square.T

    def lost(kept):
        others = weight @ metric[:, kept] @ torch.linalg.inv(metric[kept][:, kept])
        change = weight.clone()
        change[:, kept] -= others
        return float(((change @ metric) * change).sum())

    kept, expected = [*range(40)], {40: 0.0}
    while len(kept) > 1:
        kept.remove(min(kept, key=lambda one: lost([n for n in kept if n != one])))
        expected[len(kept)] = lost(kept)
    spent = Weighed(weight.clone(), metric.clone())
    order, costs = elimination_order_(spent, range(40, 0, -1), torch.arange(40)[:, None])
    assert order[0] == kept[0]
    assert costs == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("width", [1, 2])
def test_what_is_left_of_elimination_is_the_best_for_those_neurons(width):
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(300, 24, generator=rng) @ torch.randn(24, 24, generator=rng)
    both = Moments("a")
    both.add(x, x[:, :0])
    weight = torch.randn(5, 24, generator=rng, dtype=torch.float64)
    regression = Regression.of_layer(both, both, weight, None, 0.01)
    places = torch.randperm(24, generator=rng)[:20].view(-1, width)  # four inputs belong to none and stay
    others = sorted({*range(24)} - {*places.flatten().tolist()})
    for size, (kept, found) in eliminate(regression, range(20 // width, 0, -3), places).items():
        columns = torch.tensor(sorted([*places[kept].flatten().tolist(), *others]))
        assert len(kept) == size
        assert torch.allclose(found[:, columns], regression.restricted(columns).weight, rtol=1e-6)
        assert int((found != 0).any(0).sum()) == len(columns)


def test_the_model_is_left_as_it_was():
    model = model_of("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cx.compress(model, batches(), budget=0.8, form="dense")
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
