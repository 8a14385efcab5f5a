# SPDX-License-Identifier: Apache-2.0
"""The training program on a toy budget: every stage runs, resumes exactly, and diffusers loads what it writes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image

from omni_neuron_testkit import all_subjects
from shapes_training import loop
from shapes_training.assemble import write_checkpoint
from shapes_training.budget import BOUNDARY_RATIO, FULL, MAX_TEXT_LENGTH, TOY
from shapes_training.dit import (
    TrainingSet,
    compress_padding,
    expert_step,
    make_expert,
    shares,
    shifted,
    widen_for_conditions,
)
from shapes_training.plots import plot_losses
from shapes_training.stages import (
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    check_budget,
    fingerprint,
    load_result,
    result_file,
    run_stage,
)
from shapes_training.text import caption_variants, embed, make_text_encoder, make_tokenizer
from shapes_training.vae import clip_batch, decode, encode, make_vae, optimizer_groups


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder in which every stage has run."""
    work = tmp_path_factory.mktemp("work")
    check_budget(work, TOY)
    for stage in (*TEXT_TO_VIDEO, *IMAGE_TO_VIDEO):
        run_stage(stage, TOY, work)
    return work


@torch.no_grad()
def shake(module: torch.nn.Module) -> None:
    """Leave no tensor at zero or one, where a fault could hide."""
    for parameter in module.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))


