"""Stacks of experts are known by what they hold and compute, and go back to where they came from."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.experts import collapse_experts, expand_experts, recognise_experts, units_and_experts
from crystallite.operators.experts import Experts
from tests.helpers.experts import NAMES, mixture, stacks, tokens

SIZES = {
    "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "hidden_act": "silu", "mlp_hidden_act": "relu2",
    "moe_latent_size": None, "swiglu_limit": 1.0, "swiglu_alpha": 1.702, "_experts_implementation": "eager",
}  # fmt: skip


def stack(family, name):
    """A module with random experts, of a family that differs from the others in how it computes them."""
    torch.manual_seed(0)
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    found = getattr(module, name)(SimpleNamespace(**SIZES))
    for parameter in found.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    return found.eval()


def routed(count=4):
    rng = torch.Generator().manual_seed(3)
    index = torch.rand(11, count, generator=rng).argsort(1)[:, :2]
    return 3 * torch.randn(11, 16, generator=rng), index, torch.rand(11, 2, generator=rng)


@pytest.mark.parametrize("name", NAMES)
def test_models_compute_the_same_and_get_their_stacks_back(name):
    model = mixture(name)
    expanded = expand_experts(copy.deepcopy(model))
    assert sum(isinstance(m, Experts) for m in expanded.modules()) == len(stacks(model)) > 0
    assert not stacks(expanded)
    ids = tokens(2)
    with torch.no_grad():
        torch.testing.assert_close(expanded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    back = collapse_experts(expanded)
    assert [(n, type(m)) for n, m in back.named_modules()] == [(n, type(m)) for n, m in model.named_modules()]
    assert list(back.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())
    assert all(m.config is back.config for m in stacks(back).values() if hasattr(m, "config"))


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("aria", "AriaExperts", {"transposed": True, "interleaved": False}),
        ("gpt_oss", "GptOssExperts", {"transposed": True, "interleaved": True, "limit": 1.0, "shift": 1.0}),
        ("minimax_m3_vl", "MiniMaxM3VLExperts", {"interleaved": False, "limit": 1.0, "alpha": 1.702}),
        ("deepseek_v4", "DeepseekV4Experts", {"limit": 1.0, "shift": 0.0, "alpha": None}),
        ("nemotron_h", "NemotronHExperts", {"weights": {"up": "up_proj", "down": "down_proj"}}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_ways_to_store_and_to_gate(family, name, expected, dtype):
    module = stack(family, name).to(dtype)
    form = recognise_experts(module)
    found = vars(form.layout) | vars(form.gating)
    assert {key: found[key] for key in expected} == expected
    made, (x, index, weights) = Experts.from_stack(module, *form).float(), routed()
    assert (made(x, index, weights) - module.float()(x, index, weights)).norm() < 1e-5 * x.norm()


def test_a_module_of_another_function_is_refused_by_name():
    class Cubed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 8))

        def forward(self, x, index, weights):
            result = torch.zeros_like(x)
            for slot in range(index.shape[1]):
                hidden = torch.einsum("ti,toi->to", x, self.up[index[:, slot]]) ** 3
                result = result + weights[:, slot, None] * torch.einsum("th,toh->to", hidden, self.down[index[:, slot]])
            return result

    model = nn.Sequential(nn.Linear(4, 4), Cubed())
    assert expand_experts(copy.deepcopy(model))[1].__class__ is Cubed
    (unit,) = (u for u in units_and_experts(model, ["*"], []) if u.name == "1")
    assert unit.reason == "it computes something else than feed-forward experts of a kind that is known"
    llama4 = stack("llama4", "Llama4TextExperts")
    assert "cannot be called with hidden states, indices of experts" in recognise_experts(llama4)
    model[1].more = nn.Parameter(torch.zeros(5))
    assert "do not fit together" in recognise_experts(model[1])


def test_stacks_that_must_stay_are_said_why():
    first, second = (stack("mixtral", "MixtralExperts") for _ in range(2))
    second.down_proj = first.down_proj
    model = expand_experts(nn.ModuleList([first, second, stack("mixtral", "MixtralExperts")]))
    assert [type(m).__name__ for m in model] == ["MixtralExperts", "MixtralExperts", "Experts"]
    reasons = {u.name: u.reason for u in units_and_experts(model, ["*"], [])}
    assert reasons["0"] == reasons["1"] == "its weights are tied"
    hooked = stack("mixtral", "MixtralExperts")
    hooked.register_forward_hook(lambda *_: None)
    (unit,) = units_and_experts(expand_experts(hooked), ["*"], [])
    assert unit.reason == "hooks are attached to it"
    assert "meta device" in recognise_experts(stack("mixtral", "MixtralExperts").to("meta"))


def test_frozen_weights_stay_frozen():
    module = stack("gpt_oss", "GptOssExperts")
    module.gate_up_proj.requires_grad_(False)
    made = expand_experts(nn.Sequential(module))
    flags = {name.split(".")[-2]: p.requires_grad for name, p in made.named_parameters() if name.endswith("weight")}
    assert flags == {"gate": False, "up": False, "down": True}
    back = collapse_experts(made)[0]
    assert (back.gate_up_proj.requires_grad, back.down_proj.requires_grad) == (False, True)


def test_every_expert_is_a_line_of_the_analysis(tmp_path):
    model = mixture("GptOss")
    found = cx.analyze(model, fast=True, null="empirical")
    rows = {row.name: row for row in found.rows}
    for name, module in stacks(model).items():
        for number in range(4):
            row = rows[f"{name}.gate_up_proj[{number}]"]
            assert (row.rows, row.cols) == (192, 64)  # outputs, inputs, though they are stored the other way round
            assert rows[f"{name}.down_proj[{number}]"].rows == 64
            turned = {"experts": module.gate_up_proj[number].detach().T.contiguous()}
            (alone,) = cx.analyze(turned, fast=True, null="empirical").rows
            assert row.kept == alone.kept
    lines = [line for line in found.table().splitlines() if "experts" in line]
    assert len(lines) == 2 * len(stacks(model))
    assert all("[0…3]" in line for line in lines)
    model.save_pretrained(tmp_path)
    stored = {row.name: row for row in cx.analyze(tmp_path, fast=True, null="empirical").rows}
    assert {name: row.kept for name, row in stored.items()} == {name: row.kept for name, row in rows.items()}


def test_a_folder_with_an_expert_in_each_tensor(tmp_path):
    model = mixture("Mixtral")
    model.save_pretrained(tmp_path)
    found = cx.analyze(tmp_path, fast=True)
    expected = {f"experts.{i}.w{k}" for i in range(4) for k in (1, 2, 3)}
    assert {row.name.partition("moe.")[2] for row in found.rows if "experts" in row.name} == expected
    assert sum("experts.0…3." in line for line in found.table().splitlines()) == 6
