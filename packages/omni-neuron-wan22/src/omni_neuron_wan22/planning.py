# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron plan` must know of Wan2.2, derived from the package's own configurations. No vLLM needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from omni_neuron_parallel.planning import Linear, ModelSizes, Rows, Split, VaeSizes, Vector, Weights
from omni_neuron_wan22.checkpoint import WanCheckpoint
from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig, WanConfigError
from omni_neuron_wan22.published import I2V_A14B, T2V_A14B, TI2V_5B, PublishedModel
from omni_neuron_wan22.request import DEFAULT_MAX_SEQUENCE_LENGTH
from vllm_omni_neuron.sdk import VaeTiling

FLOAT32 = 4
CACHED_FRAMES = 2  # by every convolution over three frames


def t2v_a14b() -> ModelSizes:
    """Wan2.2 T2V-A14B in bfloat16."""
    return _of(T2V_A14B)


def i2v_a14b() -> ModelSizes:
    """Wan2.2 I2V-A14B in bfloat16. What the VAE's encoder takes besides is not in it."""
    return _of(I2V_A14B)


def ti2v_5b() -> ModelSizes:
    """Wan2.2 TI2V-5B in bfloat16. What the VAE's encoder takes besides is not in it."""
    return _of(TI2V_5B)


def _of(model: PublishedModel) -> ModelSizes:
    return model_sizes(model.name, model.experts, model.transformer, model.text_encoder, model.vae)


