"""What matters of what a layer writes: how much the model's outputs depend on it, in which directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.recurrent import step_by_step
from crystallite.compression.session import Session
from crystallite.data.batch import Batch
from crystallite.data.outputs import judged
from crystallite.data.positions import real_rows
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of

__all__ = ["influence"]

_SAMPLES = 2048  # or as many sums of the outputs of fewer samples
_DRAWS = 8  # of signs for each output, at most
_LEAST = 1e-2  # what any direction is taken to matter, as a share of the mean


def influence(session: Session, progress: bool = False, least: float = _LEAST) -> dict[str, Tensor]:
    """For each layer a matrix L (outputs, outputs): an error e of what it writes adds ‖Lᵀe‖² to the output error.

    LLᵀ is the mean of ggᵀ over rows, where g is the gradient of a sum of the model's outputs with random signs: on
    average over the signs, gᵀe is what e adds to the outputs, to first order. Layers that no gradient reaches are left
    out; so are convolutions, and layers that write more than they read, for which this would cost more than it gains.
    least: what a direction is taken to matter that none of these gradients has, as a share of the mean.
    Cost: gradients through the model for up to 2,048 samples.
    """
    names = [name for name, unit in session.units.items() if _can_be_weighed(unit.module, name in session.uncut)]
    sums: dict[str, Tensor] = {}
    rng, samples, known = torch.Generator().manual_seed(session.seed), 0, sum(b.size for b in session.data.fitted)
    for batch in tqdm(session.data.fitted if names else (), "weighing", disable=not progress):
        if samples >= _SAMPLES:
            break
        samples += batch.size
        for name, rows in _gradients(session.dense, names, batch, rng, _SAMPLES * batch.size / known).items():
            sums[name] = sums.get(name, 0) + (rows.T @ rows).double()
    return {name: _root(total, least) for name, total in sums.items() if float(total.trace()) > 0}


def _can_be_weighed(module: nn.Module, recurrent: bool) -> bool:
    outputs, inputs = matrix_of(module).shape
    return recurrent or (not isinstance(module, Convolution) and outputs <= inputs)


def _root(total: Tensor, least: float) -> Tensor:
    scaled = total / total.diagonal().mean()
    scaled.diagonal().add_(least)
    return torch.linalg.cholesky(scaled)


def _gradients(
    model: nn.Module, names: Sequence[str], batch: Batch, rng: torch.Generator, wanted: float
) -> dict[str, Tensor]:
    """(rows, outputs) of each layer; wanted: sums of outputs, several of each where there are fewer outputs."""
    written: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if not output.is_inference():  # forward may allow no gradients
                written[name].append(output if output.requires_grad else output.requires_grad_())

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        stack.enter_context(step_by_step(model))
        stack.enter_context(torch.enable_grad())
        found = judged(batch.run(model, gradients=True))
        judged_rows = []
        for value in found.values():
            if value.requires_grad and value.ndim:
                rows = value.reshape(-1, value.shape[-1])[real_rows(batch, value.shape[:-1], value.numel(), 0)]
                judged_rows.append(_single(rows))
        asked = [(name, one) for name, some in written.items() for one in some]
        if not asked or not judged_rows:
            return {}
        draws = min(max(int(wanted / max(map(len, judged_rows))), 1), _DRAWS)
        gradients: list[tuple[str, Tensor]] = []
        for draw in range(draws):
            total = torch.stack([_signed_sum(rows, rng) for rows in judged_rows]).sum()
            wanted_for = [one for _, one in asked]
            try:
                own = torch.autograd.grad(total, wanted_for, retain_graph=draw + 1 < draws, allow_unused=True)
            except RuntimeError:  # the model writes into what gradients would need, as RWKV rescales its weights
                return {}
            gradients += [(name, one) for (name, _), one in zip(asked, own, strict=True) if one is not None]
    result: dict[str, list[Tensor]] = {}
    for name, gradient in gradients:
        rows = _single(gradient.reshape(-1, gradient.shape[-1]))
        result.setdefault(name, []).append(rows[rows.isfinite().all(1)])  # half precision has few numbers
    return {name: torch.cat(parts) for name, parts in result.items()}


def _signed_sum(rows: Tensor, rng: torch.Generator) -> Tensor:
    """A sum of outputs with random signs, in units of how much they vary."""
    signs = torch.randint(2, rows.shape, generator=rng).to(rows) * 2 - 1
    return (rows * signs).sum() / rows.detach().std().clamp_min(torch.finfo(rows.dtype).tiny)


def _single(rows: Tensor) -> Tensor:
    """The same in single precision at least: sums of half precision are no sums."""
    return rows.float() if rows.dtype.itemsize < 4 else rows
