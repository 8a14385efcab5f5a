# SPDX-License-Identifier: Apache-2.0
"""The DiT's attention and feed-forward with weights that stay FP8 (ROW_MX).

Tokens get a float32 scale a row, weights have one a column; see `omni_neuron_kernels`. With `native` only trn3's
kernels will do; without, torch multiplies dequantised numbers where there are none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from omni_neuron_kernels import fp8_mlp, fp8_output_projection, fp8_qkv_projection, pack_fp8_weight, row_quantize
from omni_neuron_parallel import AxisGroup, ColumnParallelLinear, RowParallelLinear
from omni_neuron_runtime import SafetensorsWeightLoader, get_weight_loader, set_weight_loader
from omni_neuron_wan22.comfyui import FP8
from omni_neuron_wan22.transformer import (
    WanCrossAttention,
    WanFeedForward,
    WanSelfAttention,
    WanTransformer3DModel,
    WanTransformerBlock,
)

# The kernel's inner width on a rank is a multiple of this; zeros fill it up.
_INNER_MULTIPLE = 128


def use_row_mx(model: WanTransformer3DModel, modules: Collection[str], *, native: bool) -> None:
    """Replace these modules of every block by their FP8 forms, empty.

    Args:
        model: without weights yet; on the meta device this costs nothing.
        modules: of "attn1", "attn2" and "ffn".
        native: refuse to dequantise (`NativeFp8Error` at the first call, where no kernel takes it).
    """
    config = model.config
    dim, heads, head_dim = config.hidden_size, config.num_attention_heads, config.attention_head_dim
    for block in model.blocks:
        assert isinstance(block, WanTransformerBlock)
        if "attn1" in modules:
            block.attn1 = RowMxSelfAttention(
                dim,
                heads,
                head_dim,
                config.eps,
                group=block.attn1.group,
                context_group=block.attn1.context_group,
                sequence_parallel=block.attn1.o.sequence_parallel,
                context_method=block.attn1.context_method,
                native=native,
            )
        if "attn2" in modules:
            output = block.attn2.o
            parallel: dict[str, Any] = {"group": output.group, "sequence_parallel": output.sequence_parallel}
            block.attn2 = RowMxCrossAttention(dim, heads, head_dim, config.eps, native=native, **parallel)
        if "ffn" in modules:
            down = block.ffn.down
            parallel = {"group": down.group, "sequence_parallel": down.sequence_parallel}
            block.ffn = RowMxFeedForward(dim, config.ffn_dim, native=native, **parallel)


def _keep_fp8(layer: nn.Module, sources: int = 1) -> None:
    """Give a linear layer a packed FP8 weight and its scales instead of its weight; its loader is of `[out, in]` still.

    Args:
        layer: with `weight`.
        sources: from how many tensors of the checkpoint, of as many rows each, the weight is put together.
    """
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    rows, columns = weight.shape
    packed = pack_fp8_weight(torch.empty(columns, rows, dtype=FP8, device="meta")).shape
    layer.weight = nn.Parameter(torch.empty(packed, dtype=FP8), requires_grad=False)
    set_weight_loader(layer.weight, get_weight_loader(weight))
    layer.weight_scale = nn.Parameter(torch.empty(rows, dtype=torch.float32), requires_grad=False)
    loader = SafetensorsWeightLoader(
        lambda slices, rank: torch.cat([scale[...].reshape(1).expand(rows // sources) for scale in slices])
    )
    set_weight_loader(layer.weight_scale, loader)


def _scale(layer: nn.Module) -> torch.Tensor:
    scale = layer.weight_scale
    assert isinstance(scale, torch.Tensor)
    return scale


class RowMxOutputProjection(RowParallelLinear):
    """`WanOutputProjection` with an FP8 weight."""

    def __init__(
        self, in_features: int, out_features: int, *, group: AxisGroup, sequence_parallel: bool, native: bool
    ) -> None:
        super().__init__(in_features, out_features, group=group, sequence_parallel=sequence_parallel)
        self.native = native
        self.weight_scale: nn.Parameter
        _keep_fp8(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `RowParallelLinear`."""
        partial = fp8_output_projection(hidden, self.weight, self.weight_scale, self.bias, native=self.native)
        return self.sum_over_ranks(partial)


