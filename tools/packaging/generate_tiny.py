# SPDX-License-Identifier: Apache-2.0
"""Generate with a tiny checkpoint on two workers, and keep what came, to compare environments.

`generate_tiny.py CHECKPOINT DISTRIBUTION REPORT.json AXIS...` runs one engine an axis (`tensor_parallel_size`,
`ring_degree`); `generate_tiny.py --compare ALL.json SOME.json` fails where the second has something that the first has
not. Imports nothing of this repository but what is installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

SIZES = {"height": 64, "width": 96, "num_inference_steps": 2, "seed": 7}


def registered(distribution: str) -> list[list[str]]:
    """Architecture, class and status of what a distribution offers."""
    from vllm_omni_neuron import discover_models

    models = [model for model in discover_models() if model.distribution == distribution]
    return [[model.architecture, model.class_name, model.status] for model in models]


def generate(checkpoint: str, axis: str, video: bool) -> str:
    """The digest of what two workers make; says its shape."""
    import numpy as np
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    omni = Omni(model=checkpoint, dtype="float32", enforce_eager=True, **{axis: 2})
    try:
        sampling = OmniDiffusionSamplingParams(**SIZES, **({"num_frames": 5} if video else {}))
        [output] = omni.generate({"prompt": "a red fox"}, sampling)
        layout = output.multimodal_output["metadata"]["generation"]["layout"]
        made = np.asarray(output.images[0])
    finally:
        omni.close()
    print(f"{axis} = 2: {made.shape} {made.dtype}, layout {layout}, from {made.min()} to {made.max()}")
    return hashlib.sha256(np.ascontiguousarray(made).tobytes()).hexdigest()


def run(checkpoint: str, distribution: str, report: str, *axes: str) -> None:
    """Write models and digests."""
    from vllm_omni_neuron.sdk import model_spec

    models = registered(distribution)
    architecture = json.loads((Path(checkpoint) / "model_index.json").read_text())["_class_name"]
    if [architecture, "registered"] not in [[name, status] for name, _, status in models]:
        sys.exit(f"{distribution} does not offer {architecture}: {models}")
    video = model_spec(architecture).output == "video"
    digests = {axis: generate(checkpoint, axis, video) for axis in axes}
    Path(report).write_text(json.dumps({"models": models, "digests": digests}))


def compare(everything: str, some: str) -> None:
    """Fail where `some` has other models, or another digest, than `everything`."""
    first, second = (json.loads(Path(path).read_text()) for path in (everything, some))
    found: list[Any] = [axis for axis, digest in second["digests"].items() if first["digests"][axis] != digest]
    if found or first["models"] != second["models"]:
        sys.exit(f"not the same: {first} and {second}")


if __name__ == "__main__":  # workers are processes that import this file again
    compare(*sys.argv[2:]) if sys.argv[1] == "--compare" else run(*sys.argv[1:])
