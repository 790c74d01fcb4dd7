"""Small networks of many kinds, by name, for what must hold for all of them."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Its activations are functions, not modules."""

    def __init__(self, sizes=(6, 12, 12, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.pool = nn.Conv2d(8, 6, 3), nn.MaxPool2d(2)
        self.head = nn.Linear(6 * 15 * 15, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)), inplace=True)
        return self.head(torch.flatten(self.pool(F.silu(self.second(x))), 1))


class Basic(nn.Module):
    def __init__(self, width, inside):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, inside, 3, padding=1), nn.Conv2d(inside, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, bias=False)
        self.blocks = nn.Sequential(Basic(6, 8), Basic(6, 8))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 12, bias=False), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    """A gate and its values as one layer, DenseNet's concatenation, a norm per head and a norm written out."""

    def __init__(self):
        super().__init__()
        self.both, self.more, self.out = nn.Linear(6, 24), nn.Linear(12, 4), nn.Linear(16, 8)
        self.scale, self.head_norm = nn.Parameter(torch.rand(8)), nn.LayerNorm(4)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        hidden = F.glu(self.both(x))
        hidden = torch.cat([hidden, self.more(hidden)], -1)
        hidden = self.head_norm(self.out(hidden).unflatten(-1, (2, 4))).flatten(-2)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.last(hidden)


class Attention(nn.Module):
    def __init__(self, eager=False):
        super().__init__()
        self.eager = eager
        self.query, self.key, self.value, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (m(x).view(batch, length, 3, 4).transpose(1, 2) for m in (self.query, self.key, self.value))
        if self.eager:
            mixed = F.softmax(q @ k.transpose(-1, -2) / 2, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_head": 3, "n_embd": 12, "vocab_size": 20, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=1, **sizes))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 20}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


IMAGES = (2, 3, 32, 32)
NETWORKS = {
    "functions": (MLP, (5, 6)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(), nn.PReLU(12), nn.Linear(12, 4)),
        (5, 6),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.RMSNorm(12), nn.Linear(12, 4)),
        (5, 6),
    ),
    "convolutions": (CNN, IMAGES),
    "groups": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 16, 3, groups=8),
            nn.Hardswish(),
            nn.Conv2d(16, 12, 1, groups=4),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(48, 4),
        ),
        IMAGES,
    ),
    "residual": (ResNet, IMAGES),
    "gated": (Gated, (5, 6)),
    "fused": (Fused, (5, 6)),
    "attention": (Attention, (2, 5, 12)),
    "eager attention": (lambda: Attention(eager=True), (2, 5, 12)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(12, 3, 24, batch_first=True), (2, 5, 12)),
    "gpt2": (_gpt2, None),
    "llama": (_llama, None),
}


def build(name):
    """A network in double precision and evaluation mode, every tensor of it random, and inputs for it."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().double().eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dtype == torch.float64 and "inv_freq" not in key:  # rotations must stay rotations
                tensor.copy_(torch.rand_like(tensor) + 0.1 if tensor.dim() == 1 else torch.randn_like(tensor) / 3)
    example = {"input_ids": torch.randint(20, (2, 7))} if shape is None else torch.randn(shape).double()
    return model, example


def run(model, example):
    """The outputs, and the gradient at the inputs where they have one."""
    if isinstance(example, dict):
        with torch.no_grad():
            return [model(**example, use_cache=False).logits]
    x = example.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad((y * torch.linspace(1, 2, y.numel()).view_as(y)).sum(), x)
    return [y.detach(), gradient]
