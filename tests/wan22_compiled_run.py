# SPDX-License-Identifier: Apache-2.0
"""Run by test_wan22_compiled.py: engines with and without a compile backend, one after the other in one process.

For each it writes frames and a report into a folder of its name.

usage: wan22_compiled_run.py MODEL OUTPUT_FOLDER ENGINES_JSON, engines being {name: [compile backend or "", settings]}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

SETTINGS = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "seed": 11, "guidance_scale": 4.0}


def main() -> None:
    model, folder, engines = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for name, (backend, settings) in engines.items():
        os.environ["VLLM_NEURON_BACKEND"] = backend
        omni = Omni(model=model, dtype="float32", **settings)

        def generate(prompt: str, omni: Omni = omni, **changes: Any) -> Any:
            prompts = {"prompt": prompt, "negative_prompt": "blurry"}
            [output] = omni.generate(prompts, OmniDiffusionSamplingParams(**{**SETTINGS, **changes}), use_tqdm=False)
            return output

        (folder / name).mkdir()
        first = generate("A red circle moving right.")
        np.save(folder / name / "frames.npy", np.asarray(first.images[0]))
        second = generate("Two dogs.", seed=12, guidance_scale=3.0, num_inference_steps=5)
        omni.close()
        reports = [output.multimodal_output["metadata"]["generation"].get("compilation") for output in (first, second)]
        (folder / name / "report.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
