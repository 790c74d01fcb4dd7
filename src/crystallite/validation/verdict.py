"""`Verdict`: whether a reorganized system may take the place of the original, and everything behind that."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from crystallite.core.drawing import Drawing
from crystallite.core.run_charts import curve, line_chart
from crystallite.core.tables import html_text, text_table
from crystallite.models.familiarity import Unfamiliar
from crystallite.validation.block_roles import BlockRoles
from crystallite.validation.comparison import Case, Comparison
from crystallite.validation.cost import Latency
from crystallite.validation.layers import LayerDeviation
from crystallite.validation.metrics import MetricResult
from crystallite.validation.rules import Outcome, Rules, SliceResult

if TYPE_CHECKING:
    from crystallite.validation.sweep import Sweep

__all__ = ["Verdict", "plain"]

_SIGNS = {"passed": "✓", "violated": "✗", "unproven": "?"}
_SHOWN_LAYERS = 8


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """The outcome of a validation. Pairs are (original, reorganized)."""

    rules: Rules
    outcomes: tuple[Outcome, ...]
    comparison: Comparison
    metric: MetricResult | None
    parameters: tuple[int, int]
    macs: tuple[int, int]  # for the first batch
    latency: tuple[Latency, ...]  # for the first batch of each size
    slices: tuple[SliceResult, ...] = ()
    layers: tuple[LayerDeviation, ...] = ()
    skipped_layers: dict[str, str] = field(default_factory=dict)  # name → why it was not compared
    sweep: Sweep | None = None
    guarantee: str | None = None  # what was shown when the model was fitted, on other samples
    unfamiliar: Unfamiliar | None = None  # how many samples are unlike those that it was fitted on, where it was
    sample: str = ""  # of the first batch, on which multiply-adds are counted: "input_ids [104]"
    block_roles: BlockRoles | None = None  # what each block is for, where blocks were switched off

    @property
    def passed(self) -> bool:
        """Whether every rule is passed, and shown to be by enough samples."""
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each rule that is not passed; if all are, for each of them."""
        return tuple(o.reason for o in self.outcomes if self.passed or not o.passed)

    @property
    def worst(self) -> tuple[Case, ...]:
        """The five samples with the largest deviations."""
        return self.comparison.worst()

    @property
    def macs_per_sample(self) -> tuple[int, int]:
        """Multiply-adds of the whole model for one sample of the first batch."""
        size = self.latency[0].batch if self.latency else 1
        return self.macs[0] // size, self.macs[1] // size

    @property
    def samples(self) -> int:
        return self.comparison.samples

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the numbers of every sample. What is not finite is None."""
        metric = self.metric
        return plain(
            {
                "passed": self.passed,
                "reasons": self.reasons,
                "samples": self.samples,
                "rules": asdict(self.rules),
                "outcomes": [asdict(outcome) for outcome in self.outcomes],
                "outputs": [output.to_json() for output in self.comparison.outputs],
                "worst": [asdict(case) for case in self.worst],
                "metric": metric and {"name": metric.name, "values": [metric.original, metric.reorganized]},
                "parameters": self.parameters,
                "macs": self.macs,
                "macs_per_sample": self.macs_per_sample,
                "sample": self.sample,
                "latency": [asdict(latency) for latency in self.latency],
                "slices": [asdict(part) for part in self.slices],
                "layers": {layer.name: layer.deviation for layer in self.layers},
                "skipped_layers": self.skipped_layers,
                "sweep": self.sweep and self.sweep.to_json(),
                "guarantee": self.guarantee,
                "unfamiliar": self.unfamiliar and asdict(self.unfamiliar),
                "block_roles": self.block_roles and self.block_roles.to_json(),
            }
        )

    def to_pandas(self) -> Any:
        """One row per output and sample."""
        import pandas

        frames = []
        for output in self.comparison.outputs:
            columns = {name: getattr(output, name) for name in ("deviation", "cosine", "agreement")}
            frames.append(pandas.DataFrame({"output": output.path, "sample": output.index.astype(int), **columns}))
        return pandas.concat(frames, ignore_index=True)

    def plot(self) -> Drawing:
        """A picture of the relative deviation of all samples, the smallest first, a line for each output."""
        lines = {}
        for output in self.comparison.outputs:
            ordered = np.sort(output.deviation[np.isfinite(output.deviation)])
            lines[output.path] = curve(np.arange(1, len(ordered) + 1) / max(len(ordered), 1), ordered)
        return line_chart({k: v for k, v in lines.items() if v}, "share of the samples", "relative deviation, at most")

    def _repr_html_(self) -> str:
        colour = "#2a7d2a" if self.passed else "#b00020"
        return html_text(repr(self), f"border-left: 4px solid {colour}; padding-left: 8px")

    def __repr__(self) -> str:
        lines = [f"{'PASSED' if self.passed else 'FAILED'} on {self.samples} sample{'s' * (self.samples != 1)}"]
        lines += [f"  {_SIGNS[o.status]} {o.reason}" for o in self.outcomes]
        lines += [f"  {note}" for note in (self.guarantee, self.unfamiliar) if note]
        rows = [["output", "deviation: mean", "99 %", "worst", "cosine: mean", "worst", "agreement"]]
        for output in (o.to_json() for o in self.comparison.outputs):
            deviation = (output["mean_deviation"], output["deviation"]["99%"], output["deviation"]["worst"])
            cosine = (output["mean_cosine"], output["worst_cosine"])
            agreed = "—" if output["agreement"] is None else f"{output['agreement']:.4g}"
            rows.append([output["output"], *(f"{d:.3g}" for d in deviation), *(f"{c:.4f}" for c in cosine), agreed])
        lines += ["", *text_table(rows)]
        lines += ["", "worst cases", *(f"  {case}" for case in self.worst)]
        if self.slices:
            rows = [["slice", "samples", "deviation", "agreement", "metric"]]
            for part in self.slices:
                agreed = "—" if part.agreement is None else f"{part.agreement:.4g}"
                metric = "—" if part.original is None else f"{part.original:.4g} → {part.reorganized:.4g}"
                rows.append([part.label, str(part.samples), f"{part.deviation:.3g}", agreed, metric])
            lines += ["", *text_table(rows)]
        if self.layers:
            worst = sorted(self.layers, key=lambda layer: -layer.deviation)[:_SHOWN_LAYERS]
            lines += ["", f"relative deviation of layers, the {len(worst)} largest of {len(self.layers)}"]
            lines += [f"  {layer.deviation:.3g}  {layer.name or '(model)'}" for layer in worst]
            for reason in dict.fromkeys(self.skipped_layers.values()):
                where = [name for name, why in self.skipped_layers.items() if why == reason]
                lines.append(f"  not compared: {', '.join(where)} ({reason})")
        (p0, p1), (m0, m1) = self.parameters, self.macs_per_sample
        sample = f"one sample ({self.sample})" if self.sample else "one sample"
        cost = f"multiply-adds for {sample} {m0:,} → {m1:,} ({m1 / max(m0, 1):.0%})"
        lines += ["", f"parameters {p0:,} → {p1:,}, {cost}"]
        lines += [
            f"latency, batch {t.batch}: {t.original * 1e3:.3g} → {t.reorganized * 1e3:.3g} ms ({t.speedup:.2f}×)"
            for t in self.latency
        ]
        lines += ["", repr(self.block_roles)] if self.block_roles else []
        lines += ["", repr(self.sweep)] if self.sweep else []
        return "\n".join(lines)


def plain(value: Any) -> Any:
    """Values that JSON has: lists for tuples, Python's numbers for NumPy's, None for what is not finite.

    >>> plain({"a": (1, float("inf"), np.float32(0.5))})
    {'a': [1, None, 0.5]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
