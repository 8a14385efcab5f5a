# SPDX-License-Identifier: Apache-2.0
"""The three model configurations, read from a checkpoint's config.json files and checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_omni_neuron.sdk import ModelConfig, ModelConfigError, check_tensor_parallel

WanConfigError = ModelConfigError


@dataclass(frozen=True)
class WanConfig(ModelConfig):
    """The DiT (`WanTransformer3DModel`); field names are diffusers', defaults those of T2V-A14B.

    `in_channels` above `out_channels` make it image-to-video: a mask and the condition's latents stand in the rest.
    `image_dim` is the width of the CLIP embedding that Wan2.1's image-to-video DiTs take besides, and
    `pos_embed_seq_len` the rows of those of the first and the last frame, for which such a DiT was trained.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: int | None = None
    rope_max_seq_len: int = 1024

    def __post_init__(self) -> None:
        if self.qk_norm != "rms_norm_across_heads":
            raise WanConfigError(f"qk_norm = {self.qk_norm!r}: Wan2.2 checkpoints have 'rms_norm_across_heads'")
        if self.attention_head_dim % 2:
            raise WanConfigError(f"attention_head_dim = {self.attention_head_dim}: rotary embedding needs an even one")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            raise WanConfigError(
                f"image_dim = {self.image_dim}, added_kv_proj_dim = {self.added_kv_proj_dim}: a DiT that takes an "
                "image embedding has both, any other neither"
            )
        if self.added_kv_proj_dim not in (None, self.hidden_size):
            raise WanConfigError(
                f"added_kv_proj_dim = {self.added_kv_proj_dim}: image embeddings are as wide as the token stream, "
                f"{self.hidden_size}"
            )
        if self.in_channels < self.out_channels:
            raise WanConfigError(
                f"in_channels = {self.in_channels}, out_channels = {self.out_channels}: the input holds the latents "
                "and their condition, so it has at least as many"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the token stream: heads · head dim."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def condition_channels(self) -> int:
        """Channels of the input that hold the condition; 0 unless it is image-to-video."""
        return self.in_channels - self.out_channels

    @property
    def patch_volume(self) -> int:
        """Latent values in one patch of one channel."""
        return math.prod(self.patch_size)

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a TP size that does not divide the heads.

        Raises:
            WanConfigError: naming the sizes that do.
        """
        check_tensor_parallel(size, self.num_attention_heads)


@dataclass(frozen=True)
class UMT5Config(ModelConfig):
    """The text encoder (`UMT5EncoderModel`); field names are transformers', defaults those of UMT5-XXL."""

    vocab_size: int = 256384
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "gated-gelu"

    def __post_init__(self) -> None:
        if self.feed_forward_proj != "gated-gelu":
            raise WanConfigError(f"feed_forward_proj = {self.feed_forward_proj!r}: UMT5 has 'gated-gelu'")


@dataclass(frozen=True)
class VaeConfig(ModelConfig):
    """`AutoencoderKLWan`, VAE 2.1 or 2.2; field names are diffusers', defaults those of A14B (2.1)."""

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8

    def __post_init__(self) -> None:
        if self.attn_scales:
            raise WanConfigError(f"attn_scales = {list(self.attn_scales)}: Wan's VAEs have none")
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise WanConfigError(
                f"temperal_downsample has {len(self.temperal_downsample)} values, dim_mult {len(self.dim_mult)}: "
                "one less is needed"
            )
        # What the layers do, whatever the file says.
        strides = {
            "scale_factor_spatial": self.patch * 2 ** len(self.temperal_downsample),
            "scale_factor_temporal": 2 ** sum(self.temperal_downsample),
        }
        for name, stride in strides.items():
            if getattr(self, name) != stride:
                raise WanConfigError(
                    f"{name} = {getattr(self, name)}: dim_mult, temperal_downsample and patch_size = "
                    f"{self.patch_size} make it {stride}"
                )
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.patch**2:
                raise WanConfigError(
                    f"{name} = {getattr(self, name)}: patch_size = {self.patch} needs a multiple of {self.patch**2}"
                )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise WanConfigError(f"{name} has {len(getattr(self, name))} values, z_dim is {self.z_dim}")

    @property
    def patch(self) -> int:
        """Pixels of a patch in height and in width; VAE 2.1 has no patches, which is patches of 1."""
        return self.patch_size or 1

    def latent_size(self, height: int, width: int, frames: int) -> tuple[int, int, int]:
        """Frames, height and width of the latents of a video of these pixels."""
        rows, columns = height // self.scale_factor_spatial, width // self.scale_factor_spatial
        return (frames - 1) // self.scale_factor_temporal + 1, rows, columns

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Channels of the encoder from the pixel side to the latent side, one more than there are down blocks."""
        return tuple(self.base_dim * factor for factor in (1, *self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Channels of the decoder from the latent side to the pixel side, one more than there are up blocks."""
        base = self.decoder_base_dim or self.base_dim
        return tuple(base * factor for factor in (self.dim_mult[-1], *reversed(self.dim_mult)))
