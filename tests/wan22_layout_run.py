# SPDX-License-Identifier: Apache-2.0
"""Run by test_wan22_engine.py in a process of its own: one engine of some layout, its latents and a tiled video.

usage: wan22_layout_run.py MODEL OUTPUT_FOLDER SETTINGS_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm_omni.entrypoints.omni import Omni
from wan22_engine_run import PROMPT, WIDE, parameters


def main() -> None:
    model, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    omni = Omni(model=model, dtype="float32", **settings)

    def generate(**changes: Any) -> Any:
        [output] = omni.generate(PROMPT, parameters(**changes), use_tqdm=False)
        return output

    latents = generate(output_type="latent")
    np.save(folder / "latents.npy", np.asarray(latents.images[0]))
    # Twice: weights that left the device during the first decoding must be the same ones in the second request.
    wide = [generate(**WIDE) for _ in range(2)]
    frames = [np.asarray(output.images[0]) for output in wide]
    np.save(folder / "wide.npy", frames[0])
    report = {
        "generation": wide[0].multimodal_output["metadata"]["generation"],
        "same_seed_is_bit_equal": np.array_equal(*frames),
        "unguided": list(np.asarray(generate(guidance_scale=1.0).images[0]).shape),
    }
    omni.close()
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
