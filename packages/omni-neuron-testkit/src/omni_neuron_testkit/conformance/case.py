# SPDX-License-Identifier: Apache-2.0
"""What a model package tells the kit: requests, layouts, reference latents, its real configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from omni_neuron_parallel import Topology
    from vllm_omni_neuron.sdk import ModelConfig, ModelSpec, ShardedComponent

ConfigT = TypeVar("ConfigT", bound="ModelConfig")


@dataclass(frozen=True)
class KitRequest:
    """A request, as a user would send it.

    Attributes:
        prompt: the text.
        negative_prompt: what to steer away from.
        height, width: pixels.
        num_frames: of a video; None for an image.
        num_inference_steps: steps; some of them are late, low-noise ones.
        guidance_scale: above 1, so that both branches are computed.
        seed: of the noise.
        images: vLLM-Omni's `multi_modal_data` of a model that takes images: {"image": PIL image, …}.
        more: further fields of vLLM-Omni's `OmniDiffusionSamplingParams`, such as `max_sequence_length`.
    """

    prompt: str = "A red circle, moving right."
    negative_prompt: str = "blurry"
    height: int = 64
    width: int = 96
    num_frames: int | None = None
    num_inference_steps: int = 8
    guidance_scale: float = 4.0
    seed: int = 7
    images: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, **changes: Any) -> KitRequest:
        """This request with other values; names that are no field here go to `more`."""
        own = {name: value for name, value in changes.items() if name in _FIELDS}
        more = {name: value for name, value in changes.items() if name not in _FIELDS}
        return replace(self, **own, more={**self.more, **more}) if more else replace(self, **own)

    def prompt_input(self) -> dict[str, Any]:
        """What vLLM-Omni calls a prompt."""
        media = {"multi_modal_data": dict(self.images)} if self.images else {}
        return {"prompt": self.prompt, "negative_prompt": self.negative_prompt, **media}

    def sampling(self) -> dict[str, Any]:
        """The keywords of `OmniDiffusionSamplingParams`."""
        names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, **self.more}


_FIELDS = tuple(field.name for field in fields(KitRequest) if field.name != "more")


@dataclass(frozen=True)
class Layout:
    """How many ranks there are on each axis.

    Attributes:
        tp, cp, cfg, vae_patch: as in `omni_neuron_parallel.Topology`.
        sequence_parallel: whether tokens are split over TP between row-parallel layers.
    """

    tp: int = 1
    cp: int = 1
    cfg: int = 1
    vae_patch: int = 1
    sequence_parallel: bool = False

    @property
    def topology(self) -> Topology:
        """Of the ranks."""
        from omni_neuron_parallel import Topology

        return Topology(tp=self.tp, cp=self.cp, cfg=self.cfg, vae_patch=self.vae_patch)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.cfg

    @property
    def axes(self) -> tuple[str, ...]:
        """The spec's axes that this layout uses."""
        sizes = {"tp": self.tp, "cp": self.cp, "cfg": self.cfg, "vae_patch": self.vae_patch}
        used = [axis for axis, size in sizes.items() if size > 1]
        return (*used, *(("sp",) if self.sequence_parallel else ()))

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "cp": self.cp, "cfg": self.cfg, "vae": self.vae_patch}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.sequence_parallel:
            parts.insert(1, "sp")
        return "-".join(parts) or "one"


# Every axis alone, TP with SP, and TP and CP together; the VAE's axis has a test of its own.
STANDARD_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(cfg=2),
    Layout(tp=2, cp=2),
)


