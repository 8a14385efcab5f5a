# SPDX-License-Identifier: Apache-2.0
"""Image-to-video and TI2V-5B against diffusers: forwards, conditions, whole trajectories, on one rank and on two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import image_reference
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from diffusers import WanTransformer3DModel as DiffusersTransformer
from image_reference import SETTINGS, make_image, make_pipeline, media, on_topology
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from wan22_reference import relative_l2

from omni_neuron_parallel import RankPool, Topology
from omni_neuron_runtime import COUNTERS
from omni_neuron_wan22 import NeuronWanI2VPipeline, TinyWan, make_tiny_checkpoint
from omni_neuron_wan22.conditioning import given_frames_mask

SIZES = {
    "i2v": TinyWan(task="i2v", vae_base_dim=8),
    # Wan2.1's first-and-last-frame model, in the layout of two experts.
    "i2v-clip": TinyWan(task="i2v", vae_base_dim=8, image_dim=32, last_image=True),
    "ti2v": TinyWan(task="ti2v", vae_base_dim=8),
}
Checkpoints = Callable[[str], Path]
Latents = Callable[[str, int], torch.Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("images")
    return functools.cache(lambda name: make_tiny_checkpoint(folder / name, SIZES[name]))


@pytest.fixture(scope="module")
def diffusers_latents(checkpoints: Checkpoints) -> Latents:
    """Final latents by checkpoint and number of images."""

    @functools.cache
    def of(name: str, images: int) -> torch.Tensor:
        with torch.no_grad():
            return image_reference.run_diffusers(checkpoints(name), images)

    return of


@pytest.mark.parametrize(("name", "images"), [("i2v", 1), ("i2v-clip", 2), ("ti2v", 0), ("ti2v", 1)], ids=str)
def test_trajectory(checkpoints: Checkpoints, diffusers_latents: Latents, name: str, images: int) -> None:
    latents, _ = image_reference.run_trajectory(str(checkpoints(name)), images, {})
    assert relative_l2(latents, diffusers_latents(name, images)) <= 1e-3


@pytest.mark.parametrize(
    ("name", "images", "topology", "config"),
    [
        ("ti2v", 1, Topology(tp=2), {"additional_config": {"tp_sequence_parallel": True}}),
        ("ti2v", 1, Topology(cp=2, vae_patch=2), {}),
        ("ti2v", 1, Topology(cfg=2), {}),
        ("i2v", 2, Topology(cp=2, vae_patch=2), {}),
    ],
    ids=["ti2v-tp2-sp", "ti2v-cp2-vae2", "ti2v-cfg2", "i2v-cp2-vae2"],
)
def test_trajectory_on_two_ranks(
    checkpoints: Checkpoints,
    diffusers_latents: Latents,
    two_ranks: RankPool,
    name: str,
    images: int,
    topology: Topology,
    config: dict,
) -> None:
    arguments = (str(checkpoints(name)), images, config)
    results = on_topology(two_ranks, topology, image_reference.run_trajectory, *arguments)
    alone, digest = image_reference.run_trajectory(*arguments[:2], {})
    for latents, condition in results:
        assert relative_l2(latents, diffusers_latents(name, images)) <= 1e-3
        assert relative_l2(latents, alone) <= 1e-4
        assert torch.equal(latents, results[0][0])
        # Encoded once: the same bits on every rank, and with one tile the same as on one rank.
        assert condition == results[0][1]
        assert condition == digest


@pytest.mark.parametrize(
    ("topology", "sequence_parallel"),
    [(Topology(), False), (Topology(tp=2), True), (Topology(cp=2), False)],
    ids=["tp1", "tp2-sp", "cp2"],
)
def test_first_frame_with_a_timestep_of_its_own(
    checkpoints: Checkpoints, two_ranks: RankPool, topology: Topology, sequence_parallel: bool
) -> None:
    """diffusers has a timestep for every token. 3 frames of 3 × 5 tokens: 15 are the first's, a rank has 23 or 22."""
    path, shape = str(checkpoints("ti2v")), (1, 48, 3, 6, 10)
    reference = DiffusersTransformer.from_pretrained(Path(path) / "transformer")
    latents, text = image_reference.first_frame_inputs(shape, reference.config.text_dim)
    timesteps = torch.full((1, 45), 700.0)
    timesteps[:, :15] = 0
    expected = reference(latents, timesteps, text, return_dict=False)[0]
    function = image_reference.forward_with_first_frame
    for actual in on_topology(two_ranks, topology, function, path, shape, sequence_parallel):
        assert relative_l2(actual, expected) <= 1e-5


def test_first_frame_traces_into_one_graph_for_all_ranks(checkpoints: Checkpoints, two_ranks: RankPool) -> None:
    """The first rank holds all of the first frame's tokens; the graph knows nothing of that."""
    arguments = (str(checkpoints("ti2v")), (1, 48, 3, 6, 10))
    results = on_topology(two_ranks, Topology(cp=2), image_reference.traced_with_first_frame, *arguments)
    assert [same for same, _ in results] == [True, True]
    assert len(results[0][1]) == 1
    assert results[0][1] == results[1][1]


