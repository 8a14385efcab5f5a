# SPDX-License-Identifier: Apache-2.0
"""Tensors put together from the parts of a layout's ranks."""

from __future__ import annotations

import numpy as np
import pytest

from omni_neuron_testkit import assemble

WHOLE = np.arange(1, 1 + 7 * 6, dtype=np.float32).reshape(1, 7, 6)


def pieces(tensor, dim, count):
    """Equal pieces; the pads after the last one hold NaN."""
    rows = -(-tensor.shape[dim] // count)
    padding = [(0, 0)] * tensor.ndim
    padding[dim] = (0, rows * count - tensor.shape[dim])
    return np.split(np.pad(tensor, padding, constant_values=np.nan), count, axis=dim)


def layout(tp=1, cp=1, cp_dim=None, tp_dim=None):
    parts = {}
    for c, row in enumerate(pieces(WHOLE, cp_dim, cp) if cp_dim is not None else [WHOLE] * cp):
        for t, part in enumerate(pieces(row, tp_dim, tp) if tp_dim is not None else [row] * tp):
            parts[t, c] = part.copy()
    return parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp": 2},
        {"cp": 2, "cp_dim": 1},
        {"tp": 2, "cp": 2, "cp_dim": 1},
        {"tp": 3, "cp": 2, "cp_dim": 1, "tp_dim": 1},  # sequence parallelism
        {"tp": 3, "tp_dim": 1},
        {"tp": 2, "tp_dim": 2},  # features
        {"tp": 2, "cp": 4, "cp_dim": 1, "tp_dim": 2},
        {"tp": 2, "cp": 2, "tp_dim": 1},  # by its sizes this could be split over cp: equal bits decide
    ],
    ids=str,
)
def test_whole(options):
    tensor, disagreement = assemble(layout(**options), WHOLE.shape)
    assert disagreement is None
    np.testing.assert_array_equal(tensor, WHOLE)


def test_ranks_that_disagree_are_named():
    parts = layout(tp=2, cp=2, cp_dim=1)
    parts[1, 1][0, 0, 0] = np.nextafter(parts[1, 1][0, 0, 0], np.float32(np.inf))
    assert assemble(parts, WHOLE.shape).disagreement == "tp1 cp1 holds other bits than tp0 cp1"


def test_missing_and_foreign_parts():
    parts = layout(tp=2, cp=2, cp_dim=1)
    del parts[1, 0]
    with pytest.raises(ValueError, match="parts are missing, of tp1 cp0"):
        assemble(parts, WHOLE.shape)
    with pytest.raises(ValueError, match="parts are missing, of all ranks"):
        assemble({}, WHOLE.shape)
    with pytest.raises(ValueError, match=r"parts of shape \[1, 7, 6\] on tp 1 × cp 1 ranks are no pieces of a tensor"):
        assemble(layout(), (1, 8, 6))
