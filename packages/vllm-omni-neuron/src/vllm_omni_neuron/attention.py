# SPDX-License-Identifier: Apache-2.0
"""The attention backend of models that use vLLM-Omni's attention layer: torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class NeuronSDPAImpl(SDPAImpl):
    """SDPA whose key mask is broadcast over the queries, `[batch, 1, 1, keys]`."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attention of `[batch, sequence, heads, head_dim]` tensors, of the query's shape; heads may be grouped.

        The base class chooses an implementation by platform and knows no out-of-tree one.
        """
        output: torch.Tensor = self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")
        return output


class NeuronSDPABackend(SDPABackend):
    """vLLM-Omni's handle on `NeuronSDPAImpl`."""

    @staticmethod
    def get_name() -> str:
        """The name in logs."""
        return "NEURON_SDPA"

    @staticmethod
    def get_impl_cls() -> type[NeuronSDPAImpl]:
        """The implementation."""
        return NeuronSDPAImpl