def from_checkpoint(folder: str | Path) -> ModelSizes:
    """The model of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        WanConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = WanCheckpoint(Path(folder))
    if not checkpoint.experts:
        raise WanConfigError(f"{checkpoint.path / 'model_index.json'} lists no transformer")
    return model_sizes(
        checkpoint.path.resolve().name,
        len(checkpoint.experts),
        checkpoint.transformer_config(checkpoint.experts[0]),
        checkpoint.text_encoder_config,
        checkpoint.vae_config,
    )


def model_sizes(name: str, experts: int, dit: WanConfig, text: UMT5Config, vae: VaeConfig) -> ModelSizes:
    """Wan2.2 of these configurations, in bfloat16 (the modulation's parameters in float32)."""
    return ModelSizes(
        name=name,
        experts=experts,
        layers=dit.num_layers,
        heads=dit.num_attention_heads,
        head_dim=dit.attention_head_dim,
        ffn=dit.ffn_dim,
        text_length=DEFAULT_MAX_SEQUENCE_LENGTH,
        patch=dit.patch_size,
        branches=2,
        norm_across_heads=True,
        dit=_transformer(dit),
        text_encoder=_text_encoder(text),
        vae=_vae(vae),
    )


def _transformer(config: WanConfig) -> Weights:
    dim, layers = config.hidden_size, config.num_layers

    def block(
        name: str, inputs: int, outputs: int, split: Split, rows: Rows = "tokens", multiple_of: int = 1
    ) -> Linear:
        return Linear(name, inputs, outputs, layers, split, rows, multiple_of=multiple_of)

    own, cross, embeddings = "self-attention projections", "cross-attention projections", "embeddings and output"
    linears: tuple[Linear, ...] = (
        block(own, dim, 3 * dim, "column", multiple_of=3 * config.attention_head_dim),
        block(own, dim, dim, "row"),
        block(cross, dim, dim, "column"),
        block(cross, dim, 2 * dim, "column", "text"),
        block(cross, dim, dim, "row"),
        block("feed-forward", dim, config.ffn_dim, "column"),
        block("feed-forward", config.ffn_dim, dim, "row"),
        Linear(embeddings, config.in_channels * config.patch_volume, dim, rows="all"),
        Linear(embeddings, dim, config.out_channels * config.patch_volume, rows="stream"),
        Linear(embeddings, config.freq_dim, dim, rows="step", itemsize=FLOAT32),
        Linear(embeddings, dim, dim, rows="step", itemsize=FLOAT32),
        Linear(embeddings, dim, 6 * dim, rows="step"),
        Linear(embeddings, config.text_dim, dim, rows="text"),
        Linear(embeddings, dim, dim, rows="text"),
    )
    image_vectors: tuple[Vector, ...] = ()
    if config.image_dim is not None:
        # As many rows as the text has; CLIP's 257 or 514 are near enough.
        linears += (
            block(cross, dim, 2 * dim, "column", "text"),
            Linear(embeddings, config.image_dim, config.image_dim, rows="text"),
            Linear(embeddings, config.image_dim, dim, rows="text"),
        )
        image_vectors = (
            Vector(dim, layers, split=True),  # gain of the image's keys
            Vector(2 * (config.image_dim + dim), itemsize=FLOAT32),
            Vector(config.image_dim, config.pos_embed_seq_len or 0),
        )
    vectors = (
        *image_vectors,
        Vector(dim, 4 * layers, split=True),  # gains of q and k in both attentions
        Vector(6 * dim, layers, itemsize=FLOAT32),  # modulation
        Vector(2 * dim, layers if config.cross_attn_norm else 0, itemsize=FLOAT32),
        Vector(2 * dim, itemsize=FLOAT32),  # modulation of the output
    )
    return Weights(linears, vectors)


def _text_encoder(config: UMT5Config) -> Weights:
    name, dim, inner = "text encoder", config.d_model, config.num_heads * config.d_kv
    layers, head = config.num_layers, config.d_kv

    def block(inputs: int, outputs: int, count: int, split: Split, multiple_of: int = 1) -> Linear:
        return Linear(name, inputs, outputs, count * layers, split, "text", False, multiple_of)

    return Weights(
        (
            Linear(name, dim, config.vocab_size, split="column", rows="lookup", bias=False),
            block(dim, inner, 3, "column", head),
            block(inner, dim, 1, "row", head),
            block(dim, config.d_ff, 2, "column"),
            block(config.d_ff, dim, 1, "row"),
        ),
        (
            Vector(
                config.relative_attention_num_buckets * config.num_heads,
                layers,
                split=True,
                multiple_of=config.relative_attention_num_buckets,
            ),
            Vector(dim, 2 * layers + 1),
        ),
    )


@dataclass(frozen=True)
class _Layer:
    """A layer of the decoder: its parameters, what it remembers between frames, and its place.

    Attributes:
        parameters: weights and biases.
        inputs, outputs: channels.
        remembers: whether it keeps `CACHED_FRAMES` frames of its input.
        frames: video frames that a latent frame is at its place, at most.
        area: positions that a latent position is at its place.
        held: elements that wait for a later layer, a latent position.
    """

    parameters: int
    inputs: int
    outputs: int
    remembers: bool
    frames: int
    area: int
    held: int

    @property
    def cached(self) -> int:
        return CACHED_FRAMES * self.inputs * self.area if self.remembers else 0

    @property
    def peak(self) -> int:
        """Shortcuts, input after its remembered frames, and output."""
        extended = self.frames + (CACHED_FRAMES if self.remembers else 0)
        return ((self.frames + extended) * self.inputs + self.frames * self.outputs) * self.area + self.held


def _vae(config: VaeConfig) -> VaeSizes:
    layers = list(_decoder_layers(config))
    tiling = VaeTiling()
    return VaeSizes(
        parameters=sum(layer.parameters for layer in layers),
        latent_channels=config.z_dim,
        spatial_stride=config.scale_factor_spatial,
        temporal_stride=config.scale_factor_temporal,
        cached_elements=sum(layer.cached for layer in layers),
        peak_elements=max(layer.peak for layer in layers),
        tile_pixels=tiling.tile_sample_min_height,
        tile_stride=tiling.tile_sample_stride_height,
    )


def _decoder_layers(config: VaeConfig) -> Iterator[_Layer]:
    """The layers of `NeuronAutoencoderKLWan` in the order of `NeuronWanDecoder3d.forward`."""
    frames, area, held = 1, 1, 0

    def conv(inputs: int, outputs: int, kernel: tuple[int, int, int]) -> _Layer:
        volume = kernel[0] * kernel[1] * kernel[2]
        return _Layer(outputs * (inputs * volume + 1), inputs, outputs, kernel[0] > 1, frames, area, held)

    def residual(inputs: int, outputs: int) -> Iterator[_Layer]:
        yield from (norm(inputs), conv(inputs, outputs, (3, 3, 3)), norm(outputs), conv(outputs, outputs, (3, 3, 3)))
        if inputs != outputs:
            yield conv(inputs, outputs, (1, 1, 1))

    def norm(channels: int) -> _Layer:
        return _Layer(channels, channels, channels, False, frames, area, held)

    dims, temporal = config.decoder_dims, tuple(reversed(config.temperal_downsample))
    yield conv(config.z_dim, config.z_dim, (1, 1, 1))
    yield conv(config.z_dim, dims[0], (3, 3, 3))
    yield from residual(dims[0], dims[0])
    yield from (norm(dims[0]), conv(dims[0], 3 * dims[0], (1, 1, 1)), conv(dims[0], dims[0], (1, 1, 1)))
    yield from residual(dims[0], dims[0])
    entering = dims[0]
    for index, channels in enumerate(dims[1:]):
        last = index == len(dims) - 2
        # VAE 2.2's blocks add their input at their end, where they resample.
        held = entering * frames * area if config.is_residual and not last else 0
        for pair in pairwise([entering] + [channels] * (config.num_res_blocks + 1)):
            yield from residual(*pair)
        if last:
            break
        entering = channels if config.is_residual else channels // 2
        if temporal[index]:
            yield conv(channels, 2 * channels, (3, 1, 1))
            frames *= 2
        area *= 4
        yield conv(channels, entering, (1, 3, 3))
        if config.is_residual:
            # What the block gives, and its input before and after its repetitions are in order.
            yield _Layer(0, channels, channels, False, frames, area, held)
    yield norm(dims[-1])
    yield conv(dims[-1], config.out_channels, (3, 3, 3))
