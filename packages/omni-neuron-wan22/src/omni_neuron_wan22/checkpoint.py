# SPDX-License-Identifier: Apache-2.0
"""A Wan2.2 checkpoint folder in diffusers' layout: what is in it, whether we can run it, and its components."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from omni_neuron_parallel import AxisGroup, ContextMethod, get_group
from omni_neuron_runtime import is_cpu_mode
from omni_neuron_wan22.comfyui import Noise, ScaledFp8File, find_expert_file
from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig, WanConfigError
from omni_neuron_wan22.fp8_loading import fp8_summary, prepare_loading
from omni_neuron_wan22.fp8_settings import METHOD, Fp8Settings
from omni_neuron_wan22.mapping import (
    UNUSED_TEXT_ENCODER_KEYS,
    UNUSED_VAE_PREFIXES,
    text_encoder_mapping,
    transformer_mapping,
    unused_transformer_keys,
    vae_mapping,
)
from omni_neuron_wan22.row_mx import use_row_mx
from omni_neuron_wan22.text_encoder import NeuronTextEncoderWrapper
from omni_neuron_wan22.transformer import WanTransformer3DModel
from omni_neuron_wan22.vae import NeuronAutoencoderKLWan
from vllm_omni_neuron.sdk import DiffusersCheckpoint, ShardedComponent, check_tensors, load_tensors, make_on_meta

logger = logging.getLogger(__name__)

Expert = Literal["transformer", "transformer_2"]
Task = Literal["t2v", "i2v", "ti2v"]
# By the `_class_name` of model_index.json, which is vLLM-Omni's name of the architecture.
SUPPORTED_PIPELINES: Mapping[str, tuple[Task, ...]] = {
    "WanPipeline": ("t2v", "ti2v"),
    "WanImageToVideoPipeline": ("i2v", "ti2v"),
}

_TEXT_ENCODER = ShardedComponent(
    "text_encoder", UMT5Config, NeuronTextEncoderWrapper, text_encoder_mapping, UNUSED_TEXT_ENCODER_KEYS
)


@dataclass(frozen=True)
class WanCheckpoint(DiffusersCheckpoint):
    """A checkpoint folder.

    Attributes:
        fp8: where the experts' weights come from instead, in FP8; their config.json files are still this folder's.
    """

    fp8: Fp8Settings | None = None

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The experts that the index lists: high noise first."""
        names: tuple[Expert, ...] = ("transformer", "transformer_2")
        return tuple(name for name in names if self.lists(name))

    @property
    def task(self) -> Task:
        """Text to video, image to video, or (TI2V-5B, by the index's `expand_timesteps`) text with or without an image.

        Raises:
            WanConfigError: a file is missing, or the index lists no transformer.
        """
        if self.index.get("expand_timesteps"):
            return "ti2v"
        if not self.experts:
            raise WanConfigError(f"{self.path / 'model_index.json'} lists no transformer")
        return "i2v" if self.transformer_config(self.experts[0]).condition_channels else "t2v"

    @property
    def encodes_images(self) -> bool:
        """Whether a request may bring an image, so that the VAE's encoder is needed."""
        return self.task != "t2v"

    def experts_in_use(self, boundary_ratio: float | None) -> tuple[Expert, ...]:
        """The experts to load: boundary 1.0 needs only the low-noise one, 0.0 only the high-noise one."""
        if len(self.experts) == 2 and boundary_ratio == 1.0:
            return ("transformer_2",)
        if len(self.experts) == 2 and boundary_ratio == 0.0:
            return ("transformer",)
        return self.experts

    @property
    def boundary_ratio(self) -> float | None:
        """The boundary that the checkpoint was trained with, where the index names it."""
        value = self.index.get("boundary_ratio")
        return float(value) if isinstance(value, int | float) else None

    def transformer_config(self, expert: Expert) -> WanConfig:
        """The DiT's sizes."""
        return self.config(expert, WanConfig)

    @cached_property
    def text_encoder_config(self) -> UMT5Config:
        """The encoder's sizes."""
        return _TEXT_ENCODER.config(self)

    @cached_property
    def vae_config(self) -> VaeConfig:
        """The VAE's sizes and latent statistics."""
        return self.config("vae", VaeConfig)

    def check(self, *, tensor_parallel_size: int = 1, boundary_ratio: float | None = None) -> None:
        """Refuse what cannot run, from configuration files and safetensors headers; of FP8 files the scales, too.

        Raises:
            WanConfigError: another pipeline, a missing component, a TP size that does not divide the heads.
            CheckpointError: a truncated or corrupt file, missing keys, a tensor of the wrong shape.
        """
        self._check_pipeline()
        for expert in self.experts_in_use(boundary_ratio):
            config = self.transformer_config(expert)
            config.check_tensor_parallel(tensor_parallel_size)
            self._check_channels(expert, config)
            if config.text_dim != self.text_encoder_config.d_model:
                raise WanConfigError(
                    f"{expert}: text_dim = {config.text_dim} but the text encoder has "
                    f"d_model = {self.text_encoder_config.d_model}"
                )
            if self.fp8 is None:
                unused = unused_transformer_keys(config)
                self.check_weights(expert, _transformer(config), transformer_mapping(config), unused)
            else:
                self._check_fp8_file(expert, _transformer(config))
        _TEXT_ENCODER.check(self)
        vae, encoder = self.vae_config, self.encodes_images
        self.check_weights("vae", _vae(vae, encoder), vae_mapping(vae, encoder=encoder), _unused_vae_keys(encoder))

    def fp8_file(self, expert: Expert) -> ScaledFp8File:
        """Where an expert's FP8 weights are.

        Raises:
            CheckpointError: there is no such file, or more than one that it could be.
        """
        assert self.fp8 is not None
        config = self.transformer_config(expert)
        noise: Noise | None = None if len(self.experts) == 1 else "high" if expert == "transformer" else "low"
        path = find_expert_file(self.fp8.path, noise, image_to_video=config.in_channels != config.out_channels)
        return ScaledFp8File(path, config)

    def _check_pipeline(self) -> None:
        pipeline = self.architecture
        if pipeline not in SUPPORTED_PIPELINES:
            raise WanConfigError(
                f"{self.path / 'model_index.json'}: _class_name = {pipeline!r}; "
                f"omni-neuron-wan22 runs {', '.join(SUPPORTED_PIPELINES)}"
            )
        needed = [*self.experts, "text_encoder", "tokenizer", "vae"]
        self.check_components(*needed)  # before the task is read from one of them
        if self.task not in SUPPORTED_PIPELINES[pipeline]:
            right = next(name for name, tasks in SUPPORTED_PIPELINES.items() if self.task in tasks)
            raise WanConfigError(
                f"{self.path / 'model_index.json'}: _class_name = {pipeline!r}, but the in_channels of "
                f"{self.experts[0]}/config.json are those of {right}"
            )
        if not self.experts:
            raise WanConfigError(f"{self.path / 'model_index.json'} lists no transformer")
        if self.task == "ti2v" and len(self.experts) > 1:
            raise WanConfigError(
                f"{self.path / 'model_index.json'}: expand_timesteps is set, which makes this TI2V-5B, and "
                "transformer_2 is listed; TI2V-5B has one expert"
            )
        if any(self.transformer_config(expert).image_dim is not None for expert in self.experts):
            self.check_components(*needed, "image_encoder", "image_processor")

    def _check_channels(self, expert: Expert, config: WanConfig) -> None:
        """Refuse a DiT whose input is not made of what the VAE gives."""
        vae = self.vae_config
        if config.out_channels != vae.z_dim:
            raise WanConfigError(f"{expert}: out_channels = {config.out_channels} but the VAE has z_dim = {vae.z_dim}")
        condition = vae.scale_factor_temporal + vae.z_dim if self.task == "i2v" else 0
        if config.condition_channels != condition:
            parts = f" + {vae.scale_factor_temporal} of the mask + {vae.z_dim} of the condition" if condition else ""
            raise WanConfigError(
                f"{expert}: in_channels = {config.in_channels} but the VAE has z_dim = {vae.z_dim}, which makes "
                f"{vae.z_dim + condition} ({vae.z_dim}{parts})"
            )

    def _check_fp8_file(self, expert: Expert, make: Callable[[AxisGroup], nn.Module]) -> None:
        assert self.fp8 is not None
        file = self.fp8_file(expert)
        file.check_row_mx(self.fp8.row_mx)
        check_tensors(file.tensors, make, file.mapping(), _known_fp8_keys(file))
        own = self.path / expert
        other = self.path / ("transformer_2" if expert == "transformer" else "transformer")
        if len(self.experts) == 2 and all(any(folder.glob("*.safetensors")) for folder in (own, other)):
            file.check_expert(own, other)