class RowMxSelfAttention(WanSelfAttention):
    """`WanSelfAttention` with FP8 weights."""

    def __init__(self, dim: int, num_heads: int, head_dim: int, eps: float, *, native: bool, **parallel: Any) -> None:
        super().__init__(dim, num_heads, head_dim, eps, **parallel)
        self.native = native
        _keep_fp8(self.qkv, sources=3)
        self.o = RowMxOutputProjection(  # type: ignore[assignment]
            num_heads * head_dim, dim, group=self.group, sequence_parallel=self.o.sequence_parallel, native=native
        )

    def project(
        self, hidden: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `WanSelfAttention.project`."""
        return fp8_qkv_projection(
            *row_quantize(hidden),
            self.qkv.weight,
            _scale(self.qkv),
            self.qkv.bias,
            heads=(self.num_heads, self.num_heads),
            head_dim=self.head_dim,
            dtype=hidden.dtype,
            query_gain=self.norm_q.weight,
            key_gain=self.norm_k.weight,
            rotation=rotary_emb,
            epsilon=self.eps,
            ranks=self.group.size,
            all_reduce=self.group.all_reduce,
            native=self.native,
        )


class RowMxCrossAttention(WanCrossAttention):
    """`WanCrossAttention` with FP8 weights."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        group: AxisGroup,
        sequence_parallel: bool,
        native: bool,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, eps, group=group, sequence_parallel=sequence_parallel)
        self.native, self.num_heads = native, num_heads // group.size
        for layer in (self.q, self.k, self.v):
            _keep_fp8(layer)
        self.o = RowMxOutputProjection(  # type: ignore[assignment]
            num_heads * head_dim, dim, group=group, sequence_parallel=sequence_parallel, native=native
        )

    def project_query(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `WanCrossAttention.project_query`."""
        return self._project(row_quantize(hidden), hidden.dtype, self.q, self.norm_q)

    def project_kv(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `WanCrossAttention.project_kv`."""
        tokens = row_quantize(context)
        key, value = (
            self._project(tokens, context.dtype, *layers) for layers in ((self.k, self.norm_k), (self.v, None))
        )
        return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def _project(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        layer: ColumnParallelLinear,
        norm: nn.Module | None,
    ) -> torch.Tensor:
        """`[B, S, N / tp, D]`; the function's queries alone, whatever they are here."""
        group = self.norm_q.group
        return fp8_qkv_projection(
            *tokens,
            layer.weight,
            _scale(layer),
            layer.bias,
            heads=(self.num_heads, 0),
            head_dim=self.head_dim,
            dtype=dtype,
            query_gain=None if norm is None else norm.weight,  # type: ignore[arg-type]
            epsilon=self.norm_q.eps,
            ranks=group.size,
            all_reduce=group.all_reduce,
            native=self.native,
        )[0]


class RowMxFeedForward(WanFeedForward):
    """`WanFeedForward` with FP8 weights; a rank's inner features are padded to what the kernel takes."""

    def __init__(self, dim: int, inner_dim: int, *, group: AxisGroup, sequence_parallel: bool, native: bool) -> None:
        super().__init__(dim, inner_dim, group=group, sequence_parallel=sequence_parallel)
        self.native = native
        self.up = ColumnParallelLinear(dim, inner_dim, multiple_of=_INNER_MULTIPLE, group=group)
        self.down = RowParallelLinear(
            inner_dim, dim, multiple_of=_INNER_MULTIPLE, group=group, sequence_parallel=sequence_parallel
        )
        _keep_fp8(self.up)
        _keep_fp8(self.down)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `WanFeedForward`."""
        up, down = self.up, self.down
        assert up.bias is not None and down.bias is not None
        partial = fp8_mlp(
            *row_quantize(hidden),
            up.weight,
            _scale(up),
            up.bias,
            down.weight,
            _scale(down),
            down.bias,
            dtype=hidden.dtype,
            native=self.native,
        )
        return down.sum_over_ranks(partial)
