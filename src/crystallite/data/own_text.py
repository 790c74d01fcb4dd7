"""Text that a language model writes itself: what it was trained on in miniature, of all kinds at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import suggest_keywords

__all__ = ["own_text", "taking_turns"]

_PIECE = 128  # tokens that are written in one go; a window is several of them
_AT_ONCE = 64  # pieces
_WINDOWS = 8  # in a batch


@suggest_keywords
def own_text(model: nn.Module, tokens: int, *, length: int = 512, seed: int = 0) -> list[dict[str, Tensor]]:
    """Batches of text that a causal language model of transformers writes itself, to calibrate it with.

    Every piece begins with a token by chance and goes on with tokens drawn from what the model predicts. What the model
    can do shows in it, whatever texts the user has: fitted to a mixture of both, a decoder holds on other kinds of text
    (docs/language_models.md has the figures).

    Args:
        model: the model.
        tokens: how many to write, rounded up to whole windows.
        length: tokens of a window.
        seed: of what is drawn.

    Returns:
        Batches of `input_ids`, eight windows each.

    Raises:
        InvalidOption: a model that does not generate, or no tokens.
    """
    whole: Any = model
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "config"):
        raise InvalidOption(f"own_text: expected a causal language model of transformers, got {type(model).__name__}")
    if tokens < 1 or length < 2:
        raise InvalidOption(f"own_text: expected at least one token, and windows of two, got {tokens} and {length}")
    windows = math.ceil(tokens / length)
    rng = torch.Generator().manual_seed(seed)
    size = int(whole.get_input_embeddings().num_embeddings)
    special = _special(whole, size)
    usual = torch.tensor([i for i in range(size) if i not in special])
    piece = min(_PIECE, length)
    rows: list[Tensor] = []
    missing = windows * math.ceil(length / piece)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        while missing:
            count = min(missing, _AT_ONCE)
            first = usual[torch.randint(len(usual), (count, 1), generator=rng)].to(whole.device)
            written = whole.generate(
                first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                min_new_tokens=piece - 1, max_new_tokens=piece - 1, suppress_tokens=sorted(special) or None,
                pad_token_id=0,
            )  # fmt: skip
            rows.append(written.cpu())
            missing -= count
    found = torch.cat(rows).reshape(windows, -1)[:, :length]
    return [{"input_ids": part} for part in found.split(_WINDOWS)]


def _special(model: Any, size: int) -> set[int]:
    """Tokens that mark beginnings and ends, which are no text."""
    found: set[int] = set()
    for config in (model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            found |= {*value} if isinstance(value, (list, tuple)) else set() if value is None else {value}
    return {token for token in found if 0 <= token < size}


def taking_turns(*sources: Any) -> Iterator[Any]:
    """Batches of several sources, one of each in turn.

    >>> list(taking_turns("abc", "x"))
    ['a', 'x', 'b', 'c']
    """
    nothing = object()
    for turn in zip_longest(*sources, fillvalue=nothing):
        yield from (batch for batch in turn if batch is not nothing)
