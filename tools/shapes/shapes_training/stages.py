# SPDX-License-Identifier: Apache-2.0
"""The stages, in the order in which they need each other. Each writes one file into the work folder and is skipped
where that file exists.

`vae` → `latents`; `text`; then `high`, `low` and `decoder` need those but not each other, and may run at the same time
in processes of their own; `refine-low`, the low-noise expert's second round, needs `low`;
`conditions`, then `i2v-high` and `i2v-low`, which start from the finished experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from omni_neuron_testkit import all_subjects, random_scenes, render

from .budget import Budget
from .dit import Share, TrainingSet, expert_step, make_expert, shares, widen_for_conditions
from .loop import Loop, generators, save_atomically
from .text import NOTHING, caption_variants, embed, make_text_encoder, make_tokenizer, train_text_encoder
from .vae import (
    calibrate_latents,
    clip_batch,
    decode,
    encode,
    half_precision,
    make_vae,
    optimizer_groups,
    reconstruction_loss,
)

KL_WEIGHT = 1e-3
DECODER_NOISE = 0.15  # spread of the noise that the decoder is polished under, in latents of spread 1


def result_file(work: Path, stage: str) -> Path:
    """Where a stage leaves its result."""
    return work / "results" / f"{stage}.pt"


def load_result(work: Path, stage: str, needed_by: str) -> Any:
    """A finished stage's result.

    Raises:
        SystemExit: the stage has not been run.
    """
    path = result_file(work, stage)
    if not path.exists():
        raise SystemExit(f"stage {needed_by} needs {path}; run --stage {stage} first")
    return torch.load(path, weights_only=True)


def check_budget(work: Path, budget: Budget) -> None:
    """Write the budget into a new work folder, or refuse one that was begun with another.

    Raises:
        SystemExit: sizes or step counts differ.
    """
    path, text = work / "budget.json", json.dumps(asdict(budget), indent=2) + "\n"
    if path.exists() and path.read_text() != text:
        before = json.loads(path.read_text())
        changed = [
            f"{name}: {before.get(name)} → {value}"
            for name, value in asdict(budget).items()
            if before.get(name) != value
        ]
        raise SystemExit(f"{work} was begun with another budget ({'; '.join(changed)}); use another work folder")
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def train_vae(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """Encoder and decoder: first on crops, where the shape fills more of the picture, then on whole clips."""
    torch.manual_seed(budget.seed)
    vae = make_vae(budget)
    calibrate_latents(vae, clip_batch(budget, "calibration", 0, 8, crop=False))

    def step(index: int) -> dict[str, torch.Tensor]:
        crop = index < budget.vae_crop_steps
        clips = clip_batch(budget, "vae", index, budget.vae_crop_batch if crop else budget.vae_batch, crop=crop)
        _, generator = generators(budget.seed, "vae", index)
        with half_precision():
            mean, log_variance = (moment.float() for moment in encode(vae, clips))
            noise = torch.randn(mean.shape, generator=generator)
            decoded = decode(vae, mean + noise * (0.5 * log_variance).exp()).float()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        error = reconstruction_loss(decoded, clips)
        return {"loss": error + KL_WEIGHT * divergence, "error": error, "mse": (decoded - clips).square().mean()}

    optimizer = torch.optim.AdamW(optimizer_groups(vae, budget.vae_rate), betas=(0.9, 0.99), weight_decay=0.0)
    steps = budget.vae_crop_steps + budget.vae_steps
    Loop(work, "vae", steps, vae, optimizer, decay=0.995, warmup=60).run(step)
    return vae.state_dict()


def encode_latents(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """Normalised latents of the training set, with the mean and spread that they were normalised by."""
    vae = _vae(budget, load_result(work, "vae", "latents"))
    latents = torch.cat([_encode_means(vae, clips) for clips in _training_clips(budget)])
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    subjects = torch.arange(len(all_subjects())).repeat_interleave(budget.copies)
    return {"mean": mean, "std": std, "latents": _normalised(latents, mean, std), "subjects": subjects}


def encode_conditions(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """Image-to-video conditions: normalised latents of each training clip's first frame followed by grey."""
    vae = _vae(budget, load_result(work, "vae", "conditions"))
    encoded = load_result(work, "latents", "conditions")
    conditions = []
    for clips in _training_clips(budget):
        clips[:, :, 1:] = 0
        conditions.append(_encode_means(vae, clips))
    return {"conditions": _normalised(torch.cat(conditions), encoded["mean"], encoded["std"])}


