# SPDX-License-Identifier: Apache-2.0
"""What only a Neuron device can show. Never run so far: there was no device, and none of Neuron's packages.

    ./dev run pytest tests/test_on_neuron.py -rs     # without VLLM_NEURON_CPU_MODE, beside Neuron's packages

Each test runs in processes of its own, because a process that has initialised the device keeps its core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.neuron
KERNELS_RUN = Path(__file__).with_name("neuron_kernels_run.py")
KERNELS = (
    "rms_norm",
    "adaln_modulate",
    "mlp",
    "gated_mlp",
    "output_projection",
    "qkv_projection",
    "flash_attention",
    "causal_conv3d",
)
FP8_KERNELS = (
    "row_quantize",
    "quantize_mx",
    "adaln_modulate_fp8",
    "fp8_qkv_projection",
    "fp8_output_projection",
    "fp8_mlp",
)
TIMEOUT_S = 3600
GENERATE = """
import sys

import torch
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

if __name__ == "__main__":
    model, dtype, path = sys.argv[1:]
    omni = Omni(model=model, dtype=dtype, init_timeout=3600, stage_init_timeout=3600)
    parameters = OmniDiffusionSamplingParams(
        height=64, width=96, num_frames=9, num_inference_steps=4, guidance_scale=4.0, seed=11, output_type="latent"
    )
    [output] = omni.generate({"prompt": "A red circle moving right.", "negative_prompt": "blurry"}, parameters)
    torch.save(torch.as_tensor(output.images[0]).float(), path)
    omni.close()
"""


@pytest.fixture(scope="module", autouse=True)
def _a_device_and_its_packages() -> None:
    from omni_neuron_runtime import has_neuron_device, is_cpu_mode, neuron_packages

    if is_cpu_mode():
        pytest.skip("VLLM_NEURON_CPU_MODE=1: these tests are for a Neuron device")
    if not has_neuron_device():
        pytest.skip("there is no /dev/neuron*")
    missing = [name for name in ("libtorch_neuronx_lite", "nki") if neuron_packages()[name] is None]
    if missing:
        pytest.skip(f"of Neuron's packages {', '.join(missing)} are not installed")


def output_of(*command: str, **environment: str) -> str:
    """What a command prints, a process that has ended."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_doctor_finds_device_packages_and_platform() -> None:
    report = json.loads(output_of(str(Path(sys.executable).with_name("vllm-omni-neuron")), "doctor", "--json"))
    assert report["problems"] == []


@pytest.fixture(scope="module")
def kernels() -> dict[str, dict[str, Any]]:
    """Provider and error of every op, compiled for the device."""
    return json.loads(output_of(sys.executable, str(KERNELS_RUN)).splitlines()[-1])


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(kernels: dict[str, dict[str, Any]], name: str) -> None:
    assert kernels[name]["provider"] == "nki"
    assert kernels[name]["error"] <= 2e-2  # of bfloat16


@pytest.mark.parametrize("name", FP8_KERNELS)
def test_fp8_kernels(kernels: dict[str, dict[str, Any]], name: str) -> None:
    from omni_neuron_runtime import platform_target

    if platform_target() != "trn3":
        pytest.skip(f"FP8 kernels need trn3, this is {platform_target()}")
    assert kernels[name]["provider"] == "nki"
    assert kernels[name]["error"] <= 5e-2  # of MX on chip, which the torch reference does without


@pytest.mark.engine
def test_a_tiny_video_is_that_of_the_cpu(tmp_path: Path) -> None:
    """Latents of bfloat16 on one core, at most twice as far from float32 as bfloat16 in CPU mode, or 2 %."""
    import torch

    from omni_neuron_wan22 import make_tiny_checkpoint

    model = str(make_tiny_checkpoint(tmp_path / "tiny"))
    program = tmp_path / "generate.py"
    program.write_text(GENERATE)
    latents = {}
    for name, dtype, cpu_mode in (("exact", "float32", "1"), ("cpu", "bfloat16", "1"), ("device", "bfloat16", "0")):
        path = tmp_path / f"{name}.pt"
        output_of(sys.executable, str(program), model, dtype, str(path), VLLM_NEURON_CPU_MODE=cpu_mode)
        latents[name] = torch.load(path)
    exact = latents["exact"]
    errors = {name: float((latents[name] - exact).norm() / exact.norm()) for name in ("cpu", "device")}
    assert errors["device"] <= max(2e-2, 2 * errors["cpu"]), errors