def load_transformer(
    checkpoint: WanCheckpoint,
    expert: Expert,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: AxisGroup | None = None,
    sequence_parallel: bool = False,
    context_method: ContextMethod = "auto",
) -> WanTransformer3DModel:
    """One expert's DiT, this rank's shards only, in `dtype` (the modulation's parameters in float32).

    The last two arguments are those of `WanTransformer3DModel`. With `checkpoint.fp8` the weights come from there.
    """
    config = checkpoint.transformer_config(expert)
    make = _transformer(config, sequence_parallel, context_method)
    if checkpoint.fp8 is None:
        mapping, unused = transformer_mapping(config), unused_transformer_keys(config)
        return checkpoint.load(expert, make, mapping, dtype=dtype, device=device, group=group, unused=unused)
    file, row_mx, group = checkpoint.fp8_file(expert), checkpoint.fp8.row_mx, group or get_group("tp")
    file.check_row_mx(row_mx)

    def make_fp8(group: AxisGroup) -> WanTransformer3DModel:
        model = make(group)
        use_row_mx(model, row_mx, native=not is_cpu_mode())
        return model

    model = make_on_meta(make_fp8, dtype, group)
    mapping = prepare_loading(model, file)
    model = load_tensors(model, file.tensors, mapping, device, group, _known_fp8_keys(file))
    logger.info("%s: %s; %s", expert, fp8_summary(model, file), checkpoint.fp8.computed_by())
    return model


