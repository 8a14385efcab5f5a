# SPDX-License-Identifier: Apache-2.0
"""The platform, in CPU mode and, as far as it can be without a device, as on a device."""

from __future__ import annotations

import os

import pytest
import torch
from vllm.platforms import current_platform
from vllm_omni.platforms import current_omni_platform
from vllm_omni.platforms.interface import OmniPlatformEnum

import omni_neuron_runtime as runtime
from vllm_omni_neuron import NeuronOmniPlatform, NeuronPlatform


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "is_cpu_mode", lambda: False)
    monkeypatch.setattr(runtime, "platform_target", lambda: "trn2")
    monkeypatch.setattr(runtime, "get_dist_backend", lambda: "cpu:gloo,neuron:neuron")


def test_entry_points_select_our_platforms() -> None:
    assert type(current_platform) is NeuronPlatform
    assert type(current_omni_platform) is NeuronOmniPlatform


def test_documented_names() -> None:
    assert NeuronOmniPlatform._omni_enum is OmniPlatformEnum.OOT
    assert NeuronOmniPlatform.device_type == "neuron"
    assert NeuronOmniPlatform.device_control_env_var == "NEURON_VISIBLE_DEVICES"
    assert NeuronOmniPlatform.supports_torch_inductor() is False
    assert NeuronOmniPlatform.get_diffusion_worker_cls() == "vllm_omni_neuron.worker.NeuronDiffusionWorker"
    assert (
        NeuronOmniPlatform.get_diffusion_model_runner_cls()
        == "vllm_omni_neuron.model_runner.NeuronDiffusionModelRunner"
    )


def test_cpu_mode() -> None:
    platform = NeuronOmniPlatform()
    assert (platform.device_type, platform.device_name, platform.dist_backend) == ("cpu", "cpu", "gloo")
    assert platform.is_out_of_tree()
    assert not platform.is_cuda()
    assert platform.get_torch_device(3) == torch.device("cpu")
    assert platform.get_compile_backend() is None
    assert platform.get_device_communicator_cls().endswith("CpuCommunicator")
    platform.synchronize()
    platform.empty_cache()
    platform.reset_peak_memory_stats()
    platform.set_device(torch.device("cpu"))
    free, total = platform.get_device_memory()
    assert platform.memory_allocated() > 0
    assert platform.max_memory_allocated() > 0
    assert platform.max_memory_reserved() > 0
    assert 0 < free < total


def test_device_count_follows_the_visible_devices_and_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NeuronOmniPlatform.get_device_count() > 0
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-3,7")
    assert NeuronOmniPlatform.get_device_count() == 5
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    monkeypatch.setattr(runtime, "device_count", lambda: 0)
    assert NeuronOmniPlatform.get_device_count() == 1


def test_ranges_of_devices_are_written_out_for_vllm_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-3,7")
    NeuronOmniPlatform()
    assert os.environ["NEURON_VISIBLE_DEVICES"] == "0,1,2,3,7"


def test_the_neuron_runtimes_own_list_counts_where_ours_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "")  # vLLM-Omni's variable is set below; this restores it
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-6")
    NeuronOmniPlatform()
    assert os.environ["NEURON_VISIBLE_DEVICES"] == "4,5,6"
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "1")
    NeuronOmniPlatform()
    assert os.environ["NEURON_VISIBLE_DEVICES"] == "1"


def test_the_cpu_is_one_device_that_is_always_there() -> None:
    from vllm_omni.diffusion.distributed.utils import get_local_device

    platform = NeuronOmniPlatform()
    assert (platform.is_initialized(), platform.current_device()) == (True, 0)
    assert get_local_device() == torch.device("cpu")


@pytest.mark.usefixtures("on_device")
def test_every_rank_has_index_0_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the documented policy; no device has seen it."""
    platform = NeuronOmniPlatform()
    monkeypatch.setattr(torch, "device", lambda *arguments: arguments)  # torch does not know the name without Lite
    assert [platform.get_torch_device(rank) for rank in (None, 0, 3)] == [("neuron", 0)] * 3
    monkeypatch.delattr(torch, "neuron", raising=False)
    assert (platform.is_initialized(), platform.current_device()) == (False, 0)
    monkeypatch.setattr(torch, "neuron", object(), raising=False)
    assert platform.is_initialized()


@pytest.mark.usefixtures("on_device")
def test_a_torch_neuron_module_without_synchronize_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Omni calls it after it has loaded weights; AWS's module lacks parts, and its own platform does nothing."""
    monkeypatch.delattr(torch, "neuron", raising=False)
    NeuronOmniPlatform.synchronize()
    monkeypatch.setattr(torch, "neuron", object(), raising=False)
    NeuronOmniPlatform.synchronize()


@pytest.mark.usefixtures("on_device")
def test_on_a_device() -> None:
    platform = NeuronOmniPlatform()
    assert (platform.device_type, platform.device_name) == ("neuron", "neuron")
    assert platform.dist_backend == "cpu:gloo,neuron:neuron"
    assert platform.get_device_name() == "trn2"
    assert platform.get_device_total_memory() == 24 << 30
    assert platform.get_device_memory() == (24 << 30, 24 << 30)


def test_attention_backend_choice() -> None:
    ours = "vllm_omni_neuron.attention.NeuronSDPABackend"
    assert NeuronOmniPlatform.get_diffusion_attn_backend_cls(None, 128) == ours
    assert NeuronOmniPlatform.get_diffusion_attn_backend_cls("torch_sdpa", 128) == ours
    with pytest.raises(ValueError, match=r"'FLASH_ATTN' does not run on Neuron; choose TORCH_SDPA"):
        NeuronOmniPlatform.get_diffusion_attn_backend_cls("FLASH_ATTN", 128)
    with pytest.raises(ValueError, match=r"'flash' is unknown"):
        NeuronOmniPlatform.get_diffusion_attn_backend_cls("flash", 128)


def test_other_stages_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="diffusion stages only"):
        NeuronOmniPlatform.get_omni_ar_worker_cls()
    with pytest.raises(NotImplementedError, match="diffusion stages only"):
        NeuronOmniPlatform.get_omni_generation_worker_cls()
