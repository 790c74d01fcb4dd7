"""Feed-forward modules are recognised by what they compute; whatever computes anything else is not one."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crystallite.graph.feed_forward import recognise_feed_forward


def module(forward, layers=3, **more):
    """A module of layers a: 4 → 8, b: 8 → 4 and c: 4 → 8 with this forward."""

    class Built(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)
            if layers == 3:
                self.c = nn.Linear(4, 8)
            for name, value in more.items():
                setattr(self, name, value)

    Built.forward = forward
    return Built()


@pytest.mark.parametrize(
    ("forward", "layers", "expected"),
    [
        (lambda self, x: self.b(F.silu(self.a(x)) * self.c(x)), 3, ("c", "SiLU()", "b", "a")),
        (lambda self, x: self.b(self.a(x) * F.gelu(self.c(x), approximate="tanh")), 3,
         ("a", "GELU(approximate='tanh')", "b", "c")),
        (lambda self, x: self.b(torch.relu(self.a(x))), 2, ("a", "ReLU()", "b", None)),
        (lambda self, x: self.b(F.dropout(torch.sigmoid(self.a(x)), 0.5, False)), 2, None),
    ],
)  # fmt: skip
def test_recognised(forward, layers, expected):
    found = recognise_feed_forward(module(forward, layers))
    assert (found and (found.first, repr(found.activation), found.second, found.gate)) == expected


NO_PAIR = {
    "a residual": lambda self, x: x + self.b(F.silu(self.a(x)) * self.c(x)),
    "both activated": lambda self, x: self.b(F.silu(self.a(x)) * F.silu(self.c(x))),
    "a sum": lambda self, x: self.b(F.silu(self.a(x)) + self.c(x)),
    "a scale": lambda self, x: self.b(F.silu(self.a(x)) * self.c(x) * 2),
    "another input": lambda self, x: self.b(F.silu(self.a(x)) * self.c(x.flip(-1))),
    "a layer unused": lambda self, x: self.b(F.silu(self.a(x))),
    "a layer twice": lambda self, x: self.b(F.silu(self.a(x)) * self.a(x)),
    "a softmax": lambda self, x: self.b(torch.softmax(self.a(x), -1) * self.c(x)),
    "two results": lambda self, x: (self.b(F.silu(self.a(x)) * self.c(x)), x),
    "a weight of its own": lambda self, x: F.linear(F.silu(self.a(x)) * self.c(x), self.b.weight),
    "a data-dependent branch": lambda self, x: self.b(F.silu(self.a(x)) * self.c(x)) if x.sum() > 0 else x,
    "it fails": lambda self, x: 1 / 0,
    "a second argument": lambda self, x, scale=1: self.b(F.silu(self.a(x)) * self.c(x)),
}


@pytest.mark.parametrize("name", NO_PAIR)
def test_anything_else_is_no_pair(name):
    assert recognise_feed_forward(module(NO_PAIR[name])) is None


def test_dropout_is_not_overlooked_in_evaluation_mode():
    def forward(self, x):
        return self.b(self.drop(F.silu(self.a(x)) * self.c(x)))

    found = module(forward, drop=nn.Dropout(0.5)).eval()
    assert recognise_feed_forward(found) is None
    assert not any(m.training for m in found.modules())


def test_both_modes_must_be_the_same_pair():
    def forward(self, x):
        y = self.b(F.silu(self.a(x)) * self.c(x))
        return y if self.training else y.softmax(-1)

    assert recognise_feed_forward(module(forward)) is None

    def other_activation(self, x):
        return self.b((F.silu if self.training else torch.tanh)(self.a(x)) * self.c(x))

    assert recognise_feed_forward(module(other_activation)) is None


def test_an_attempt_that_fails_is_silent():
    heard = []

    class Listener(logging.Handler):
        def emit(self, record):
            heard.append(record)

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints what went wrong by a handler of its own
    logger.addHandler(listener)
    try:
        assert recognise_feed_forward(module(lambda self, x: self.b(self.a(torch.cat([x, x], -1))), 2)) is None
    finally:
        logger.removeHandler(listener)
    assert not heard


def test_more_parameters_are_no_pair():
    def forward(self, x):
        return self.b(F.silu(self.a(x)) * self.c(x))

    assert recognise_feed_forward(module(forward)) is not None
    assert recognise_feed_forward(module(forward, scale=nn.Parameter(torch.ones(1)))) is None
    assert recognise_feed_forward(module(forward, norm=nn.LayerNorm(4))) is None


@pytest.mark.parametrize("inside", [False, True])
def test_buffers_are_no_pair(inside):
    built = module(lambda self, x: self.b(F.silu(self.a(x)) * self.c(x)), counter=nn.Identity())
    (built.counter if inside else built).register_buffer("seen", torch.zeros(()))
    assert recognise_feed_forward(built) is None
