# SPDX-License-Identifier: Apache-2.0
"""Any autoencoder of diffusers, for images or videos: whole or in tiles, here or on several ranks. No vLLM needed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import nn

from omni_neuron_parallel import AxisGroup, TilePlan, run_tiles
from vllm_omni_neuron.sdk.checkpoint import DiffusersCheckpoint
from vllm_omni_neuron.sdk.config import ModelConfigError
from vllm_omni_neuron.sdk.unsharded import load_pretrained

Direction = Literal["encode", "decode"]


@dataclass(frozen=True)
class VaeTiling:
    """How a picture is cut into tiles, in pixels, for both directions; the names are diffusers'.

    Attributes:
        tile_sample_min_height, tile_sample_min_width: of a tile; a smaller picture is one tile.
        tile_sample_stride_height, tile_sample_stride_width: distance between tiles; what they overlap by is blended.
    """

    tile_sample_min_height: int = 256
    tile_sample_min_width: int = 256
    tile_sample_stride_height: int = 192
    tile_sample_stride_width: int = 192

    def decoding_plan(self, height: int, width: int, pixels: int, *, patch: int = 1) -> TilePlan:
        """The tiles of latents of `height` × `width`.

        Args:
            height, width: of the latents.
            pixels: of a latent, along the height and along the width.
            patch: pixels of what the decoder gives for one pixel of its output, where it works in patches.

        Raises:
            ModelConfigError: a tile or stride that is no whole number of latents, or a stride above the tile.
        """
        self._check(pixels)
        return TilePlan.for_size(
            height,
            width,
            tile=(self.tile_sample_min_height // pixels, self.tile_sample_min_width // pixels),
            stride=(self.tile_sample_stride_height // pixels, self.tile_sample_stride_width // pixels),
            scale=pixels // patch,
        )

    def encoding_plan(self, height: int, width: int, pixels: int) -> TilePlan:
        """The tiles of a picture of `height` × `width`, multiples of `pixels`, which one latent stands for.

        Raises:
            ModelConfigError: as for `decoding_plan`.
        """
        self._check(pixels)
        return TilePlan.for_size(
            height,
            width,
            tile=(self.tile_sample_min_height, self.tile_sample_min_width),
            stride=(self.tile_sample_stride_height, self.tile_sample_stride_width),
            scale=Fraction(1, pixels),
        )

    def _check(self, pixels: int) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < pixels or value % pixels:
                raise ModelConfigError(f"{field.name} = {value}: valid values are positive multiples of {pixels}")
        for side in ("height", "width"):
            tile, stride = getattr(self, f"tile_sample_min_{side}"), getattr(self, f"tile_sample_stride_{side}")
            if stride > tile:
                raise ModelConfigError(
                    f"tile_sample_stride_{side} = {stride} leaves gaps between tiles of tile_sample_min_{side} = "
                    f"{tile}; valid values are {pixels} to {tile}"
                )


class DiffusersVae(nn.Module):
    """An autoencoder of diffusers. Lives on the ranks that decode only.

    Latents are `[B, C, h, w]` for images and `[B, C, T, h, w]` for videos. All sizes of outputs are the model's own,
    measured on the meta device, so nothing here knows a kind of autoencoder. Diffusers' own tiling stays off.

    Args:
        model: the autoencoder; put into eval mode, without gradients.

    Attributes:
        model: the autoencoder.
        tiling: how pictures are cut into tiles; None, as at first, takes them whole. See `enable_tiling`.
    """

    def __init__(self, model: Any):
        super().__init__()
        for name in ("decoder", "decode", "encode"):
            if not hasattr(model, name):
                raise ModelConfigError(f"{type(model).__name__} has no {name!r}; valid is an autoencoder of diffusers")
        self.model = model.eval().requires_grad_(False)
        if getattr(model, "use_tiling", False):
            model.disable_tiling()
        _as_python_numbers(model)
        self.tiling: VaeTiling | None = None

    @property
    def decoder(self) -> nn.Module:
        """What decoding spends its time in, and what is compiled."""
        return self.model.decoder

    @property
    def encoder(self) -> nn.Module | None:
        """The same of encoding; None where it was not loaded."""
        return self.model.encoder

    @property
    def has_encoder(self) -> bool:
        """Whether `encode` can be called."""
        return self.model.encoder is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return next(self.model.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.decoder.parameters()).device

    def enable_tiling(self, tiling: VaeTiling | None = None) -> None:
        """Encode and decode tile by tile from now on, by default in `VaeTiling()`."""
        self.tiling = tiling or VaeTiling()

    @functools.cached_property
    def spatial_scale(self) -> int:
        """Pixels a latent, along the height and along the width."""
        return self._shape_of("decode", (1, self._latent_channels, *self._frames(1), 2, 2))[-1] // 2

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The VAE's latents to the DiT's, in float32: (latents − mean) / std · scaling_factor, as the config has them.

        `latents_mean` and `latents_std` are per channel; `shift_factor` is a mean of all channels. What a config lacks
        is 0 or 1.
        """
        mean, std, factor = self._statistics(latents)
        return (latents.float() - mean) / std * factor

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The DiT's latents to the VAE's own and its dtype: latents / scaling_factor · std + mean."""
        mean, std, factor = self._statistics(latents)
        return (latents.float() / factor * std + mean).to(self.dtype)

    @overload
    def decode(self, latents: torch.Tensor, *, tiling: VaeTiling | None = None) -> torch.Tensor: ...
    @overload
    def decode(
        self, latents: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup
    ) -> torch.Tensor | None: ...
    def decode(
        self, latents: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup | None = None
    ) -> torch.Tensor | None:
        """Decode latents to an image or a video, whole or in tiles, here or on the ranks of a group.

        A tile knows nothing of the others: norms and attention over a picture see one tile of it, so a tiled picture is
        close to, not the same as, the one decoded whole. How many ranks share the tiles changes no bit.

        Args:
            latents: `[B, C, h, w]` or `[B, C, T, h, w]` in the VAE's own scale (`denormalize`), whole and the same on
                every rank, on any device.
            tiling: instead of `self.tiling`. With neither, more than one rank in `group` means `VaeTiling()`.
            group: the ranks that share the tiles; collective over it. None: this process alone.

        Returns:
            `[B, 3, H, W]` or `[B, 3, F, H, W]` within ±1, in `dtype`, on the host of the first rank of the group that
            holds global rank 0. None on every other rank; those of other groups return at once.

        Raises:
            ModelConfigError: a tiling that does not fit the VAE.
        """
        pixels = self._run("decode", self._decode, latents, tiling, group)
        return None if pixels is None else pixels.clamp_(-1.0, 1.0)

    @overload
    def encode(self, pixels: torch.Tensor, *, tiling: VaeTiling | None = None) -> torch.Tensor: ...
    @overload
    def encode(
        self, pixels: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup
    ) -> torch.Tensor | None: ...
    def encode(
        self, pixels: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup | None = None
    ) -> torch.Tensor | None:
        """Encode an image or a video to the mode of its posterior, whole or in tiles, here or on the ranks of a group.

        What `decode` says of tiles and ranks holds here.

        Args:
            pixels: `[B, 3, H, W]` or `[B, 3, F, H, W]` within ±1, whole and the same on every rank, on any device; H
                and W multiples of `spatial_scale`.
            tiling: instead of `self.tiling`. With neither, more than one rank in `group` means `VaeTiling()`.
            group: the ranks that share the tiles; collective over it. None: this process alone.

        Returns:
            Latents `[B, C, h, w]` or `[B, C, T, h, w]` in the VAE's own scale (see `normalize`) and `dtype`, on the
            host of the first rank of the group that holds global rank 0. None on every other rank.

        Raises:
            ModelConfigError: a tiling that does not fit the VAE.
            ValueError: pixels of another size, or a VAE that was loaded without its encoder.
        """
        if not self.has_encoder:
            raise ValueError("this VAE was loaded without its encoder: load_diffusers_vae(…, encoder=True)")
        for name, size in zip(("height", "width"), pixels.shape[-2:], strict=True):
            if size < 1 or size % self.spatial_scale:
                raise ValueError(f"{name} = {size} to encode: valid are multiples of {self.spatial_scale}")
        return self._run("encode", self._encode, pixels, tiling, group)

    def _run(
        self,
        direction: Direction,
        compute: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        tiling: VaeTiling | None,
        group: AxisGroup | None,
    ) -> torch.Tensor | None:
        tiling, group = tiling or self.tiling, group or AxisGroup("vae_patch")
        # From the host, so that whole pictures and tiles reach the device contiguous and in the VAE's dtype.
        inputs = inputs.cpu()
        if tiling is None and group.ranks == (0,):
            return compute(inputs).cpu()
        is_image, (height, width) = inputs.dim() == 4, inputs.shape[-2:]
        tiling, scale = tiling or VaeTiling(), self.spatial_scale
        plan = tiling.decoding_plan if direction == "decode" else tiling.encoding_plan
        side = 2 if direction == "decode" else 2 * scale
        measured = self._shape_of(direction, (1, *inputs.shape[1:-2], side, side))
        result = run_tiles(
            inputs.unsqueeze(2) if is_image else inputs,
            lambda tile: [compute(tile.squeeze(2)).unsqueeze(2) if is_image else compute(tile)],
            plan(height, width, scale),
            channels=measured[1],
            frames=1 if is_image else measured[2],
            dtype=self.dtype,
            group=group,
        )
        return result.squeeze(2) if result is not None and is_image else result

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.model.decode(self._placed(latents), return_dict=False)[0]

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return _mode(self.model.encode(self._placed(pixels), return_dict=False)[0])

    def _placed(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype).contiguous().to(self.device)

    @property
    def _latent_channels(self) -> int:
        config = self.model.config
        return int(config["latent_channels"] if "latent_channels" in config else config["z_dim"])

    def _frames(self, number: int) -> tuple[int, ...]:
        """The dim of frames, where the model has one: its first convolution says so."""
        is_video = any(isinstance(module, nn.Conv3d) for module in self.model.modules())
        return (number,) if is_video else ()

    def _shape_of(self, direction: Direction, shape: tuple[int, ...]) -> torch.Size:
        model_class: Any = type(self.model)
        return _output_shape(model_class, self.model.to_json_string(), direction, shape)

    def _statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean, standard deviation (both float32, of one element or one a channel) and scaling factor."""
        # Some models keep statistics as buffers, which their checkpoints fill.
        config, buffers = self.model.config, dict(self.model.named_buffers(recurse=False))

        def channels(name: str, otherwise: float) -> torch.Tensor:
            value = buffers.get(name, otherwise) if config.get(name) is None else config[name]
            tensor = torch.as_tensor(value, dtype=torch.float32, device=latents.device)
            return tensor.reshape(1, -1, *[1] * (latents.dim() - 2))

        shift, factor = config.get("shift_factor"), config.get("scaling_factor")
        mean = channels("latents_mean", 0.0 if shift is None else float(shift))
        return mean, channels("latents_std", 1.0), 1.0 if factor is None else float(factor)


