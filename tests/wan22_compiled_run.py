# SPDX-License-Identifier: Apache-2.0
"""Run by test_wan22_compiled.py: engines with and without a compile backend, one after the other in one process.

For each it writes frames and a report into a folder of its name: the counters of rank 0 after the first request and
after the second one, and of this process, which is the only rank of an engine of one, when the engine had started.

usage: wan22_compiled_run.py MODEL OUTPUT_FOLDER ENGINES_JSON, engines being {name: {"backend": compile backend, none by
default; "settings": of the engine; "cache_of": the engine whose cache is copied for this one}}
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_runtime import COUNTERS

SETTINGS = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "seed": 11, "guidance_scale": 4.0}


def main() -> None:
    model, folder, engines = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for name, engine in engines.items():
        cache = folder / name / "cache"
        cache.parent.mkdir()
        if "cache_of" in engine:
            shutil.copytree(folder / engine["cache_of"] / "cache", cache)
        os.environ["OMNI_NEURON_COMPILE_CACHE_DIR"] = str(cache)
        os.environ["VLLM_NEURON_BACKEND"] = engine.get("backend", "")
        torch._dynamo.reset()
        COUNTERS.reset()
        omni = Omni(model=model, **{"dtype": "float32", **engine.get("settings", {})})
        started = COUNTERS.as_dict()

        def generate(prompt: str, omni: Omni = omni, **changes: Any) -> Any:
            prompts = {"prompt": prompt, "negative_prompt": "blurry"}
            [output] = omni.generate(prompts, OmniDiffusionSamplingParams(**{**SETTINGS, **changes}), use_tqdm=False)
            return output

        first = generate("A red circle moving right.")
        np.save(folder / name / "frames.npy", np.asarray(first.images[0]))
        second = generate("Two dogs.", seed=12, guidance_scale=3.0, num_inference_steps=5)
        omni.close()
        first, second = (
            output.multimodal_output["metadata"]["generation"].get("compilation") for output in (first, second)
        )
        (folder / name / "report.json").write_text(json.dumps({"started": started, "first": first, "second": second}))


if __name__ == "__main__":
    main()
