# SPDX-License-Identifier: Apache-2.0
"""The real engine with two spawned workers, one of which fails, hangs or is killed: what the caller gets and is left.

One process runs all cases and reports in JSON: importing vLLM takes longer than the cases do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# A model package: its entry point is read in the engine's process and in the workers.
MODEL = """
import os, time
import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm_omni.diffusion.data import DiffusionOutput

PIPELINE_REGISTRY = [{"model_arch": "UnluckyPipeline", "class_name": "UnluckyPipeline", "module_name": __name__}]


class UnluckyPipeline(nn.Module):
    _dit_modules = ["denoiser"]
    _encoder_modules = []
    _vae_modules = []
    weights_sources = ()

    def __init__(self, *, od_config, prefix=""):
        super().__init__()
        self.device = torch.device("cpu")
        self.denoiser = nn.Linear(2, 2, bias=False)
        self.threads = torch.get_num_threads()

    def load_weights(self, weights):
        if get_tp_group().rank_in_group == 1:
            if os.environ.get("UNLUCKY") == "raise":
                raise ValueError("shard model-00001.safetensors is truncated")
            if os.environ.get("UNLUCKY") == "hang":
                time.sleep(600)
        return {name for name, _ in self.named_parameters()}

    def forward(self, batch):
        [request] = batch.requests
        extra = request.sampling_params.extra_args or {}
        total = torch.zeros(4)
        for step in range(request.sampling_params.num_inference_steps or 1):
            if step == 1 and extra.get("unlucky_rank") == get_tp_group().rank_in_group:
                raise MemoryError("no room for tile 3")
            total = get_tp_group().all_reduce(total + 1)
            time.sleep(extra.get("seconds_per_step", 0))
        frames = torch.full((2, 8, 8, 3), self.threads, dtype=torch.uint8)
        return DiffusionOutput(output={"payload": {"video": frames}})
