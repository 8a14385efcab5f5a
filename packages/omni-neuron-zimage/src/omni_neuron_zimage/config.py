# SPDX-License-Identifier: Apache-2.0
"""The transformer's configuration, read from a checkpoint's config.json and checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_neuron.sdk import ModelConfig, ModelConfigError, check_tensor_parallel

SEQUENCE_MULTIPLE = 32  # image and caption are padded to a multiple of it with learned tokens, which take part
TIMESTEP_HIDDEN = 1024  # between the two layers that embed it
TIMESTEP_FEATURES = 256  # sinusoids of the timestep, and the width of its embedding unless the stream is narrower


@dataclass(frozen=True)
class ZImageConfig(ModelConfig):
    """`ZImageTransformer2DModel`; field names are diffusers', defaults those of Z-Image and Z-Image-Turbo.

    Raises:
        ModelConfigError: a variant that this package does not run.
    """

    all_patch_size: tuple[int, ...] = (2,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = 30
    n_refiner_layers: int = 2
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = 1e-5
    qk_norm: bool = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: int | None = None
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self) -> None:
        if len(self.all_patch_size) != 1 or tuple(self.all_f_patch_size) != (1,):
            raise ModelConfigError(
                f"all_patch_size = {list(self.all_patch_size)}, all_f_patch_size = {list(self.all_f_patch_size)}: "
                "valid are one patch size and [1]"
            )
        if self.siglip_feat_dim is not None:
            raise ModelConfigError(
                f"siglip_feat_dim = {self.siglip_feat_dim}: the Omni variant, which takes images, is not supported; "
                "valid is null"
            )
        if not self.qk_norm:
            raise ModelConfigError("qk_norm = false: valid is true, as in the published checkpoints")
        if self.n_kv_heads != self.n_heads:
            raise ModelConfigError(f"n_kv_heads = {self.n_kv_heads}: valid is n_heads, {self.n_heads}")
        if self.dim % self.n_heads or sum(self.axes_dims) != self.head_dim or len(self.axes_dims) != 3:
            raise ModelConfigError(
                f"axes_dims = {list(self.axes_dims)}: valid are three even numbers whose sum is dim / n_heads = "
                f"{self.dim} / {self.n_heads}"
            )
        if len(self.axes_lens) != 3 or any(size % 2 for size in self.axes_dims):
            raise ModelConfigError(
                f"axes_dims = {list(self.axes_dims)}, axes_lens = {list(self.axes_lens)}: valid are three of each, the "
                "dims even"
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.n_heads

    @property
    def patch_size(self) -> int:
        """Latent rows, and columns, in one token."""
        return self.all_patch_size[0]

    @property
    def patch_channels(self) -> int:
        """Latent values in one token."""
        return self.in_channels * self.patch_size**2

    @property
    def ffn_dim(self) -> int:
        """Features inside the feed-forward: 8 / 3 of the width, cut as diffusers cuts it."""
        return int(self.dim / 3 * 8)

    @property
    def timestep_dim(self) -> int:
        """Width of the timestep's embedding."""
        return min(self.dim, TIMESTEP_FEATURES)

    @property
    def longest_caption(self) -> int:
        """Tokens of the longest caption, pads included: behind them the image has a position of its own."""
        return (self.axes_lens[0] - 2) // SEQUENCE_MULTIPLE * SEQUENCE_MULTIPLE

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a TP size that does not divide the heads.

        Raises:
            ModelConfigError: naming the sizes that do.
        """
        check_tensor_parallel(size, self.n_heads, "the transformer")


def padded_length(tokens: int) -> int:
    """Tokens of an image or a caption with its pads: the next multiple of `SEQUENCE_MULTIPLE`."""
    return -(-tokens // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