def _training_clips(budget: Budget) -> Iterator[torch.Tensor]:
    """For each subject its clips, `[copies, 3, T, H, W]` in [−1, 1]."""
    size = {"frames": budget.frames, "height": budget.height, "width": budget.width}
    for number, subject in enumerate(all_subjects()):
        scenes = random_scenes(budget.seed * 1000 + number, **size)
        clips = [torch.from_numpy(render(subject, next(scenes), **size)) for _ in range(budget.copies)]
        yield torch.stack(clips).permute(0, 4, 1, 2, 3) * 2 - 1


@torch.no_grad()
def _encode_means(vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
    # A few at a time: a single clip would take torch's slow convolution for few channels.
    return torch.cat([encode(vae, part)[0] for part in clips.split(4)])


def _normalised(latents: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)


def train_text(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """The text encoder."""
    return train_text_encoder(budget, work).state_dict()


def train_decoder(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """Polish the decoder on latents with noise, such as an expert leaves, with the encoder frozen."""
    vae = _vae(budget, load_result(work, "vae", "decoder"))
    encoded = load_result(work, "latents", "decoder")
    spread = encoded["std"].view(-1, 1, 1, 1)
    for parameter in [*vae.encoder.parameters(), *vae.quant_conv.parameters()]:
        parameter.requires_grad_(False)
    trained = torch.nn.ModuleList([vae.post_quant_conv, vae.decoder])

    def step(index: int) -> dict[str, torch.Tensor]:
        clips = clip_batch(budget, "decoder", index, budget.decoder_batch, crop=False)
        _, generator = generators(budget.seed, "decoder", index)
        with torch.no_grad(), half_precision():
            mean = encode(vae, clips)[0].float()
        # A clip without noise now and then keeps what an exact latent decodes to.
        amount = DECODER_NOISE * torch.rand(len(clips), 1, 1, 1, 1, generator=generator)
        with half_precision():
            decoded = decode(vae, mean + amount * spread * torch.randn(mean.shape, generator=generator)).float()
        error = reconstruction_loss(decoded, clips)
        return {"loss": error, "mse": (decoded - clips).square().mean()}

    optimizer = torch.optim.AdamW(optimizer_groups(trained, 0.4 * budget.vae_rate), betas=(0.9, 0.99), weight_decay=0.0)
    Loop(work, "decoder", budget.decoder_steps, trained, optimizer, decay=0.99, warmup=30).run(step)
    return vae.state_dict()


def train_expert(budget: Budget, work: Path, share: Share) -> dict[str, torch.Tensor]:
    """One text-to-video expert, from its own initial weights."""
    torch.manual_seed(budget.seed + 1 + (share.stage == "low"))
    expert = make_expert(budget)
    steps = budget.high_steps if share.stage == "high" else budget.low_steps
    return _train_expert(budget, work, expert, share, share.stage, steps, budget.expert_rate)


def refine_low_expert(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """The low-noise expert's second round, under guidance (`expert_step`); the result is the mean of both rounds.

    The first round alone leaves wobbling paths and outlines; the second alone takes some squares for circles, because
    just below the boundary the caption still decides. The mean of their weights has the better of both.
    """
    first = load_result(work, "low", "refine-low")
    expert = make_expert(budget)
    expert.load_state_dict(first)
    second = _train_expert(budget, work, expert, _LOW, "refine-low", budget.refine_low_steps, budget.refine_rate)
    return {name: (first[name] + second[name]) / 2 for name in first}


def polish_low_expert(budget: Budget, work: Path) -> dict[str, torch.Tensor]:
    """The low-noise expert's third round: under guidance again, from the mean of the first two, at a lower rate."""
    expert = make_expert(budget)
    expert.load_state_dict(load_result(work, "refine-low", "polish-low"))
    return _train_expert(budget, work, expert, _LOW, "polish-low", budget.polish_low_steps, budget.polish_rate)


def train_i2v_expert(budget: Budget, work: Path, share: Share) -> dict[str, torch.Tensor]:
    """One image-to-video expert, from the text-to-video expert of the same share."""
    stage = f"i2v-{share.stage}"
    base = make_expert(budget)
    base.load_state_dict(load_result(work, T2V_EXPERTS[share.stage], stage))
    expert = widen_for_conditions(base, budget)
    steps = budget.i2v_high_steps if share.stage == "high" else budget.i2v_low_steps
    return _train_expert(budget, work, expert, share, stage, steps, budget.i2v_rate)


def _train_expert(
    budget: Budget, work: Path, expert: WanTransformer3DModel, share: Share, stage: str, steps: int, rate: float
) -> dict[str, torch.Tensor]:
    data = training_set(budget, work, stage)
    optimizer = torch.optim.AdamW(expert.parameters(), lr=rate, betas=(0.9, 0.97), weight_decay=0.0)
    loop = Loop(work, stage, steps, expert, optimizer, decay=0.998)
    guided = stage in ("refine-low", "polish-low", "i2v-low")
    loop.run(expert_step(expert, data, share, budget, stage, guided=guided))
    return expert.state_dict()


def training_set(budget: Budget, work: Path, stage: str) -> TrainingSet:
    """What an expert's stage is trained on, from `latents`, `text` and, for image-to-video, `conditions`."""
    encoded = load_result(work, "latents", stage)
    encoder = text_encoder(budget, load_result(work, "text", stage))
    tokenizer = make_tokenizer()
    variants = [caption_variants(subject) for subject in all_subjects()]
    with torch.no_grad():
        embeddings = embed(encoder, tokenizer, [text for texts in variants for text in texts] + list(NOTHING))
    captions, nothing = embeddings[: -len(NOTHING)], embeddings[-len(NOTHING) :]
    return TrainingSet(
        latents=encoded["latents"],
        subjects=encoded["subjects"],
        captions=captions.unflatten(0, (len(variants), -1)),
        nothing=nothing,
        conditions=load_result(work, "conditions", stage)["conditions"] if stage.startswith("i2v-") else None,
    )


def text_encoder(budget: Budget, state: dict[str, torch.Tensor]) -> UMT5EncoderModel:
    """The text encoder with these weights, frozen."""
    encoder = make_text_encoder(budget)
    encoder.load_state_dict(state)
    return encoder.requires_grad_(False)


def _vae(budget: Budget, state: dict[str, torch.Tensor]) -> AutoencoderKLWan:
    vae = make_vae(budget)
    vae.load_state_dict(state)
    return vae


_HIGH, _LOW = shares()

T2V_EXPERTS = {"high": "high", "low": "polish-low"}
"""The stage whose result is the text-to-video expert of a share."""

STAGES: dict[str, Callable[[Budget, Path], dict[str, torch.Tensor]]] = {
    "vae": train_vae,
    "latents": encode_latents,
    "text": train_text,
    "high": lambda budget, work: train_expert(budget, work, _HIGH),
    "low": lambda budget, work: train_expert(budget, work, _LOW),
    "refine-low": refine_low_expert,
    "polish-low": polish_low_expert,
    "decoder": train_decoder,
    "conditions": encode_conditions,
    "i2v-high": lambda budget, work: train_i2v_expert(budget, work, _HIGH),
    "i2v-low": lambda budget, work: train_i2v_expert(budget, work, _LOW),
}

TEXT_TO_VIDEO = ("vae", "latents", "text", "high", "low", "refine-low", "polish-low", "decoder")
IMAGE_TO_VIDEO = ("conditions", "i2v-high", "i2v-low")


def run_stage(stage: str, budget: Budget, work: Path) -> None:
    """Run one stage unless its result is there, and write the result."""
    path = result_file(work, stage)
    if path.exists():
        print(f"{stage}: already done", flush=True)
        return
    save_atomically(STAGES[stage](budget, work), path)


def fingerprint(work: Path) -> str:
    """SHA-256 over every finished stage's weights, to compare two runs of the program."""
    digest = hashlib.sha256()
    for stage in STAGES:
        if result_file(work, stage).exists():
            for name, tensor in sorted(torch.load(result_file(work, stage), weights_only=True).items()):
                digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
