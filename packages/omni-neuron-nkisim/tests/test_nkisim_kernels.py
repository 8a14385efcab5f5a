# SPDX-License-Identifier: Apache-2.0
"""Kernels of the public documentation, written from their formulas, give the right results."""

from pathlib import Path

import ml_dtypes
import nkisim_kernels as kernels
import numpy as np
import pytest
from nkisim_probe import normal

from omni_neuron_nkisim import lint, settings

TARGETS = ["trn2", "trn3"]


def close(got, wanted, limit=1e-5):
    error = np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error <= limit


@pytest.fixture(autouse=True, params=TARGETS)
def _target(request):
    with settings(target=request.param):
        yield


@pytest.mark.parametrize("lnc", [1, 2])
def test_tensor_add(lnc):
    a, b = normal(300, 700), normal(300, 700, seed=1)
    np.testing.assert_array_equal(kernels.tensor_add[lnc](a, b), a + b)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_transpose(dtype):
    a = normal(200, 300).astype(dtype)
    np.testing.assert_array_equal(kernels.transpose(a), a.T)


def test_transpose_in_partitions():
    a = normal(64, 6 * 10)
    wanted = a.reshape(64, 6, 10).transpose(0, 2, 1).reshape(64, 60)
    np.testing.assert_array_equal(kernels.transpose_in_partitions(a, 6, 10), wanted)


def test_matmul():
    a, b = normal(384, 256), normal(384, 700, seed=1)
    close(kernels.matmul(a, b), a.T.astype(np.float64) @ b)


def test_matmul_in_bfloat16_rounds_inputs_only():
    a, b = normal(256, 128).astype(ml_dtypes.bfloat16), normal(256, 128, seed=1).astype(ml_dtypes.bfloat16)
    close(kernels.matmul(a, b), a.T.astype(np.float64) @ b.astype(np.float64))


def test_rms_norm():
    x, weight = normal(200, 300), normal(1, 300, seed=1)
    wide = x.astype(np.float64)
    close(kernels.rms_norm(x, weight, 1e-6), wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight)


def test_layer_norm():
    x, weight, bias = normal(100, 1100) + 3, normal(1, 1100, seed=1), normal(1, 1100, seed=2)
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * weight + bias
    close(kernels.layer_norm(x, weight, bias, 1e-5), wanted)


def soft(x):
    weights = np.exp(x - x.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def test_softmax():
    x = 20 * normal(150, 90)
    close(kernels.softmax(x), soft(x.astype(np.float64)))


def test_attention():
    q, k, v = normal(64, 384), normal(64, 384, seed=1), normal(384, 64, seed=2)
    close(kernels.attention(q, k, v, 0.125), soft(q.T.astype(np.float64) @ k * 0.125) @ v)


def test_average_pool():
    x = normal(32, 12, 18)
    close(kernels.average_pool(x, 3), x.reshape(32, 4, 3, 6, 3).astype(np.float64).mean((2, 4)))


def test_prefix_sum():
    x = normal(100, 150)
    close(kernels.prefix_sum(x), x.astype(np.float64).cumsum(1))


def test_embedding():
    table, indices = normal(1000, 40), np.random.default_rng(3).integers(0, 1000, (77, 1)).astype(np.uint32)
    np.testing.assert_array_equal(kernels.embedding(table, indices), table[indices[:, 0]])


def test_causal_scores():
    q, k = normal(32, 96), normal(32, 96, seed=1)
    scores = q.T.astype(np.float64) @ k
    got = kernels.causal_attention_scores(q, k)
    keep = np.tril(np.ones((96, 96), bool))
    close(got[keep], scores[keep])
    assert (got[~keep] == np.float32(-1e30)).all()


def test_they_pass_the_lint():
    assert lint([Path(__file__).with_name("nkisim_kernels.py")]) == []
