# SPDX-License-Identifier: Apache-2.0
"""Run by test_wan22_engine.py: engines of several layouts, one after the other in one process (vLLM imports slowly).

For each it writes a report, latents and frames into a folder of the layout's name, and to stdout `ENGINE_STARTS` and
the name, so that the log can be told apart. Then it tries engines that must not start, and at last runs the Python
examples of docs/features.md, which start their own.

usage: wan22_engine_run.py MODEL OUTPUT_FOLDER LAYOUTS_JSON REFUSALS_JSON, layouts being {name: settings of the engine},
among them "image_to_video": PATH for an image-to-video checkpoint instead of MODEL; refusals {name: [model, settings]}
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guide_blocks import run_python
from PIL import Image
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from vllm_omni_neuron.video import encode_mp4, fps_from_output, frames_from_output

PROMPT = {"prompt": "A red circle moving right.", "negative_prompt": "blurry"}
# Wider than a VAE tile of 256, so that tiles have something to share.
WIDE = {"width": 320, "num_frames": 5}
ENGINE_STARTS = "=== engine"


def parameters(**changes: Any) -> OmniDiffusionSamplingParams:
    settings: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "seed": 11}
    return OmniDiffusionSamplingParams(**{**settings, "guidance_scale": 4.0, **changes})


def main() -> None:
    model, folder, layouts = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for name, settings in layouts.items():
        print(ENGINE_STARTS, name, flush=True)
        (folder / name).mkdir()
        image_to_video = settings.pop("image_to_video", None)
        omni = Omni(model=image_to_video or model, dtype="float32", **settings)

        def generate(omni: Omni = omni, prompt: Any = PROMPT, **changes: Any) -> Any:
            [output] = omni.generate(prompt, parameters(**changes), use_tqdm=False)
            return output

        # One rank and two are looked at from every side, the other layouts compared with them.
        run = run_tensor_parallel if set(settings) <= {"tensor_parallel_size"} else run_layout
        run = run if image_to_video is None else run_image_to_video
        report = run(generate, folder / name)
        omni.close()
        (folder / name / "report.json").write_text(json.dumps(report))
    print(ENGINE_STARTS, "refusals", flush=True)
    (folder / "refusals.json").write_text(json.dumps(refusals(json.loads(sys.argv[4]))))
    print(ENGINE_STARTS, "guide", flush=True)
    (folder / "guide.json").write_text(json.dumps(run_python(folder)))


def refusals(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The error of each engine, and how many processes it has started by then. There are three devices."""
    os.environ["NEURON_VISIBLE_DEVICES"] = "0,1,2"
    report = {}
    for name, (model, settings) in cases.items():
        error = _error_of(lambda: Omni(model=model, dtype="float32", **settings).close())  # noqa: B023
        report[name] = {"error": error, "processes": len(multiprocessing.active_children())}
    del os.environ["NEURON_VISIBLE_DEVICES"]  # which the caller has not set
    return report


def run_tensor_parallel(generate: Any, folder: Path) -> dict[str, Any]:
    first = generate()
    frames = np.asarray(first.images[0])
    np.save(folder / "frames.npy", frames)
    (folder / "video.mp4").write_bytes(encode_mp4(frames_from_output(first), fps_from_output(first, None)))
    workers = len(multiprocessing.active_children())
    report: dict[str, Any] = {
        "generation": first.multimodal_output["metadata"]["generation"],
        "workers": workers,
        "same_seed_is_bit_equal": np.array_equal(frames, np.asarray(generate().images[0])),
    }
    if workers > 2:
        return {**report, "kill": _kill_rank_1(generate)}
    report |= {
        "other_seed_differs": not np.array_equal(frames, np.asarray(generate(seed=12).images[0])),
        # The state of the caller's generator travels to the workers; a copy of its seed would give other noise.
        "generator_continues": _generator_continues(generate),
        "videos": _videos(generate),
        "rounded": list(np.asarray(generate(height=70, width=100, num_frames=6).images[0]).shape),
        "euler": generate(extra_args={"sample_solver": "euler", "flow_shift": 12.0}).multimodal_output["metadata"],
    }
    latents = generate(output_type="latent").images[0]
    report["latents"] = [list(latents.shape), str(latents.dtype)]
    np.save(folder / "latents.npy", np.asarray(latents))
    if workers:
        report["kill"] = _kill_rank_1(generate)
    else:
        np.save(folder / "wide.npy", np.asarray(generate(**WIDE).images[0]))
        report["bad_request"] = _error_of(lambda: generate(extra_args={"sample_solver": "ddim"}))
    return report