def quantization_report(
    checkpoint: WanCheckpoint, models: Mapping[Expert, WanTransformer3DModel]
) -> dict[str, Any] | None:
    """What became of the FP8 weights of the experts in `models`, for a generation's report; None without FP8."""
    if checkpoint.fp8 is None:
        return None
    summaries = {expert: asdict(fp8_summary(model, checkpoint.fp8_file(expert))) for expert, model in models.items()}
    return {
        "method": METHOD,
        "row_mx_modules": list(checkpoint.fp8.row_mx),
        "computed_by": checkpoint.fp8.computed_by(),
        "experts": summaries,
    }


def load_text_encoder(
    checkpoint: WanCheckpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: AxisGroup | None = None,
) -> NeuronTextEncoderWrapper:
    """The UMT5 encoder, this rank's shards only."""
    return _TEXT_ENCODER.load(checkpoint, dtype=dtype, device=device, group=group)


def load_vae(
    checkpoint: WanCheckpoint, *, dtype: torch.dtype, device: torch.device | str = "cpu", encoder: bool = False
) -> NeuronAutoencoderKLWan:
    """The VAE's decoder, whole, and its encoder where asked for; only the ranks that decode call this."""
    config = checkpoint.vae_config
    return checkpoint.load(
        "vae",
        _vae(config, encoder),
        vae_mapping(config, encoder=encoder),
        dtype=dtype,
        device=device,
        group=AxisGroup("tp"),
        unused=_unused_vae_keys(encoder),
    )


def _transformer(
    config: WanConfig, sequence_parallel: bool = False, context_method: ContextMethod = "auto"
) -> Callable[[AxisGroup], WanTransformer3DModel]:
    return lambda group: WanTransformer3DModel(
        config, group=group, sequence_parallel=sequence_parallel, context_method=context_method
    )


def _vae(config: VaeConfig, encoder: bool) -> Callable[[AxisGroup], NeuronAutoencoderKLWan]:
    return lambda group: NeuronAutoencoderKLWan(config, encoder=encoder)


def _unused_vae_keys(encoder: bool) -> tuple[str, ...]:
    return () if encoder else UNUSED_VAE_PREFIXES


def _known_fp8_keys(file: ScaledFp8File) -> tuple[str, ...]:
    """What an FP8 file holds besides weights."""
    return (*file.inventory.unused, *file.inventory.scales.values())