"""

CASES = '''
import json, multiprocessing, os, re, signal, sys, threading, time
from pathlib import Path

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams


def shared_memory():
    """The segments and semaphores that this process has mapped or its workers have made."""
    mapped = re.findall(r"/dev/shm/(\\S+)", Path("/proc/self/maps").read_text())
    return sorted({*mapped, *(path.name for path in Path("/dev/shm").glob(f"omnx{os.getpid():x}*"))})


def engine():
    return Omni(model=sys.argv[1], tensor_parallel_size=2, enforce_eager=True)


def sampling(steps, **extra):
    return OmniDiffusionSamplingParams(
        height=8, width=8, num_frames=2, num_inference_steps=steps, seed=1, extra_args=extra
    )


def error_of(function):
    started = time.monotonic()
    try:
        function()
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None}


def leftovers():
    # Names that exist still; a mapping may outlive its name.
    left = [name for name in shared_memory() if (Path("/dev/shm") / name).exists()]
    return {"processes": len(multiprocessing.active_children()), "shared_memory": left}


def main():
    report = {}
    report["visible"] = os.environ["NEURON_VISIBLE_DEVICES"]
    os.environ["NEURON_VISIBLE_DEVICES"] = "5"
    report["layout"] = {**error_of(engine), **leftovers()}
    os.environ["NEURON_VISIBLE_DEVICES"] = report["visible"]
    # First the engine that starts: it warms the server that workers are forked from, and the deadline below is shorter.
    omni = engine()
    [output] = omni.generate({"prompt": "a fox"}, sampling(2))
    report["threads"] = int(output.images[0].flatten()[0])
    workers = {process.name: process.pid for process in multiprocessing.active_children()}
    report["running"] = {"workers": sorted(workers), "shared_memory": len(shared_memory())}
    killed = {}

    def kill():
        time.sleep(2)
        killed["at"] = time.monotonic()
        os.kill(workers["DiffusionWorker-1"], signal.SIGKILL)

    threading.Thread(target=kill).start()
    report["kill"] = error_of(lambda: omni.generate({"prompt": "a fox"}, sampling(6000, seconds_per_step=0.02)))
    report["kill"]["seconds"] = time.monotonic() - killed["at"]
    report["kill"].update(leftovers())
    report["kill"]["alive"] = [name for name, pid in workers.items() if Path(f"/proc/{pid}").exists()]

    omni = engine()
    report["alone"] = error_of(lambda: omni.generate({"prompt": "a fox"}, sampling(4, unlucky_rank=1)))
    report["alone"].update(leftovers())

    os.environ["UNLUCKY"] = "raise"
    report["raise"] = {**error_of(engine), **leftovers()}
    os.environ["UNLUCKY"] = "hang"
    # Twice what the other worker needed on this machine, so that only the one that hangs is late.
    report["timeout"] = int(2 * report["raise"]["seconds"]) + 10
    os.environ["OMNI_NEURON_STARTUP_TIMEOUT_S"] = str(report["timeout"])
    report["hang"] = {**error_of(engine), **leftovers()}
    del os.environ["UNLUCKY"], os.environ["OMNI_NEURON_STARTUP_TIMEOUT_S"]
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unlucky")
    (folder / "unlucky_model.py").write_text(MODEL)
    (folder / "cases.py").write_text(CASES)
    info = folder / "unlucky_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unlucky-model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_omni_neuron.models]\nunlucky = unlucky_model\n")
    (folder / "model").mkdir()
    (folder / "model" / "model_index.json").write_text(json.dumps({"_class_name": "UnluckyPipeline"}))
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1", "PYTHONPATH": str(folder)}
    for name in ("OMP_NUM_THREADS", "VLLM_PLUGINS"):
        environment.pop(name, None)
    environment["NEURON_VISIBLE_DEVICES"] = "6-7"
    command = [
        sys.executable,
        str(folder / "cases.py"),
        str(folder / "model"),
        str(folder / "report.json"),
    ]
    log = folder / "log.txt"
    with log.open("w") as stream:
        result = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, timeout=1500)
    assert result.returncode == 0, log.read_text()[-8000:]
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return loaded


def nothing_is_left(case: dict[str, Any]) -> bool:
    return case["processes"] == 0 and case["shared_memory"] == []


def test_a_layout_that_does_not_match_starts_no_process(report: dict[str, Any]) -> None:
    case = report["layout"]
    assert "requires 2 device(s) based on parallel_config, but 1 device(s) are available: ['5']" in case["error"]
    assert nothing_is_left(case)


def test_ranges_of_devices_work(report: dict[str, Any]) -> None:
    """vLLM-Omni splits the variable at commas; the engine of the last case ran on `6-7`."""
    assert report["visible"] == "6,7"
    assert report["running"]["workers"]


def test_an_error_while_loading_reaches_the_caller(report: dict[str, Any]) -> None:
    case = report["raise"]
    assert (
        "diffusion worker rank 1 failed while loading the model: ValueError: shard model-00001.safetensors is truncated"
        in case["error"]
    )
    assert nothing_is_left(case)


def test_a_worker_that_hangs_while_loading_hits_the_deadline(report: dict[str, Any]) -> None:
    case = report["hang"]
    assert "rank 1 is still loading the model" in case["error"]
    assert "rank 0" not in case["error"]
    assert f"in {report['timeout']} s (OMNI_NEURON_STARTUP_TIMEOUT_S)" in case["error"]
    assert nothing_is_left(case)


def test_a_rank_that_raises_alone_in_a_request(report: dict[str, Any]) -> None:
    """Rank 0 waits for it in a collective, whose own deadline is 600 s."""
    case = report["alone"]
    assert "diffusion worker rank 1 failed while executing request" in case["error"]
    assert "MemoryError: no room for tile 3" in case["error"]
    assert "rank 0 did not come out of it" in case["error"]
    assert case["seconds"] < 60
    assert nothing_is_left(case)


def test_workers_share_the_cores(report: dict[str, Any]) -> None:
    assert report["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_worker_killed_while_denoising(report: dict[str, Any]) -> None:
    assert report["running"]["workers"] == ["DiffusionWorker-0", "DiffusionWorker-1"]
    assert report["running"]["shared_memory"] > 0  # what is looked for below does exist while the engine runs
    case = report["kill"]
    assert "diffusion worker rank 1" in case["error"]
    assert "was killed by SIGKILL" in case["error"]
    assert case["seconds"] < 15
    assert case["alive"] == []
    assert nothing_is_left(case)
