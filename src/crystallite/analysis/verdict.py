"""Plain words for what was found, and the rules behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crystallite.analysis.degrees import in_words, modular_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crystallite.analysis.matrix import MatrixAnalysis

__all__ = ["FINDINGS", "finding_of", "model_verdict", "sentence"]

# What a matrix can be, best first, as "2 of 9 …" goes on. The limits:
SEPARATE_LARGEST = 0.8  # "separate": no block holds more than this share of the neurons that are in any block, …
SEPARATE_BLOCKS = 1.5  # … and they count for at least this many blocks of equal size
SPARSE = 0.25  # "sparse": fewer than this share of the neurons are in any block
NOISE_SIGMAS = 4.0  # "noise": the initialisation fits, and no more is kept than this many σ above what it would keep

FINDINGS = {
    "separate": "in blocks",
    "hubs": "in one block that a few hubs hold together",
    "nested": "in blocks at another level",
    "fragments": "in small blocks, as noise below the percolation level gives",
    "one block": "in one block",
    "sparse": "with nearly all neurons dormant",
    "noise": "not distinguishable from the initialisation",
    "empty": "without a significant weight",
}


def finding_of(row: MatrixAnalysis) -> str:
    """Which of `FINDINGS` a matrix is."""
    if row.kept == 0:
        return "empty"
    by_chance = row.expected_false_edges
    if row.null_fits and not row.null_is_measured and row.kept <= by_chance + NOISE_SIGMAS * by_chance**0.5:
        return "noise"
    in_blocks = row.active_share
    if in_blocks < SPARSE:
        return "sparse"
    if row.effective_blocks >= SEPARATE_BLOCKS and row.largest_share <= SEPARATE_LARGEST * in_blocks:
        return "separate" if not row.looks_like_chance else "fragments"
    if row.hubs is not None and row.hubs["separates"] and row.hubs["count"] > 0 and not row.hubs["by_chance"]:
        return "hubs"
    if row.best_split is not None and row.best_split["beyond_chance"]:
        return "nested"
    return "one block"


def sentence(row: MatrixAnalysis) -> str:
    """The finding in words, whether the level had a part in it, and how modular the matrix is."""
    alone = " The level changes nothing: kept by the random-walk band alone." if row.by_band_alone and row.kept else ""
    degrees = f" {in_words(row.modularity)}" if row.modularity is not None else ""
    return _finding_in_words(row) + alone + degrees


def _finding_in_words(row: MatrixAnalysis) -> str:
    """One sentence with the numbers behind the finding."""
    size = f"{row.rows}×{row.cols}"
    blocks = f"{row.n_blocks} block{'s' * (row.n_blocks != 1)}"
    largest = f"the largest with {row.largest_share:.0%} of the neurons"
    dormant = f"{row.dormant_rows} rows and {row.dormant_cols} columns dormant"
    if row.finding == "empty":
        return f"No weight of this {size} matrix is significant at level {row.level:.2g}: every neuron is dormant."
    if row.finding == "noise":
        return (
            f"{row.kept} weights are kept where noise alone would keep {row.expected_false_edges:.0f}: at level "
            f"{row.level:.2g} this matrix cannot be distinguished from its initialisation ({row.null})."
        )
    if row.finding == "sparse":
        return f"Only {row.kept} weights are kept at level {row.level:.2g}: {blocks}, {largest}; {dormant}."
    if row.finding == "separate":
        return f"Falls into {blocks} at level {row.level:.2g}, {largest}; {dormant}."
    if row.finding == "hubs":
        assert row.hubs is not None
        return (
            f"One block with {row.largest_share:.0%} of the neurons, but {row.hubs['count']} hubs hold it together: "
            f"without them {row.hubs['n_blocks']} blocks remain, the largest with {row.hubs['largest_share']:.0%}."
        )
    if row.finding == "nested":
        assert row.best_split is not None
        return (
            f"One block at level {row.level:.2g}, but with |w| ≥ {row.best_split['threshold']:.3g} "
            f"({row.best_split['kept_share']:.2%} kept) it counts for {row.best_split['effective_blocks']:.1f} blocks."
        )
    if row.finding == "fragments":
        return f"{blocks}, {largest}: what the same number of edges in random places gives; {dormant}."
    text = f"No exact block structure: {row.largest_share:.0%} of the neurons are one block; {dormant}."
    if row.null_is_measured:
        times = row.kept / max(row.expected_false_edges, 1.0)
        text += f" No initialisation explains its bulk; kept: {times:.1f} times what its own Gaussian bulk predicts."
    if row.hubs is not None and row.hubs["by_chance"]:
        text += " A few hubs hold it together, and as many weights in random places, too."
    if row.shuffled is not None:
        text += f" The same numbers in random places: {row.shuffled['largest_share']:.0%}."
    return text


def model_verdict(rows: Sequence[MatrixAnalysis]) -> str:
    """What the matrices say together, and what can be done next."""
    if not rows:
        return "No matrix of weights was found."
    counts = {finding: sum(row.finding == finding for row in rows) for finding in FINDINGS}
    parts = [f"{n} of {len(rows)} {FINDINGS[f]}" for f, n in counts.items() if n]
    degrees = modular_count([row.modularity for row in rows if row.modularity is not None])
    text = "; ".join([*parts, degrees] if degrees else parts) + "."
    exact = counts["separate"]
    if exact == len(rows):
        return f"Exact block structure in every matrix: {text}"
    if exact:
        return f"Exact block structure in part of the network: {text}"
    lead = "No exact block structure: " if not counts["nested"] else "No exact block structure at this level: "
    return lead + text
