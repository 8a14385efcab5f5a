# SPDX-License-Identifier: Apache-2.0
"""A small model on the SDK for the kit to test: images from text, with rope, joint text tokens, a mask, TP, CP and CFG.

Importable by spawned processes. `conformance_toy_reference` has the same model in plain torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from torch import nn

from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    ContextMethod,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceShard,
    context_attention,
    get_group,
    group_place,
)
from vllm_omni_neuron.sdk import (
    ComponentSpec,
    Mapping,
    ModelConfig,
    ModelSpec,
    NeuronDiffusionPipeline,
    RequestRules,
    Trajectory,
    check_tensor_parallel,
    load_diffusers_vae,
    prefixed,
    save_components,
    write_model_index,
)

ARCHITECTURE = "ConformanceToyPipeline"
NONE = "the toy has none"
SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    title="Toy of the kit's tests",
    output="image",
    components=(
        ComponentSpec("text_encoder", "text_encoder", reason="a table and one matrix"),
        ComponentSpec("transformer", "transformer", axes=("tp", "cp", "cfg")),
        ComponentSpec("vae", "vae", axes=("vae_patch",)),
    ),
    axes={"tp": 4, "cp": None, "cfg": 2, "vae_patch": None},
    features={
        **dict.fromkeys(("image_input", "last_image_input", "lora", "cache_dit", "fp8"), NONE),
        **dict.fromkeys(("compile", "cpu_offload", "vae_tiling", "context_ring"), True),
        **dict.fromkeys(("tensor_capture", "sleep", "warmup_shapes"), True),
    },
)
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    num_heads: int = 4
    head_dim: int = 8
    layers: int = 2
    inner: int = 66
    channels: int = 4
    patch: int = 2
    text_width: int = 16
    vocabulary: int = 128

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim


def waves(values: torch.Tensor, width: int) -> Pair:
    """Cosines and sines `[N, width / 2]` of N values."""
    steps = torch.arange(width // 2, device=values.device) / (width // 2)
    angles = values.float()[:, None] * 10000.0**-steps
    return angles.cos(), angles.sin()


def rotate(tensor: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = tensor.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1).to(tensor.dtype)


class ToyTextEncoder(nn.Module):
    def __init__(self, config: ToyConfig):
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.vocabulary, config.text_width))
        self.out = nn.Linear(config.text_width, config.text_width)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.out(F.embedding(token_ids, self.table))


class ToyAttention(nn.Module):
    def __init__(self, config: ToyConfig, group: AxisGroup):
        super().__init__()
        hidden, self.head_dim = config.hidden, config.head_dim
        self.context_group = get_group("cp")
        self.method: ContextMethod = "auto"
        self.qkv = QKVParallelLinear(hidden, config.num_heads, config.head_dim, group=group)
        self.text_k = ColumnParallelLinear(config.text_width, hidden, multiple_of=config.head_dim, group=group)
        self.text_v = ColumnParallelLinear(config.text_width, hidden, multiple_of=config.head_dim, group=group)
        self.out = RowParallelLinear(hidden, hidden, multiple_of=config.head_dim, group=group)

    def forward(
        self, hidden: torch.Tensor, rope: Pair, text: torch.Tensor, mask: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        query, key, value = (part.unflatten(2, (-1, self.head_dim)) for part in self.qkv(hidden))
        joint = tuple(part(text).unflatten(2, (-1, self.head_dim)) for part in (self.text_k, self.text_v))
        attended = self.attend(rotate(query, *rope), rotate(key, *rope), value, joint, mask, tokens)
        return self.out(attended.flatten(2))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        joint: tuple[torch.Tensor, ...],
        mask: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        return context_attention(
            query,
            key,
            value,
            group=self.context_group,
            kv_length=tokens,
            method=self.method,
            joint_kv=joint,
            joint_mask=mask,
        )


class ToyBlock(nn.Module):
    def __init__(self, config: ToyConfig, group: AxisGroup, attention_class: type[ToyAttention]):
        super().__init__()
        self.modulation = nn.Linear(config.hidden, 3 * config.hidden)
        self.attention = attention_class(config, group)
        self.up = ColumnParallelLinear(config.hidden, config.inner, group=group)
        self.down = RowParallelLinear(config.inner, config.hidden, group=group)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor, *context: Any) -> torch.Tensor:
        shift, scale, gate = self.modulation(time).unsqueeze(1).chunk(3, dim=-1)
        normalised = F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift
        hidden = hidden + gate * self.attention(normalised, *context)
        return hidden + self.down(F.gelu(self.up(F.layer_norm(hidden, hidden.shape[-1:]))))


class ToyTransformer(nn.Module):
    attention_class: ClassVar[type[ToyAttention]] = ToyAttention

    def __init__(self, config: ToyConfig, group: AxisGroup | None = None):
        super().__init__()
        group = group or get_group("tp")
        self.config, self.context_group = config, get_group("cp")
        self.register_buffer("place", group_place(self.context_group), persistent=False)
        self.place: torch.Tensor
        pixels = config.channels * config.patch**2
        self.patch_in, self.patch_out = nn.Linear(pixels, config.hidden), nn.Linear(config.hidden, pixels)
        self.time_in = nn.Linear(config.hidden, config.hidden)
        self.blocks = nn.ModuleList(ToyBlock(config, group, self.attention_class) for _ in range(config.layers))

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        size, dtype = self.config.patch, self.patch_in.weight.dtype
        batch, channels, height, width = latents.shape
        patches = latents.reshape(batch, channels, height // size, size, width // size, size)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2).to(dtype)
        shard = SequenceShard(patches.shape[1], self.context_group.size, self.context_group.rank)
        hidden = shard.split(self.patch_in(patches), 1, self.place)
        rope = self.rope(patches.shape[1], shard, latents.device)
        time = F.silu(self.time_in(torch.cat(waves(timestep, self.config.hidden), dim=1).to(dtype)))
        for block in self.blocks:
            hidden = block(hidden, time, rope, text, mask, patches.shape[1])
        predicted = shard.gather(self.patch_out(hidden), 1, self.context_group)
        predicted = predicted.reshape(batch, height // size, width // size, channels, size, size)
        return predicted.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)

    def rope(self, tokens: int, shard: SequenceShard, device: torch.device) -> Pair:
        """The rows of this rank."""
        table = waves(torch.arange(tokens, device=device), self.config.head_dim)
        cosines, sines = (shard.split(part, 0, self.place) for part in table)
        return cosines, sines


def transformer_mapping(config: ToyConfig) -> Mapping:
    kinds = ("weight", "bias")
    mapping: Mapping = {
        f"{name}.{kind}": f"{name}.{kind}" for name in ("patch_in", "patch_out", "time_in") for kind in kinds
    }
    block: Mapping = {}
    for kind in kinds:
        block[f"attention.qkv.{kind}"] = [f"attention.to_{part}.{kind}" for part in "qkv"]
        for name in ("modulation", "attention.text_k", "attention.text_v", "attention.out", "up", "down"):
            block[f"{name}.{kind}"] = f"{name}.{kind}"
    for index in range(config.layers):
        mapping |= prefixed(block, f"blocks.{index}.", f"blocks.{index}.")
    return mapping


TEXT_MAPPING: Mapping = {name: name for name in ("table", "out.weight", "out.bias")}


class ToyPipeline(NeuronDiffusionPipeline):
    spec: ClassVar[ModelSpec] = SPEC
    transformer_class: ClassVar[type[ToyTransformer]] = ToyTransformer
    stride: ClassVar[int] = 16

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: Any) -> None:
        checkpoint.check_components("text_encoder", "transformer", "vae", "scheduler")
        heads = checkpoint.config("transformer", ToyConfig).num_heads
        check_tensor_parallel(od_config.parallel_config.tensor_parallel_size, heads)

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        return RequestRules(
            height=48,
            width=80,
            num_inference_steps=6,
            guidance_scale=3.0,
            max_sequence_length=24,
            spatial_stride=cls.stride,
        )

    @classmethod
    def num_tokens(cls, request: Any, checkpoint: Any) -> int:
        return (request.height // 16) * (request.width // 16)

    def load_components(self) -> None:
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.config = self.checkpoint.config("transformer", ToyConfig)
        alone = AxisGroup("tp")
        self.text_encoder = self.checkpoint.load(
            "text_encoder", lambda _: ToyTextEncoder(self.config), TEXT_MAPPING, group=alone, **where
        )
        self.transformer = self.checkpoint.load(
            "transformer",
            lambda group: self.transformer_class(self.config, group),
            transformer_mapping(self.config),
            **where,
        )
        for block in self.transformer.blocks:
            block.attention.method = self.context_method
        self.vae = load_diffusers_vae(self.checkpoint, **where) if self.decodes else None
        if self.vae is not None and self.od_config.vae_use_tiling:
            self.vae.enable_tiling()

    def encode_prompt(self, text: str, request: Any) -> Pair:
        length = request.max_sequence_length
        codes = [ord(character) % self.config.vocabulary for character in text][:length]
        token_ids = torch.tensor([codes + [0] * (length - len(codes))])
        mask = torch.arange(length)[None] < max(1, len(codes))
        return self.text_encoder(token_ids), mask

    def latent_shape(self, request: Any) -> tuple[int, ...]:
        return (1, self.config.channels, request.height // 8, request.width // 8)

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Pair, trajectory: Trajectory
    ) -> dict[str, Any]:
        return {"latents": latents, "timestep": timestep, "text": conditioning[0], "mask": conditioning[1]}

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        assert self.vae is not None
        return self.vae.decode(self.vae.denormalize(latents), group=get_group("vae_patch"))


get_pre_process_func = ToyPipeline.get_pre_process_func
get_post_process_func = ToyPipeline.get_post_process_func

PIPELINE_REGISTRY = [
    {
        "model_arch": ARCHITECTURE,
        "module_name": "conformance_toy",
        "class_name": "ToyPipeline",
        "pre_process_func_name": "get_pre_process_func",
        "post_process_func_name": "get_post_process_func",
        "final_output_type": "image",
    }
]
MODEL_SPECS = {ARCHITECTURE: "conformance_toy:SPEC"}
SDK = 1


def make_checkpoint(folder: Path) -> Path:
    config, generator = ToyConfig(), torch.Generator().manual_seed(3)
    transformer = ToyTransformer(config, AxisGroup("tp"))
    for name, module, mapping in (
        ("text_encoder", ToyTextEncoder(config), TEXT_MAPPING),
        ("transformer", transformer, transformer_mapping(config)),
    ):
        tensors: dict[str, torch.Tensor] = {}
        for parameter_name, parameter in module.named_parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            # Large enough that text, positions and biases matter to the output.
            whole *= 0.8 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 and parameter_name != "table" else 0.3
            keys = mapping[parameter_name]
            keys = [keys] if isinstance(keys, str) else keys
            tensors |= {key: part.contiguous() for key, part in zip(keys, whole.chunk(len(keys)), strict=True)}
        (folder / name).mkdir(parents=True)
        save_file(tensors, str(folder / name / "diffusion_pytorch_model.safetensors"), metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    torch.manual_seed(0)
    sizes = {"block_out_channels": (8,) * 4, "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
    vae = AutoencoderKL(
        **sizes,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        scaling_factor=0.5,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    save_components(folder, {"vae": vae, "scheduler": scheduler})
    components = {
        "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": ("conformance_toy", "ToyTextEncoder"),
        "transformer": ("conformance_toy", "ToyTransformer"),
        "vae": ("diffusers", "AutoencoderKL"),
    }
    write_model_index(folder, ARCHITECTURE, components)
    return folder