def test_whole_clip_vae_equals_diffusers():
    torch.manual_seed(3)
    vae = make_vae(TOY)
    clips = torch.rand(2, 3, 17, 16, 24) * 2 - 1
    with torch.no_grad():
        shake(vae)
        vae.decoder.conv_out.weight.mul_(0.2)
        mean, log_variance = encode(vae, clips)
        theirs = vae.encode(clips).latent_dist
        torch.testing.assert_close(mean, theirs.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(log_variance, theirs.logvar, rtol=1e-4, atol=1e-5)
        decoded = decode(vae, mean)
        assert decoded.abs().max() < 1  # else diffusers' clamp would hide a difference
        torch.testing.assert_close(decoded, vae.decode(mean).sample, rtol=1e-4, atol=1e-5)


def test_fast_norm_equals_diffusers():
    torch.manual_seed(4)
    fast = make_vae(TOY)
    shake(fast)
    plain = type(fast).from_config(fast.config)
    plain.load_state_dict(fast.state_dict())
    clips = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(
            fast.encode(clips).latent_dist.mean, plain.encode(clips).latent_dist.mean, rtol=1e-4, atol=1e-5
        )


def test_compressed_padding_equals_the_whole_length():
    torch.manual_seed(5)
    expert = make_expert(TOY)
    plain = WanTransformer3DModel.from_config(expert.config)
    plain.load_state_dict(expert.state_dict())
    text = torch.randn(2, 7, TOY.text_dim)
    text[1, 4:] = 0  # a shorter prompt
    latents, timesteps = torch.randn(2, TOY.z_dim, 2, 4, 4), torch.tensor([900, 300])
    prepare = compress_padding(expert)
    with torch.no_grad():
        [ours] = expert(latents, timesteps, prepare(text), return_dict=False)
        padded = torch.nn.functional.pad(text, (0, 0, 0, MAX_TEXT_LENGTH - 7))
        [theirs] = plain(latents, timesteps, padded, return_dict=False)
        [without] = plain(latents, timesteps, text, return_dict=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (without - theirs).abs().max() > 1e-3  # padding does matter


def test_a_fresh_expert_reads_words_rather_than_padding():
    torch.manual_seed(6)
    expert = make_expert(FULL)
    embedder, attention = expert.condition_embedder.text_embedder, expert.blocks[0].attn2
    words = embedder(torch.randn(1, 10, FULL.text_dim))
    padding = embedder(torch.zeros(1, 1, FULL.text_dim))
    with torch.no_grad():
        query = attention.norm_q(attention.to_q(torch.randn(1, 80, words.shape[-1])))
        keys = attention.norm_k(attention.to_k(torch.cat([words, padding], dim=1)))
        logits = (
            torch.einsum("bqhd,bkhd->bhqk", query.unflatten(2, (FULL.heads, -1)), keys.unflatten(2, (FULL.heads, -1)))
            / FULL.head_dim**0.5
        )
        logits[..., -1] += torch.log(torch.tensor(502.0))
        share = logits.softmax(-1)[..., -1].mean()
    assert share < 0.4


def test_shares_meet_at_the_boundary():
    high, low = shares()
    assert high.low == low.high
    assert shifted(torch.tensor(high.low)).item() == pytest.approx(BOUNDARY_RATIO)
    assert shifted(torch.tensor(1.0)).item() == 1.0


def test_image_to_video_expert_starts_as_the_text_to_video_one():
    torch.manual_seed(7)
    expert = make_expert(TOY)
    wide = widen_for_conditions(expert, TOY)
    latents, condition = torch.randn(1, TOY.z_dim, 2, 4, 4), torch.randn(1, 4 + TOY.z_dim, 2, 4, 4)
    timestep, text = torch.tensor([500]), torch.randn(1, 6, TOY.text_dim)
    with torch.no_grad():
        [narrow_out] = expert(latents, timestep, text, return_dict=False)
        [wide_out] = wide(torch.cat([latents, condition], dim=1), timestep, text, return_dict=False)
    torch.testing.assert_close(narrow_out, wide_out)


def test_guided_step_trains_both_branches_and_their_mix():
    torch.manual_seed(9)
    _, low = shares()
    data = TrainingSet(
        latents=torch.randn(3, TOY.z_dim, 2, 2, 2),
        subjects=torch.arange(3),
        captions=torch.randn(3, 1, 6, TOY.text_dim),
        nothing=torch.randn(1, 6, TOY.text_dim),
        conditions=None,
    )
    expert = make_expert(TOY)
    losses = expert_step(expert, data, low, TOY, "x", guided=True)(0)
    assert losses["conditional"] != losses["guided"]
    # Where the caption says nothing, there is nothing for guidance to change.
    same = dataclasses.replace(data, captions=data.nothing.expand(3, 1, -1, -1))
    losses = expert_step(expert, same, low, TOY, "x", guided=True)(0)
    torch.testing.assert_close(losses["conditional"], losses["guided"])
    torch.testing.assert_close(losses["loss"], losses["guided"])


def test_tokenizer_has_a_piece_for_every_word():
    tokenizer = make_tokenizer()
    for subject in all_subjects()[::7]:
        for caption in caption_variants(subject):
            ids = tokenizer(caption).input_ids
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= len(caption.split()) + 3, tokenizer.convert_ids_to_tokens(ids)  # punctuation, end


def test_embeddings_do_not_depend_on_the_batch():
    torch.manual_seed(8)
    encoder, tokenizer = make_text_encoder(TOY), make_tokenizer()
    short, long = "red circle moving up", "a blue square slides down on a dark background"
    with torch.no_grad():
        together = embed(encoder, tokenizer, [short, long])
        alone = embed(encoder, tokenizer, [short])
    torch.testing.assert_close(together[:1, : alone.shape[1]], alone)
    assert not together[0, alone.shape[1] :].any()


def test_crops_and_clips_have_their_sizes():
    assert clip_batch(TOY, "x", 0, 2, crop=False).shape == (2, 3, 5, 16, 16)
    assert clip_batch(TOY, "x", 0, 2, crop=True).shape == (2, 3, 5, 8, 8)


def test_every_parameter_is_trained_once():
    vae = make_vae(TOY)
    grouped = [parameter for group in optimizer_groups(vae, 0.04) for parameter in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(vae.parameters()))


def test_a_stopped_stage_resumes_exactly(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1.0)  # save after every step
    check_budget(tmp_path, TOY)
    for stage in ("latents", "text"):
        loop.save_atomically(load_result(trained, stage, "test"), result_file(tmp_path, stage))
    save, saves = loop.save_atomically, []

    def stop_after_two(value: object, path: Path) -> None:
        save(value, path)
        saves.append(path)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_atomically", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_stage("high", TOY, tmp_path)
    monkeypatch.setattr(loop, "save_atomically", save)
    run_stage("high", TOY, tmp_path)
    [resumed, straight] = [load_result(work, "high", "test") for work in (tmp_path, trained)]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_the_second_round_is_averaged_with_the_first(trained):
    first, result = load_result(trained, "low", "test"), load_result(trained, "refine-low", "test")
    second = torch.load(trained / "state" / "refine-low.pt", weights_only=True)["average"]
    assert any(not torch.equal(first[name], second[name]) for name in second)
    for name in second:
        torch.testing.assert_close(result[name], (first[name] + second[name]) / 2)


def test_equal_seeds_train_equal_weights(trained, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    for stage in TEXT_TO_VIDEO:
        run_stage(stage, TOY, again)
    run_stage("text", dataclasses.replace(TOY, seed=1), other)
    for stage in TEXT_TO_VIDEO:
        ours, theirs = load_result(trained, stage, "test"), load_result(again, stage, "test")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), stage
    assert fingerprint(other) != fingerprint(again)


def test_a_work_folder_keeps_its_budget(trained):
    check_budget(trained, TOY)
    with pytest.raises(SystemExit, match="high_steps: 4 → 5"):
        check_budget(trained, dataclasses.replace(TOY, high_steps=5))


def test_a_stage_says_what_it_needs(tmp_path):
    with pytest.raises(SystemExit, match=r"stage high needs .*latents\.pt; run --stage latents first"):
        run_stage("high", TOY, tmp_path)


@pytest.mark.parametrize("image_to_video", [False, True])
def test_diffusers_loads_and_runs_the_checkpoint(trained, tmp_path, image_to_video):
    write_checkpoint(TOY, trained, tmp_path, image_to_video=image_to_video)
    pipeline = (WanImageToVideoPipeline if image_to_video else WanPipeline).from_pretrained(
        tmp_path, torch_dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    image = {"image": Image.new("RGB", (16, 16), "red")} if image_to_video else {}
    [video] = pipeline(
        prompt="a red circle moving right",
        negative_prompt="",
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        **image,
    ).frames
    assert video.shape == (5, 16, 16, 3)
    assert pipeline.config.boundary_ratio == BOUNDARY_RATIO
    encoded = load_result(trained, "latents", "test")
    assert pipeline.vae.config.latents_mean == pytest.approx(encoded["mean"].tolist())
    assert encoded["latents"].std() == pytest.approx(1.0, abs=0.05)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer_2"] == ["diffusers", "WanTransformer3DModel"]


def test_full_sizes_divide_over_ranks():
    tokens = ((FULL.frames - 1) // 4 + 1) * (FULL.height // 16) * (FULL.width // 16)
    for ranks in (2, 4):
        assert FULL.heads % ranks == 0 and FULL.ffn_dim % ranks == 0 and tokens % ranks == 0


def test_losses_are_plotted(trained):
    plot_losses(trained)
    drawing = (trained / "losses.svg").read_text()
    titles = re.findall(r">([\w-]+): loss \d+\.\d+ after (\d+) steps<", drawing)
    logs = {path.stem: len(path.read_text().splitlines()) - 1 for path in (trained / "logs").glob("*.csv")}
    assert {stage: int(steps) for stage, steps in titles} == logs
    assert {"vae", "high", "low"} <= logs.keys()  # not every stage has a loss
