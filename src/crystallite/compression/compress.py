"""`compress`: a copy of a model in which smaller operators stand for its layers, fitted without training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from crystallite.compression.decoders.in_memory import compress_decoder
from crystallite.compression.decoders.on_disk import FORMS
from crystallite.compression.decoders.polish import polish_decoder_
from crystallite.compression.decoders.run import DecoderOptions
from crystallite.compression.guarantee import cheapest, check_tolerance, sample_losses, set_aside
from crystallite.compression.model_fit import ModelFit, change_options_
from crystallite.compression.sample_check import check_positions
from crystallite.compression.whole_cost import budgets_of
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.data.batch import batches, evaluating
from crystallite.data.calibration import Calibration
from crystallite.data.own_text import own_text as written_by
from crystallite.data.own_text import taking_turns
from crystallite.models.composites import collapse_
from crystallite.models.familiarity import describe, known_inputs
from crystallite.models.preparing import note_call_, note_preparation_, prepared
from crystallite.models.transformers_folder import write_config

__all__ = ["compress"]

OBJECTIVES = ("macs", "parameters", "latency", "int8")
_NO_TABLES = (
    'embeddings= is for decoders that are fitted layer by layer, with budget= a share of "macs" or "parameters"'
)


@suggest_keywords
def compress(
    model: nn.Module,
    calibration: Any,
    *,
    budget: float | Sequence[float] | None = None,
    blocks: int | None = None,
    joint: bool = False,
    tolerance: float | None = None,
    confidence: float = 0.95,
    risk: str = "deviation",
    objective: str = "macs",
    form: str = "any",
    embeddings: float | None = None,
    own_text: int = 0,
    polish_steps: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    ridge: float = 0.01,
    seed: int = 0,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    progress: bool = False,
) -> Any:
    """A copy of the model whose layers are smaller operators that compute nearly the same.

    Error is measured on everything the model returns, of outputs called logits on the probabilities that a softmax
    makes of them: wrap a model of which only a part is used, so that it returns that part alone. `cx.summary` says what
    each layer became and its held-out error. Other kinds of layers and tied weights are left alone, and the summary
    says why; a layer that runs several times in a call is fitted on all that it reads.

    Args:
        model: the model; it is not changed.
        budget: the share of the whole model's multiply-adds with weights to keep, between 0 and 1, counted as often as
            a weight is used in the first batch: a convolution's at every place. Layers that are left alone count too.
            Each linear layer, convolution or recurrent network becomes what does least damage: fewer hidden neurons or
            channels, fewer numbers in attention heads, two layers of low rank, blocks, or it stays dense; all are
            ordinary small layers wherever possible. How much of a layer can go is judged by held-out samples. Several
            budgets in a list give a list of models; what layers cost to make smaller is then measured once for all.
        blocks: instead of a budget, every linear layer as this many independent blocks.
        joint: with `blocks`, one partition through consecutive layers, so that they split into subnetworks.
        tolerance: instead of a budget, the cheapest one whose risk is at most this on data like the calibration data;
            refused where it cannot be shown. See `compression/guarantee.py`.
        confidence: with which the tolerance must be shown.
        risk: "deviation", the mean of ‖y′ − y‖ / ‖y‖ (at most 1) over samples, or "disagreement", the share of other
            decisions (argmax).
        calibration: batches of inputs as for `validate`; a few times as many samples (or tokens) as the widest layer
            has inputs. A layer that fewer reach is left alone if it is a minor one, such as a pooler. The last fifth
            judges and is not fitted on. Of a large set the first 32,768 (more for layers of more than 2,048 inputs)
            are fitted on; polishing learns from all of it. Targets are not used.
        objective: what the budget is a share of: "macs", multiply-adds; "parameters"; "latency", the measured time that
            the layers take for the first batch, on this machine and its threads; or "int8", the time that they take in
            ONNX Runtime once they are exported with 8-bit weights.
        form: what layers may become. "any": whatever does least damage. "dense": ordinary layers of other sizes only.
            "uniform", for decoders: ordinary layers, of the same sizes throughout, so that the result is what its class
            makes of a config with smaller numbers, and runs wherever the original did, without crystallite.
        embeddings: of the table of tokens and the head of a decoder, the share of numbers to keep, as a low rank; left
            out, both stay. Fewer layers' weights for the same budget lose less as a rule: see docs/language_models.md.
        own_text: so many tokens that a decoder writes itself are taken in turn with the calibration data, so that the
            result holds on other kinds of text than these.
        polish_steps: so many steps of training inside the structure afterwards, to return what the dense model returns;
            the best state by held-out error is kept.
        checkpoint: a folder for the state of polishing; called again after an interruption, training goes on from there
            to the result it would have had.
        ridge: how strongly weights are pulled to the original ones, relative to the mean variance of the inputs.
        targets, ignore: a pattern of layer names, or several.
        seed: of everything that is drawn at random.
        progress: a bar on standard error.

    Returns:
        A model with the interface of the original and smaller layers; with several budgets, a list of them.

    Raises:
        InvalidOption: an option outside the values it may take, options that do not go together, a pattern that matches
            no layer, a budget that cannot be reached, or a tolerance that cannot be shown.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> with torch.no_grad():
        ...     model[2].weight[:, 16:] = 0  # 48 of 64 hidden neurons do nothing
        >>> x = torch.randn(400, 16)
        >>> small = compress(model, x, budget=0.25)
        >>> small
        Sequential(
          (0): Linear(in_features=16, out_features=16, bias=True)
          (1): ReLU()
          (2): Linear(in_features=16, out_features=8, bias=True)
        )
        >>> torch.allclose(small(x), model(x), atol=1e-4)
        True
    """
    _check(budget, blocks, joint, tolerance, objective, form, own_text, ridge, polish_steps, checkpoint)
    model, notes = prepared(model, dense=True, finite=True)
    if tolerance is not None:
        check_tolerance(tolerance, confidence, risk)
    if own_text:
        given = list(batches(calibration))
        tokens = given[0].named.get("input_ids", next(iter(given[0].positional), None))
        length = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim == 2 else 2  # as long as the others
        written = written_by(model, own_text, length=length, seed=seed)
        calibration = list(taking_turns((batch.arguments for batch in given), written))
    widest = max((p[0].numel() for p in model.parameters() if p.ndim > 1), default=1)
    data, aside = Calibration.read(calibration, widest, polish_steps > 0), ()
    if tolerance is not None:
        data, aside = set_aside(data, seed)  # type: ignore[assignment]
    chosen, left_out = ((p,) if isinstance(p, str) else tuple(p) for p in (targets, ignore))
    if budget is not None and objective in ("macs", "parameters"):
        asked = DecoderOptions(budgets_of(budget), objective, form, ridge, seed, chosen, left_out, embeddings)
        decoders = compress_decoder(model, data, asked, progress)
        if isinstance(decoders, str):
            if embeddings is not None:
                raise InvalidOption(_NO_TABLES + (f": {decoders}" if decoders else f", got a {type(model).__name__}"))
            notes += (f"not fitted layer by layer: {decoders}",) if decoders else ()
        else:
            for share, small in zip(asked.budgets, decoders, strict=True) if polish_steps else ():
                folder = None if checkpoint is None else Path(checkpoint) / f"budget-{share:g}"
                done = polish_decoder_(small, model, data, asked, polish_steps, folder, progress)
                change_options_(small, polish=done, held_out_error=done.after)
                _describe_inputs_(small, [one.layer for one in known_inputs(small)], data)
            found = [_finished(small, model, notes, data) for small in decoders]
            return found if isinstance(budget, Sequence) else found[0]
    if embeddings is not None:
        raise InvalidOption(_NO_TABLES)
    if form == "uniform":
        raise InvalidOption(
            'form="uniform" is for decoders of language models, with budget= a share of "macs" or "parameters"; '
            f"got a {type(model).__name__}"
        )
    known = model, data, ridge, seed, targets, ignore, blocks is not None, objective, form, progress
    work = ModelFit.of(*known, {})
    if not joint and (too_little := check_positions(work.session, data.fitted[0].first(2), blocks or 1)):
        work = ModelFit.of(*known, too_little)
    if blocks is None:
        work.cost.check(None if budget is None else min(budgets_of(budget)))

    def polished(result: nn.Module, name: str) -> nn.Module:
        if polish_steps:
            work.polish_(result, polish_steps, None if checkpoint is None else Path(checkpoint) / name)
        return result

    if blocks is not None:
        results = [polished(work.in_blocks(blocks, joint), f"blocks-{blocks}")]
    elif budget is not None:
        work.allocate(min(budgets_of(budget)))  # refused before any is fitted
        results = [polished(work.in_budget(share), f"budget-{share:g}") for share in budgets_of(budget)]
    else:
        assert tolerance is not None

        def candidate(share: float) -> nn.Module | None:
            made = work.in_budget(share) if work.reaches(share) else None
            return None if made is None else polished(made, f"budget-{share:g}")

        def losses(made: nn.Module) -> np.ndarray:
            with evaluating(made):
                return sample_losses(made, work.session.dense, aside, risk)

        result, guarantee = cheapest(candidate, losses, tolerance, confidence, risk)
        change_options_(result, guarantee=guarantee)
        results = [result]
    results = [collapse_(each) for each in results]
    for result in results:
        _describe_inputs_(result, list(work.session.units), data)
    found = [_finished(result, model, notes, data) for result in results]
    return found if isinstance(budget, Sequence) else found[0]


def _describe_inputs_(result: nn.Module, layers: list[str], data: Calibration) -> None:
    """Write into the record what the layers read."""
    with evaluating(result):
        change_options_(result, inputs=describe(result, layers, data.fitted, data.held_out))


def _finished(result: nn.Module, model: nn.Module, notes: tuple[str, ...], data: Calibration) -> nn.Module:
    """The result with all that its record and config should say."""
    note_preparation_(result, notes)
    note_call_(result, (batch.arguments for batch in data.fitted))
    write_config(result, model)
    return result


def _check(
    budget: float | Sequence[float] | None, blocks: int | None, joint: bool, tolerance: float | None, objective: str,
    form: str, own_text: int, ridge: float, polish_steps: int, checkpoint: Any,
) -> None:  # fmt: skip
    given = {"budget": budget, "blocks": blocks, "tolerance": tolerance}
    if sum(value is not None for value in given.values()) != 1:
        came = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None) or "none of them"
        raise InvalidOption(f"pass either budget= or blocks= or tolerance=, got {came}")
    if budget is not None:
        budgets_of(budget)
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 2):
        raise InvalidOption(f"blocks: expected an integer of at least 2, got {blocks!r}")
    if joint and blocks is None:
        raise InvalidOption("joint=True needs blocks=: the number of subnetworks")
    check_choice("objective", objective, OBJECTIVES)
    check_choice("form", form, FORMS)
    if form != "any" and blocks is not None:
        raise InvalidOption("form= says what layers under a budget may become: pass budget= or tolerance= with it")
    if objective != "macs" and blocks is not None:
        raise InvalidOption("objective= says what a budget is a share of: pass budget= or tolerance= with it")
    if isinstance(own_text, bool) or own_text < 0:
        raise InvalidOption(f"own_text: expected a number of tokens, got {own_text!r}")
    if not 0 < ridge < 1e30:
        raise InvalidOption(f"ridge: expected a positive number below 1e30, got {ridge!r}")
    if isinstance(polish_steps, bool) or not isinstance(polish_steps, int) or polish_steps < 0:
        raise InvalidOption(f"polish_steps: expected an integer of at least 0, got {polish_steps!r}")
    if checkpoint is not None and not polish_steps:
        raise InvalidOption("checkpoint= keeps the state of polishing: pass polish_steps= too")
