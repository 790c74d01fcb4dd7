"""Tiny mixtures of experts: of transformers, whose experts lie in stacks, and one with experts in a list."""

import pytest
import torch
from torch import nn

import crystallite as cx

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN = {
    "Mixtral": {"intermediate_size": 128, "num_local_experts": 4},
    "Qwen2Moe": {
        "intermediate_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64, "num_experts": 4,
    },
    "Qwen3Moe": {"intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "head_dim": 16},
    "Olmoe": {"intermediate_size": 128, "num_experts": 4},
    "GptOss": {
        "intermediate_size": 96, "num_local_experts": 4, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "DeepseekV3": {
        "intermediate_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
NAMES = list(OWN)


def mixture(name):
    """A random decoder in which every token is sent to 2 of 4 experts."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | OWN[name] | {"num_experts_per_tok": 2})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases of experts begin as zeros, and would not be missed
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def stacks(model):
    """Modules with experts in stacked parameters, by name."""
    return {name: m for name, m in model.named_modules() if sum(p.ndim == 3 for p in m.parameters(False)) == 2}


def tokens(count, length=32, seed=0):
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(seed))


def count_macs(model, ids):
    """Multiply-adds with weights while a model runs: of linear layers, routers, and of the chosen experts of stacks."""
    found = []

    def matrix(module, inputs, output):
        found.append(inputs[0].numel() // module.weight.shape[1] * module.weight.numel())

    def stack(module, inputs, output):
        found.append(inputs[1].numel() * sum(p[0].numel() for p in module.parameters(False) if p.ndim == 3))

    def blocks(module, inputs, output):
        found.append(inputs[0].numel() // module.in_features * module.macs)

    known = stacks(model)
    hooks = []
    for name, module in model.named_modules():
        own = module._parameters.get("weight")
        if name in known:
            hooks.append(module.register_forward_hook(stack))
        elif isinstance(module, cx.BlockLinear):
            hooks.append(module.register_forward_hook(blocks))
        elif own is not None and own.ndim == 2 and not isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_hook(matrix))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return sum(found)


class ListExpert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class ListMixture(nn.Module):
    """Experts in an `nn.ModuleList`, each of which runs only if a row is sent to it."""

    def __init__(self, width, hidden, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.members = nn.ModuleList(ListExpert(width, hidden) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, member in enumerate(self.members):
            rows, slot = torch.where(chosen == number)
            if len(rows):
                result[rows] += member(x[rows]) * weights[rows, slot, None]
        return x + result


def list_model():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), ListMixture(32, 64, 4), ListMixture(32, 64, 4), nn.Linear(32, 8)]
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for mixture_ in model[1:3]:
            mixture_.router.weight.mul_(4)
    return model