def supported(layout: Layout, spec: ModelSpec) -> bool:
    """Whether the spec allows every axis of `layout`, as large as it is."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "cfg": layout.cfg, "vae_patch": layout.vae_patch}
    for axis in layout.axes:
        if axis not in spec.axes:
            return False
        limit = spec.axes[axis]  # type: ignore[index]  # a name of the axis, as a plain string
        if axis != "sp" and limit is not None and sizes[axis] > limit:
            return False
    return True


class ReferenceRun(NamedTuple):
    """What a reference made of a request.

    Attributes:
        latents: the final ones `[1, …]`, in the layout of the pipeline's own latents.
        steps: the latents after each step, as far as the reference records them; empty if it does not.
        output: what the final latents are decoded to, in float32: `[1, 3, F, H, W]` or `[1, 3, H, W]` within ±1; None
            if the reference does not decode.
    """

    latents: torch.Tensor
    steps: Sequence[torch.Tensor] = ()
    output: torch.Tensor | None = None


class Published(NamedTuple):
    """A component of the published model, without weights.

    Attributes:
        module: built on the meta device for the parallel groups in force.
        mapping: parameter's name → key or keys in the checkpoint.
        shapes: of every key that the published checkpoint holds for the component.
        unused: keys that the model does not need, as `mapping_coverage` takes them.
    """

    module: nn.Module
    mapping: Mapping[str, str | list[str]]
    shapes: Mapping[str, Sequence[int]]
    unused: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        component: ShardedComponent[ConfigT, Any],
        reference: Callable[[], nn.Module],
        config: ConfigT | None = None,
    ) -> Published:
        """What the SDK's declaration of a component makes of the published sizes.

        Args:
            component: the declaration.
            reference: makes the module whose state dict has the published keys and shapes; called on the meta device.
            config: the published one; None for the configuration's defaults.
        """
        import torch

        config = config or component.config_class()
        with torch.device("meta"):
            module = component.module_class(config)
            shapes = {key: tuple(value.shape) for key, value in reference().state_dict().items()}
        return cls(module, component.mapping(config), shapes, component.unused)


def diffusers_reference(
    pipeline_class: type,
    folder: Any,
    request: KitRequest,
    dtype: torch.dtype,
    *,
    scheduler: Any = None,
    **arguments: Any,
) -> ReferenceRun:
    """A request through a diffusers pipeline, with the latents after every step; in float32 decoded, too.

    Args:
        pipeline_class: of diffusers.
        folder: the checkpoint.
        request: what the kit asks for; settings that the pipeline does not take are left out.
        dtype: of the weights.
        scheduler: instead of the checkpoint's, where the model package has another one.
        arguments: of the pipeline's call, beside those of the request.
    """
    import torch

    pipeline = pipeline_class.from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    if scheduler is not None:
        pipeline.scheduler = scheduler
    pipeline.set_progress_bar_config(disable=True)
    steps: list[torch.Tensor] = []
    step = pipeline.scheduler.step

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        steps.append(result[0].float().clone())
        return result

    pipeline.scheduler.step = recorded
    taken = inspect.signature(pipeline_class.__call__).parameters
    settings = {name: value for name, value in request.sampling().items() if name in taken}
    if "guidance_scale" not in taken and hasattr(pipeline, "guider"):
        pipeline.guider = pipeline.guider.new(guidance_scale=request.guidance_scale)

    def run(output_type: str, **changes: Any) -> Any:
        with torch.no_grad():
            return pipeline(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt,
                **request.images,
                **{**settings, **arguments, **changes},
                generator=torch.Generator().manual_seed(request.seed),
                output_type=output_type,
                return_dict=False,
            )[0]

    latents = run("latent").float()
    if dtype != torch.float32:
        return ReferenceRun(latents, steps)
    decoded: list[torch.Tensor] = []
    decode = pipeline.vae.decode

    def recorded_decode(*arguments: Any, **options: Any) -> Any:
        result = decode(*arguments, **options)
        decoded.append(result[0].clamp(-1, 1))
        return result

    # Once more from the last step on, so that what the pipeline does to latents before it decodes them is its own.
    pipeline.vae.decode = recorded_decode
    pipeline.scheduler.step = lambda *arguments, **options: (steps[-1],)
    run("pt", num_inference_steps=1)
    [output] = decoded
    return ReferenceRun(latents, steps, output)
