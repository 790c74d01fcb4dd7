"""What a block is for: in a network of two tasks whose blocks serve one each, the table says so."""

import json

import pytest
import torch
from torch import nn

import crystallite as cx


@pytest.fixture(scope="module")
def two_tasks():
    """A trained network that reads two independent inputs side by side, and tells a class of each."""
    torch.manual_seed(0)
    x = torch.randn(1200, 16)
    left, right = (x[:, :8] @ torch.randn(8, 3)).argmax(1), (x[:, 8:] @ torch.randn(8, 3)).argmax(1)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 6))
    masks = [torch.zeros(layer.weight.shape) for layer in net[::2]]
    order = torch.randperm(32)  # hidden neurons of the two tasks are mixed
    masks[0][order[:16], :8] = masks[0][order[16:], 8:] = 1
    masks[1][:3][:, order[:16]] = 1
    masks[1][3:][:, order[16:]] = 1
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        for layer, kept in zip(net[::2], masks, strict=True):
            layer.weight.data *= kept
        logits = net(x[:800])
        loss = nn.functional.cross_entropy(logits[:, :3], left[:800])
        loss = loss + nn.functional.cross_entropy(logits[:, 3:], right[:800])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for layer, kept in zip(net[::2], masks, strict=True):
        layer.weight.data *= kept
    small = cx.reorganize(net.eval(), level=None, only_if_faster=False)
    return net, small, x[800:], left[800:], right[800:]


class ByTask(nn.Module):
    """One task for each sample: the first number says which; returns the logits of that task."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        logits = self.net(x[:, 1:])
        return torch.where(x[:, :1] > 0.5, logits[:, 3:], logits[:, :3])


def test_each_block_serves_one_task(two_tasks):
    net, small, x, left, right = two_tasks
    task = torch.arange(len(x)) % 2
    data = [(torch.cat([task[:, None].float(), x], 1), torch.where(task == 1, right, left))]
    verdict = cx.validate(
        ByTask(net), ByTask(small), data, "accuracy", slices=task.tolist(), ablate_blocks=True, layers=False
    )
    first, second = verdict.block_roles.roles
    assert first.classes["0"] > 0.3 and abs(first.classes["1"]) < 1e-9  # noqa: PT018
    assert second.classes["1"] > 0.3 and abs(second.classes["0"]) < 1e-9  # noqa: PT018
    assert "loss of accuracy by class or slice" in repr(verdict)
    plain = json.loads(json.dumps(verdict.to_json()))["block_roles"]
    assert plain["metric"] == "accuracy" and len(plain["roles"]) == 2  # noqa: PT018
    page = cx.report(net, verdict=verdict, title="two tasks")
    assert "What blocks are for" in page.html


def test_without_labels_the_outputs_that_change_say_it(two_tasks):
    _, small, x, *_ = two_tasks
    first, second = cx.block_roles(small, x).roles
    assert first.classes == second.classes == {}
    changed = [[role.outputs[f"output[{i}]"] > 0.1 for i in range(6)] for role in (first, second)]
    assert changed == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
    assert cx.block_roles(small, x).plot().svg().startswith("<svg")


def test_classes_of_the_targets_are_the_groups(two_tasks):
    _, small, x, left, _ = two_tasks
    found = cx.block_roles(small, [(x[:200], left[:200]), (x[200:], left[200:])], "accuracy")
    assert list(found.roles[0].classes) == ["0", "1", "2"]
    lost = sum(found.roles[0].classes.values()) / 3
    whole = float((small(x).argmax(1) == left).double().mean())
    assert found.samples == 400
    assert lost > 0.1 if whole > 0.5 else lost < whole + 1e-6


def test_tokens_that_a_block_predicts():
    """A language model whose hidden units predict even tokens in one block and odd tokens in the other."""

    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 8)
            self.head = nn.Linear(8, 8, bias=False)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    model = Bigram().eval()
    with torch.no_grad():  # every token is followed by itself
        model.embedding.weight.copy_(torch.eye(8))
        model.head.weight.copy_(6 * torch.eye(8))
        model.head.weight += 0.01 * (torch.arange(8)[:, None] % 2 == torch.arange(8) % 2)
    small = cx.reorganize(model, level=None, only_if_faster=False, targets="head")
    tokens = torch.arange(8).repeat_interleave(8).view(8, 8)
    found = cx.block_roles(small, [{"input_ids": tokens}], "perplexity")
    served = [{int(token) % 2 for token, rise in role.tokens.items() if rise > 1} for role in found.roles]
    assert served == [{0}, {1}]
    assert all(role.classes["all"] > 0.5 for role in found.roles)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(cx.InvalidOption, match="expected a model with blocks or experts"):
        cx.block_roles(nn.Linear(4, 4), torch.randn(8, 4))