@torch.inference_mode()
def test_what_compiles_with_an_image(checkpoints: Checkpoints) -> None:
    torch._dynamo.reset()
    pipeline = make_pipeline(str(checkpoints("ti2v")))
    pipeline.compile(backend="neuron_check")
    settings = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}

    def graphs_of(images: dict) -> int:
        before = COUNTERS.graphs
        request = OmniDiffusionRequest(
            prompt={"prompt": "a cat", "multi_modal_data": images},
            sampling_params=OmniDiffusionSamplingParams(seed=1, **settings),
            request_id="test",
        )
        pipeline(DiffusionRequestBatch(requests=[request]))
        return COUNTERS.graphs - before

    # Text encoder, its projection, the DiT, the decoder's first and later chunks, the encoder's first chunk.
    assert graphs_of({"image": make_image(0)}) == 6
    assert graphs_of({"image": make_image(1)}) == 0
    assert graphs_of({}) == 1  # the DiT whose frames have one timestep


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2)], ids=["tp1", "tp2"])
def test_forward_with_image_embeddings(checkpoints: Checkpoints, two_ranks: RankPool, topology: Topology) -> None:
    path = checkpoints("i2v-clip")
    reference = DiffusersTransformer.from_pretrained(path / "transformer_2")
    expected = reference(**image_reference.image_embeds_inputs(reference.config), return_dict=False)[0]
    arguments = (image_reference.forward_with_image_embeds, str(path), "transformer_2")
    for actual in on_topology(two_ranks, topology, *arguments):
        assert relative_l2(actual, expected) <= 1e-5


@pytest.mark.parametrize("images", [1, 2])
def test_condition_is_that_of_diffusers(checkpoints: Checkpoints, images: int) -> None:
    """Mask and latents; the second image changes the last latent frame, and the mask's ones are where frames are."""
    path = checkpoints("i2v")
    theirs = WanImageToVideoPipeline.from_pretrained(path)
    pixels = [theirs.video_processor.preprocess(image) for image in media(images).values()]
    size = {"height": SETTINGS["height"], "width": SETTINGS["width"], "num_frames": SETTINGS["num_frames"]}
    options = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator()}
    _, expected = theirs.prepare_latents(pixels[0], 1, **size, **options, last_image=[None, *pixels[1:]][images - 1])
    pipeline = make_pipeline(str(path))
    prompt = {"prompt": "a cat", "multi_modal_data": media(images)}
    actual = pipeline.encode_images(prompt, pipeline.resolve(prompt, OmniDiffusionSamplingParams(**size))).latents
    assert actual.shape == expected.shape == (1, 20, 3, 8, 12)
    assert torch.equal(actual[:, :4], expected[:, :4])
    assert relative_l2(actual[:, 4:], expected[:, 4:]) <= 1e-4
    ones = actual[0, :4, :, 0, 0].t().flatten().nonzero().flatten().tolist()
    assert ones == [0, 1, 2, 3] + ([11] if images == 2 else [])


def test_mask_of_one_frame() -> None:
    assert torch.equal(given_frames_mask(1, False, 4, (2, 3)), torch.ones(1, 4, 1, 2, 3))


def run_request(path: Path, multi_modal_data: dict, **settings: object) -> dict:
    """The report of a request that goes through the pipeline without having been looked at in the engine's process."""
    pipeline = make_pipeline(str(path))
    request = OmniDiffusionRequest(
        prompt={"prompt": "a cat", "multi_modal_data": multi_modal_data},
        sampling_params=OmniDiffusionSamplingParams(num_inference_steps=2, seed=1, **settings),
        request_id="test",
    )
    output = pipeline(DiffusionRequestBatch(requests=[request])).output
    assert output["payload"]["video"].shape[2:] == (5, settings["height"], settings["width"])
    return output["metadata"]["generation"]


def test_a_warm_up_brings_an_image_and_none_of_the_engines_preparation(checkpoints: Checkpoints) -> None:
    from vllm_omni_neuron.compilation import warmup_requests

    [warm_up] = warmup_requests(["32x64x5"], NeuronWanI2VPipeline)
    assert warm_up.prompt["multi_modal_data"]["image"].size == (64, 32)
    report = run_request(checkpoints("i2v"), warm_up.prompt["multi_modal_data"], height=32, width=64, num_frames=5)
    assert report["steps_per_expert"]["transformer"] > 0


def test_an_image_of_another_size_is_fitted_and_that_is_reported(checkpoints: Checkpoints) -> None:
    settings = {"height": 32, "width": 64, "num_frames": 5, "extra_args": {"image_policy": "crop"}}
    report = run_request(checkpoints("ti2v"), {"image": make_image(0, 64, 64)}, **settings)
    assert report["image"] == {"size": [64, 64], "policy": "crop", "aspect_error": 0.5}
    assert set(report["seconds"]) >= {"text", "image", "denoise", "vae"}
    assert report["sources"]["image_policy"] == "request"
