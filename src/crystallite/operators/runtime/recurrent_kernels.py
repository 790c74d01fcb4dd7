"""All time steps of recurrent blocks in one compiled call, without the interpreter lock.

The matrix of a block stays in the processor's cache from step to step, and dispatching a step would cost more than
doing it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np

from crystallite.core.compiling import njit
from crystallite.core.parallel import compiled
from crystallite.operators.runtime.functions import sigmoid, tanh
from crystallite.operators.runtime.instructions import tile_product

__all__ = ["GRU", "LSTM", "RNN_RELU", "RNN_TANH", "add_product", "pack", "run_blocks"]

RNN_TANH, RNN_RELU, GRU, LSTM = range(4)

_four_rows = tile_product(4, 1)  # eight registers of sums (float32) hide the latency of a sum
_one_row = tile_product(1, 4)
_one_panel = tile_product(1, 1)
_ROWS_IN_CACHE = 128


@njit(nogil=True)
def _product(start, left, first, weight, out, column, low, high):
    """out[low:high, column:] = start[…, column:] + left[low:high, first:] @ weight; weight (panels, depth, 16)."""
    panels = weight.shape[0]
    tiled = low + (high - low) // 4 * 4
    for panel in range(panels):
        for row in range(low, tiled, 4):
            _four_rows(start, left, row, first, weight, panel, out, column)
    for row in range(tiled, high):
        for panel in range(0, panels - 3, 4):
            _one_row(start, left, row, first, weight, panel, out, column)
        for panel in range(panels // 4 * 4, panels):
            _one_panel(start, left, row, first, weight, panel, out, column)


@compiled
def add_product(start, left, first, weight, out, column, low, high):
    """The product above for many rows, a few at a time: they stay in the cache while the weights pass."""
    for row in range(low, high, _ROWS_IN_CACHE):
        _product(start, left, first, weight, out, column, row, min(row + _ROWS_IN_CACHE, high))


@compiled
def pack(weight, panels):
    """weight (outputs, depth) into panels (⌈outputs/16⌉, depth, 16), the last one filled up with zeros."""
    width = panels.shape[2]
    for panel in range(len(panels)):
        lines = weight[panel * width : (panel + 1) * width]
        for k in range(weight.shape[1]):
            for j in range(len(lines)):
                panels[panel, k, j] = lines[j, k]
            for j in range(len(lines), width):
                panels[panel, k, j] = 0


@njit(nogil=True)
def _elementwise(state, weight, out, gates):
    """out = weight · state for each gate, where every unit has one weight, or none."""
    size = len(state)
    if weight.shape[1] == 0:
        for j in range(gates * size):
            out[j] = 0
        return
    line = weight.reshape(-1)
    for gate in range(gates):
        mine, target = line[gate * size : (gate + 1) * size], out[gate * size : (gate + 1) * size]
        for j in range(size):
            target[j] = mine[j] * state[j]


@njit(nogil=True)
def _sigmoid_of_sum(own, gates):
    for j in range(len(gates)):
        own[j] = sigmoid(own[j] + gates[j])


@njit(nogil=True)
def _tanh_of_sum(own, gates):
    for j in range(len(gates)):
        own[j] = tanh(own[j] + gates[j])


@njit(nogil=True)
def _lstm(gates, own, state, cell):
    """c' = f·c + i·g, h' = o·tanh(c'); gates i, f, g, o."""
    size = len(state)
    forget, new, out = own[size:], own[2 * size :], own[3 * size :]
    _sigmoid_of_sum(own, gates[: 2 * size])
    _tanh_of_sum(new, gates[2 * size : 3 * size])
    _sigmoid_of_sum(out, gates[3 * size :])
    for j in range(size):
        cell[j] = forget[j] * cell[j] + own[j] * new[j]
    for j in range(size):
        state[j] = out[j] * tanh(cell[j])


@njit(nogil=True)
def _gru(gates, own, inner, state):
    """n = tanh(gates_n + r·(inner + W_n h)), h' = n + z·(h − n); gates r, z, n."""
    size = len(state)
    keep, new = own[size:], own[2 * size :]
    _sigmoid_of_sum(own, gates[: 2 * size])
    for j in range(size):
        new[j] = own[j] * (new[j] + inner[j])
    _tanh_of_sum(new, gates[2 * size :])
    for j in range(size):
        state[j] = new[j] + keep[j] * (state[j] - new[j])


@njit(nogil=True)
def _rnn(rectify, gates, own, state):
    """h' = tanh(gates + W h) or max(0, gates + W h)."""
    if rectify:
        for j in range(len(state)):
            total = own[j] + gates[j]
            state[j] = 0 if total < 0 else total
    else:
        for j in range(len(state)):
            state[j] = tanh(own[j] + gates[j])


@njit(nogil=True)
def _copy(source, target):
    for j in range(len(source)):
        target[j] = source[j]


@compiled
def run_blocks(
    kind, width, gates, inner, weight, first, size, counts, starts, backward, low, high, hidden, cell, order, output,
    previous,
):  # fmt: skip
    """Run equal blocks through time for the sequences low…high−1; states are read from and left in hidden and cell.

    width: gates of a unit; gates (rows, width·units or more): what they get from elsewhere; inner (rows or 1, units or
        more): the same for the part of the GRU's n that is multiplied by r. A row is one step of one sequence; there
        are counts[t] of them at time t, from row starts[t] on.
    weight (blocks, panels, feedback, 16): a unit hears the whole block, itself (feedback 1) or nothing (0);
        first: position of each block.
    hidden, cell (sequences, units); order: column of `output` for each unit.
    previous (rows or 0, units): receives the state before each step, for the blocks that hear this one.
    """
    feedback, panel_columns = weight.shape[2], weight.shape[1] * weight.shape[3]
    nothing = np.zeros((1, panel_columns), gates.dtype)
    state = np.empty((high - low, size), gates.dtype)
    own = np.empty((high - low, max(panel_columns, width * size)), gates.dtype)
    for i in range(len(first)):
        unit, stop = first[i], first[i] + size
        columns = order[unit:stop]
        for r in range(high - low):
            _copy(hidden[low + r, unit:stop], state[r])
        for step in range(len(counts)):
            t = len(counts) - 1 - step if backward else step
            rows = max(0, min(counts[t], high) - low)
            if feedback > 1:
                _product(nothing, state, 0, weight[i], own, 0, 0, rows)
            for r in range(rows):
                row, now = starts[t] + low + r, state[r]
                if feedback <= 1:
                    _elementwise(now, weight[i], own[r], width)
                if len(previous):
                    _copy(now, previous[row, unit:stop])
                given = gates[row, width * unit : width * stop]
                if kind == LSTM:
                    _lstm(given, own[r], now, cell[low + r, unit:stop])
                elif kind == GRU:
                    _gru(given, own[r], inner[min(row, len(inner) - 1), unit:stop], now)
                else:
                    _rnn(kind == RNN_RELU, given, own[r], now)
                target = output[row]
                for j in range(size):
                    target[columns[j]] = now[j]
        for r in range(high - low):
            _copy(state[r], hidden[low + r, unit:stop])
