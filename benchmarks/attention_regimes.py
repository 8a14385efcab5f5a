# SPDX-License-Identifier: Apache-2.0
"""Which way the heads of a Wan-like self-attention keep their softmax in range, over the learned gains of the QK norm.

    ./dev run python benchmarks/attention_regimes.py

Queries and keys are random, not a model's: rows of `--heads` heads of 128, in which heads differ in energy (log-normal,
sigma 0.5 times `spread`) and tokens within each head (sigma 0.3 times `spread`), and each head has a mean in common of
`mean` times its standard deviation, as those of trained models do. They are normalised across all heads, as in Wan2.2,
so only a token's energy over all heads is fixed, then multiplied by a gain, alpha for queries and beta for keys, and
rotated (RoPE over time, height and width). The table has the share of heads for each product alpha * beta: proven by
the norms of queries and keys alone (`bounded_softmax_is_safe`), and by `softmax_regimes`, which also knows the mean of
the keys. The last column is the share of heads of which a static bound, subtracted from the scores, would lose rows
(bound - true maximum above 85).
"""

from __future__ import annotations

import argparse
import itertools

import torch
from rich.console import Console
from rich.table import Table

from omni_neuron_kernels import (
    bounded_softmax_is_safe,
    head_abs_max,
    head_norm_max,
    key_statistics,
    softmax_regimes,
)

DIM = 128
GRID = (21, 30, 52)  # latent frames, rows and columns of 81 frames at 480 x 832: 32,760 tokens
AXIS_DIMS = (44, 42, 42)  # of the head dim, rotated by each axis' position


def rotation(tokens: torch.Tensor) -> torch.Tensor:
    """Complex RoPE factors `[S, DIM / 2]` of token numbers."""
    _, rows, columns = GRID
    positions = (tokens // (rows * columns), tokens // columns % rows, tokens % columns)
    angles = [
        place[:, None] * 10_000 ** (-torch.arange(0, dim, 2) / dim)
        for place, dim in zip(positions, AXIS_DIMS, strict=True)
    ]
    return torch.polar(torch.ones(len(tokens), DIM // 2), torch.cat(angles, 1).float())


def normalised(tokens: torch.Tensor, heads: int, mean: float, spread: float, seed: int) -> torch.Tensor:
    """Rotated rows `[1, S, heads, DIM]` with a root mean square of one over all heads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    energy = (spread * (0.5 * normal(1, heads, 1) + 0.3 * normal(len(tokens), heads, 1))).exp()
    rows = energy * (normal(len(tokens), heads, DIM) + mean * normal(1, heads, DIM))
    rows /= rows.square().mean((1, 2), keepdim=True).sqrt()
    turned = torch.view_as_complex(rows.unflatten(-1, (-1, 2))) * rotation(tokens)[:, None]
    return torch.view_as_real(turned).flatten(-2)[None]


def shares(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, gain: float) -> list[float]:
    """Shares of heads: proven by norms alone, unshifted, with a shift, with a maximum, lost by a static bound."""
    scale = gain * DIM**-0.5
    statistics = key_statistics(keys, values)
    [regimes], _ = softmax_regimes(queries, statistics, scale=scale)
    alone = bounded_softmax_is_safe(
        head_norm_max(queries), head_norm_max(keys), scale, keys.shape[1], head_abs_max(values)
    )
    sample = queries[0, :: max(1, queries.shape[1] // 128)].transpose(0, 1)
    peaks = (sample @ keys[0].permute(1, 2, 0) * scale).amax(-1)
    gaps = scale * sample.norm(dim=-1) * head_norm_max(keys)[:, None] - peaks
    counts = [regimes.count(name) for name in ("unshifted", "tile_shift", "running_maximum")]
    lost = float((gaps > 85).any(-1).float().mean())
    return [float(alone.float().mean()), *(count / len(regimes) for count in counts), lost]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--queries", type=int, default=4095, help="of one rank of CP 8")
    parser.add_argument("--means", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--gains", type=float, nargs="+", default=[1, 2, 3, 4, 6, 8, 10, 12, 16, 40])
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    tokens = torch.arange(GRID[0] * GRID[1] * GRID[2])
    values = torch.randn(1, len(tokens), options.heads, DIM, generator=torch.Generator().manual_seed(3))
    columns = ("spread", "mean", "alpha * beta", "norms alone", "unshifted", "tile shift", "maximum", "bound loses")
    table = Table(*columns)
    for spread, mean in itertools.product(options.spreads, options.means):
        queries = normalised(tokens[: options.queries], options.heads, mean, spread, seed=1)
        keys = normalised(tokens, options.heads, mean, spread, seed=2)
        for gain in options.gains:
            row = (f"{share:.0%}" for share in shares(queries, keys, values, gain))
            table.add_row(f"{spread:g}", f"{mean:g}", f"{gain:g}", *row)
    Console().print(table)


if __name__ == "__main__":
    main()
