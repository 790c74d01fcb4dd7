"""What the pictures of a layer show, against structure that was planted."""

import numpy as np
import torch
from torch import nn

from crystallite.report import report
from crystallite.structure.decompose import decompose


def view_of(found, name):
    return next(view for view in found.views if view.row.name == name)


def test_outlines_are_the_blocks_and_hold_every_kept_weight(full_report, planted):
    view = view_of(full_report, "first")
    structure = decompose(planted.first.weight, threshold=view.row.threshold)
    sizes = sorted((outline.height, outline.width) for outline in view.outlines)
    assert sizes == sorted(map(tuple, structure.block_shapes.tolist()))
    inside = np.zeros((80, 96), bool)
    for o in view.outlines:
        inside[o.top : o.top + o.height, o.left : o.left + o.width] = True
    kept = structure.apply(planted.first.weight.detach().abs().numpy() >= view.row.threshold)
    assert kept.sum() == view.row.kept
    assert not kept[~inside].any()


def test_pictures_before_and_after_hold_the_same_weights(full_report):
    for view in full_report.views:
        cells = [
            len(np.unique(np.arange(n) * g // n))
            for n, g in zip((view.row.rows, view.row.cols), view.before.shape, strict=True)
        ]
        assert tuple(cells) == view.before.shape == view.after.shape
        assert (view.before > 0).any() == (view.after > 0).any() == (view.row.kept > 0)


def test_hubs_are_a_border(full_report):
    view = view_of(full_report, "hubs")
    borders = [outline for outline in view.outlines if outline.hub]
    assert view.row.finding == "hubs"
    assert sum(min(b.height, b.width) for b in borders) == view.row.hubs["count"]
    assert all(b.top + b.height == 64 and b.left + b.width == 64 for b in borders)


def test_feedback_shows_its_strong_parts_and_their_order(full_report):
    view = view_of(full_report, "cell.weight_hh_l0")
    assert [(o.top, o.height) for o in sorted(view.outlines, key=lambda o: o.top)] == [(0, 8), (8, 8)]
    assert view.directed is not None
    assert view.directed.n_layers == 2


def test_channels_of_a_grouped_convolution_are_the_neurons(full_report):
    view = view_of(full_report, "channels")
    assert (view.row.rows, view.row.cols) == (12, 8)
    assert not view.before[:6, 4:].any()
    assert not view.before[6:, :4].any()


def test_histogram_integrates_to_one_with_its_null(full_report):
    for view in full_report.views:
        width = np.diff(view.histogram.edges)
        assert abs((view.histogram.density * width).sum() + view.histogram.further - 1) < 1e-9
        assert (view.histogram.null_density * width).sum() <= 1 + 1e-9


def test_slider_stops_at_the_analysed_level(full_report):
    for view in full_report.views:
        assert view.levels.thresholds[view.levels.start] == view.row.threshold
        assert np.all(np.diff(view.levels.thresholds) < 0)
        assert len(view.levels.thresholds) <= 200


def test_zero_and_single_weight_matrices_have_a_page():
    layers = nn.Sequential(nn.Linear(5, 4), nn.Linear(1, 1))
    with torch.no_grad():
        layers[0].weight.zero_()
    found = report(layers)
    assert "0.weight" in found.html or ">0<" in found.html
    assert found.views[0].levels.kept.tolist() == [0] * len(found.views[0].levels.kept)