def run_layout(generate: Any, folder: Path) -> dict[str, Any]:
    np.save(folder / "latents.npy", np.asarray(generate(output_type="latent").images[0]))
    # Twice: weights that left the device during the first decoding must be the same ones in the second request.
    wide = [generate(**WIDE) for _ in range(2)]
    frames = [np.asarray(output.images[0]) for output in wide]
    np.save(folder / "wide.npy", frames[0])
    return {
        "generation": wide[0].multimodal_output["metadata"]["generation"],
        "same_seed_is_bit_equal": np.array_equal(*frames),
        "unguided": list(np.asarray(generate(guidance_scale=1.0).images[0]).shape),
    }


def run_image_to_video(generate: Any, folder: Path) -> dict[str, Any]:
    """A first frame from a file and a last one from memory; then what comes of a request without an image."""
    file, last = folder / "first.png", _gradient(1)
    _gradient(0).save(file)
    last.save(folder / "last.png")
    prompt = {**PROMPT, "multi_modal_data": {"image": str(file), "last_image": last}}
    output = generate(prompt=prompt)
    np.save(folder / "frames.npy", np.asarray(output.images[0]))
    without = {**prompt, "multi_modal_data": {"image": str(file)}}
    return {
        "generation": output.multimodal_output["metadata"]["generation"],
        "last_frame_matters": not np.array_equal(output.images[0], generate(prompt=without).images[0]),
        # The last one: vLLM-Omni closes the engine after an error.
        "no_image": _error_of(generate),
    }


def _gradient(seed: int) -> Image.Image:
    """An image of 96×64 pixels, the requests' size."""
    values = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((96, 64), Image.Resampling.BICUBIC)


def _generator_continues(generate: Any) -> bool:
    fresh, used = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    torch.randn(7, generator=used)
    noise = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(5))
    by_latents = np.asarray(generate(latents=noise).images[0])
    by_fresh, by_used = (np.asarray(generate(generator=g).images[0]) for g in (fresh, used))
    return np.array_equal(by_latents, by_fresh) and not np.array_equal(by_fresh, by_used)


def _videos(generate: Any) -> dict[str, Any]:
    """Two videos of one request against the same two alone; and with generators, one for both or one for each."""
    small = {"num_inference_steps": 2, "num_frames": 5}
    both = generate(num_outputs_per_prompt=2, **small)
    alone = [np.asarray(generate(seed=seed, **small).images[0]) for seed in (11, 12)]
    report = both.multimodal_output["metadata"]["generation"]

    def pair(generator: Any) -> np.ndarray:
        return np.asarray(generate(generator=generator, num_outputs_per_prompt=2, **small).images[0])

    seeded = [torch.Generator().manual_seed(seed) for seed in (11, 12)]
    goes_on = pair(torch.Generator().manual_seed(11))
    return {
        "bit_equal": np.array_equal(np.asarray(both.images[0]), np.concatenate(alone)),
        "report": {name: report[name] for name in ("num_outputs_per_prompt", "seed", "seeds", "steps_per_expert")},
        "generators": np.array_equal(pair(seeded), np.concatenate(alone)),
        "generator_goes_on": np.array_equal(goes_on[0], alone[0][0]) and not np.array_equal(goes_on[1], alone[1][0]),
    }


def _error_of(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    return ""


def _kill_rank_1(generate: Any) -> dict[str, Any]:
    workers = {process.name: process.pid for process in multiprocessing.active_children()}
    killed_at = []

    def kill() -> None:
        time.sleep(2)
        killed_at.append(time.monotonic())
        os.kill(workers["DiffusionWorker-1"], signal.SIGKILL)

    threading.Thread(target=kill).start()
    error = _error_of(lambda: generate(num_inference_steps=5000))
    seconds = time.monotonic() - killed_at[0]
    alive = [name for name, pid in workers.items() if Path(f"/proc/{pid}").exists()]
    left = [path.name for path in Path("/dev/shm").glob(f"omnx{os.getpid():x}*")]
    return {"error": error, "seconds": seconds, "alive": alive, "shared_memory": left}


if __name__ == "__main__":
    main()
