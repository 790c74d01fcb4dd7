"""What a reader can do next, from what was found."""

from __future__ import annotations

from collections.abc import Sequence

from crystallite.analysis import Analysis
from crystallite.report.rebuilt import Rebuilt

__all__ = ["next_steps"]


def next_steps(analysis: Analysis, rebuilt: Sequence[Rebuilt] = ()) -> list[tuple[str, str]]:
    """Sentences, each with the call that does it or ""; best first. What has been done is not among them.

    >>> import torch
    >>> from crystallite.analysis import analyze
    >>> next_steps(analyze(torch.nn.Linear(64, 32)))[0][0][:40]
    'Nothing here differs from initialisation'
    """
    if rebuilt:
        return _after_rebuilding(rebuilt)
    found = [row.finding for row in analysis.rows]
    options = analysis.options
    call = f'cx.reorganize(model, level={options.level!r}, rule="{options.rule}")'
    steps = []
    if count := found.count("separate"):
        steps.append((f"Rebuild the {_matrices(count)} that fall into blocks, exactly as annealed.", call))
    if count := found.count("hubs"):
        steps.append(
            (f"Look at the hubs of {_matrices(count)}: without them it falls into blocks.", "cx.hubs(w, threshold=c)")
        )
    if count := found.count("nested"):
        split = next(row for row in analysis.rows if row.finding == "nested").best_split or {}
        text = f"Try the stricter level at which {_matrices(count)} divide; the slider below shows where."
        steps.append((text, f"cx.decompose(w, threshold={split.get('threshold', 0.0):.4g})"))
    if found and all(finding in ("noise", "empty") for finding in found):
        return [("Nothing here differs from initialisation: check that these are trained weights.", "")]
    if "separate" not in found:
        steps.append(
            (
                "Without training: fit smaller layers to inputs like the network's own.",
                "cx.compress(model, budget=0.5, calibration=batches)",
            )
        )
        steps.append(
            (
                "With training: continue until the network separates exactly.",
                "cx.upgrade(model, blocks=4, data=loader, loss=loss_fn)",
            )
        )
    steps.append(("Check any result against the original on your own data.", "cx.validate(model, small, data)"))
    return steps


def _after_rebuilding(rebuilt: Sequence[Rebuilt]) -> list[tuple[str, str]]:
    """What is left to do with models that have been rebuilt."""
    outcomes = {one.passed for one in rebuilt}
    steps = []
    if None in outcomes:
        steps.append(("Check it against the original on data of your own.", "cx.validate(model, small, data)"))
    if False in outcomes:
        steps.append(
            (
                "What did not pass: give it a larger budget or more calibration data like what it will read, or train "
                "it on inside its structure.",
                "cx.compress(model, calibration, budget=0.7, polish_steps=600)",
            )
        )
    if True in outcomes:
        steps.append(("Put it into production: serve the folder it was saved in,", "crystallite serve small"))
        steps.append(("or export it.", 'cx.export(small, "small.onnx", data)'))
    steps.append(("Compare it with other methods at the same cost.", "crystallite bench --baselines MODEL"))
    return steps


def _matrices(count: int) -> str:
    return "one matrix" if count == 1 else f"{count} matrices"