def load_diffusers_vae(
    checkpoint: DiffusersCheckpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    component: str = "vae",
    encoder: bool = False,
) -> DiffusersVae:
    """The autoencoder of a checkpoint, whole; only the ranks that decode call this.

    Args:
        checkpoint: the folder.
        dtype: of the weights.
        device: where they go.
        component: its folder in there; the class is the one that its config.json names.
        encoder: whether to keep the encoder, which a model without image input does without.

    Raises:
        CheckpointError: files that are missing or truncated, or lack tensors.
        ModelConfigError: no autoencoder of diffusers is named.
    """
    import diffusers

    path = checkpoint.path / component
    name = checkpoint.raw_config(component).get("_class_name")
    model_class = getattr(diffusers, str(name), None)
    if model_class is None:
        raise ModelConfigError(f"{path / 'config.json'}: diffusers {diffusers.__version__} has no class {name!r}")
    model = load_pretrained(model_class, path, dtype)
    if not encoder:
        model.encoder = None
    return DiffusersVae(model).to(device)


def _as_python_numbers(model: nn.Module) -> None:
    """Some constructors leave numpy's numbers in modules, which torch.compile takes for arrays with unknown values."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, np.generic):
                setattr(module, name, value.item())


def _mode(encoded: Any) -> torch.Tensor:
    """An autoencoder gives a distribution, or latents."""
    return encoded if isinstance(encoded, torch.Tensor) else encoded.mode()


@functools.lru_cache(maxsize=64)
def _output_shape(model_class: Any, config: str, direction: Direction, shape: tuple[int, ...]) -> torch.Size:
    """What an autoencoder makes of an input, from a run without data."""
    with torch.device("meta"), torch.no_grad():
        twin, inputs = model_class.from_config(json.loads(config)).eval(), torch.empty(shape)
        if direction == "decode":
            return twin.decode(inputs, return_dict=False)[0].shape
        return _mode(twin.encode(inputs, return_dict=False)[0]).shape
