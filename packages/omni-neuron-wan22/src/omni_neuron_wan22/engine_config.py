# SPDX-License-Identifier: Apache-2.0
"""What Wan2.2 answers in the engine's process: what its settings mean, and which of them cannot run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from omni_neuron_wan22.cache_settings import check_cache_config
from omni_neuron_wan22.checkpoint import Task, WanCheckpoint
from omni_neuron_wan22.fp8_settings import Fp8Settings
from omni_neuron_wan22.lora_adapter import read_adapter
from omni_neuron_wan22.request import GenerationRequest, wan_rules
from vllm_omni_neuron import model_settings
from vllm_omni_neuron.sdk import EngineHooks, ImageUse, RequestError, RequestRules

IMAGE_TO_VIDEO = "WanImageToVideoPipeline"


class WanHooks(EngineHooks):
    """Of both architectures."""

    @classmethod
    def open_checkpoint(cls, od_config: Any) -> WanCheckpoint:
        """The checkpoint folder, and where FP8 weights of its experts are.

        Raises:
            WanConfigError: settings of FP8 that do not fit each other.
        """
        return WanCheckpoint(Path(str(od_config.model)), Fp8Settings.from_settings(model_settings(od_config)))

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: WanCheckpoint) -> None:
        """Refuse FP8 where nothing computes it, a checkpoint that does not fit, wrong settings of Cache-DiT."""
        if checkpoint.fp8 is not None:
            checkpoint.fp8.check_place(od_config.dtype)
        checkpoint.check(
            tensor_parallel_size=od_config.parallel_config.tensor_parallel_size, boundary_ratio=od_config.boundary_ratio
        )
        if od_config.cache_backend == "cache_dit":
            blocks = min(checkpoint.transformer_config(expert).num_layers for expert in checkpoint.experts)
            check_cache_config(od_config.cache_config, blocks)

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: WanCheckpoint) -> RequestRules:
        """Defaults by the checkpoint's task; boundary and shift of the engine."""
        vae = checkpoint.vae_config
        transformer = checkpoint.transformer_config(checkpoint.experts[0])
        architecture = od_config.model_class_name or checkpoint.architecture
        images: dict[Task, ImageUse] = {
            "t2v": "none",
            "i2v": "required",
            "ti2v": "required" if architecture == IMAGE_TO_VIDEO else "optional",
        }
        # CLIP's embedding of a last frame needs positions that tell it from the first one's.
        with_embeds: ImageUse = "none" if transformer.pos_embed_seq_len is None else "required"
        last_image: ImageUse = "none" if checkpoint.task != "i2v" else "optional"
        return wan_rules(
            checkpoint.task,
            boundary_ratio=od_config.boundary_ratio,
            checkpoint_boundary_ratio=checkpoint.boundary_ratio,
            flow_shift=od_config.flow_shift,
            image_policy=model_settings(od_config).get("image_policy"),
            spatial_stride=vae.scale_factor_spatial * transformer.patch_size[1],
            temporal_stride=vae.scale_factor_temporal,
            images=images[checkpoint.task],
            last_image=last_image if transformer.image_dim is None else with_embeds,
        )

    @classmethod
    def check_request(cls, request: GenerationRequest, checkpoint: WanCheckpoint, od_config: Any) -> None:
        """Refuse a boundary whose expert the engine has not loaded."""
        loaded = checkpoint.experts_in_use(od_config.boundary_ratio)
        needed = checkpoint.experts_in_use(request.boundary_ratio)
        missing = [expert for expert in needed if expert not in loaded]
        if missing:
            raise RequestError(
                f"boundary_ratio = {request.boundary_ratio} needs {', '.join(missing)}, which the engine did not load "
                f"because it was started with boundary_ratio = {od_config.boundary_ratio}"
            )

    @classmethod
    def num_tokens(cls, request: GenerationRequest, checkpoint: WanCheckpoint) -> int:
        """Patches of the latents."""
        latents = checkpoint.vae_config.latent_size(request.height, request.width, request.num_frames)
        patch = checkpoint.transformer_config(checkpoint.experts[0]).patch_size
        return math.prod(size // side for size, side in zip(latents, patch, strict=True))

    @classmethod
    def check_lora(cls, path: str, checkpoint: WanCheckpoint) -> None:
        """Compare the adapter's headers with the checkpoint's."""
        read_adapter(path, checkpoint)
