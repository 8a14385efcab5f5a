# SPDX-License-Identifier: Apache-2.0
"""The DiT's configuration, read from the checkpoint's transformer/config.json and checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_neuron.sdk import ModelConfig, ModelConfigError

# On one axis of a video: 512 rows of 16 pixels, or 2045 frames; far more than the model was trained for.
MAX_POSITIONS = 512


@dataclass(frozen=True)
class HunyuanVideo15Config(ModelConfig):
    """`HunyuanVideo15Transformer3DModel`; field names are diffusers', defaults those of the published checkpoints.

    The input holds the noisy latents, the condition's latents and a mask, which is `in_channels`. A square of
    `target_size` has about as many pixels as the videos that the model was trained for.
    """

    in_channels: int = 65
    out_channels: int = 32
    num_attention_heads: int = 16
    attention_head_dim: int = 128
    num_layers: int = 54
    num_refiner_layers: int = 2
    mlp_ratio: float = 4.0
    patch_size: int = 1
    patch_size_t: int = 1
    qk_norm: str = "rms_norm"
    text_embed_dim: int = 3584
    text_embed_2_dim: int = 1472
    rope_theta: float = 256.0
    rope_axes_dim: tuple[int, int, int] = (16, 56, 56)
    target_size: int = 640
    use_meanflow: bool = False

    def __post_init__(self) -> None:
        if self.qk_norm != "rms_norm":
            raise ModelConfigError(f"qk_norm = {self.qk_norm!r}: HunyuanVideo-1.5 checkpoints have 'rms_norm'")
        for name in ("patch_size", "patch_size_t"):
            if getattr(self, name) != 1:
                raise ModelConfigError(f"{name} = {getattr(self, name)}: HunyuanVideo-1.5 checkpoints have 1")
        if self.use_meanflow:
            raise ModelConfigError(
                "use_meanflow = True: a model distilled by MeanFlow takes two timesteps a step, which this package "
                "does not support; checkpoints that are not step-distilled have false"
            )
        if sum(self.rope_axes_dim) != self.attention_head_dim or any(dim % 2 for dim in self.rope_axes_dim):
            raise ModelConfigError(
                f"rope_axes_dim = {list(self.rope_axes_dim)}: valid are three even numbers whose sum is "
                f"attention_head_dim = {self.attention_head_dim}"
            )
        if self.in_channels != 2 * self.out_channels + 1:
            raise ModelConfigError(
                f"in_channels = {self.in_channels}: the latents, a condition of as many channels and a mask make "
                f"2 · {self.out_channels} + 1 = {2 * self.out_channels + 1}"
            )

    @property
    def hidden_size(self) -> int:
        """Width of both token streams: heads · head dim."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def ffn_dim(self) -> int:
        """Features inside a feed-forward."""
        return int(self.hidden_size * self.mlp_ratio)


@dataclass(frozen=True)
class VaeConfig(ModelConfig):
    """What the latents' shape takes of `AutoencoderKLHunyuanVideo15`; field names are diffusers'."""

    latent_channels: int = 32
    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)
    layers_per_block: int = 2
    spatial_compression_ratio: int = 16
    temporal_compression_ratio: int = 4

    def latent_size(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns."""
        spatial, temporal = self.spatial_compression_ratio, self.temporal_compression_ratio
        return (num_frames - 1) // temporal + 1, height // spatial, width // spatial


@dataclass(frozen=True)
class GuiderConfig(ModelConfig):
    """diffusers' `ClassifierFreeGuidance`, as it guides all steps alike: negative + scale · (positive − negative)."""

    _class_name: str
    guidance_scale: float
    guidance_rescale: float = 0.0
    use_original_formulation: bool = False
    start: float = 0.0
    stop: float = 1.0
    enabled: bool = True

    def __post_init__(self) -> None:
        supported = {
            "_class_name": "ClassifierFreeGuidance",
            "guidance_rescale": 0.0,
            "use_original_formulation": False,
            "start": 0.0,
            "stop": 1.0,
        }
        for name, value in supported.items():
            if getattr(self, name) != value:
                raise ModelConfigError(f"guider: {name} = {getattr(self, name)!r}; the valid value is {value!r}")

    @property
    def scale(self) -> float:
        """The guidance scale where a request gives none; 1 is no guidance."""
        return self.guidance_scale if self.enabled else 1.0
