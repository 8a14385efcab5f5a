# SPDX-License-Identifier: Apache-2.0
"""The three plugin functions, and that importing the package imports nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata

import pytest

import omni_neuron_runtime as runtime
import vllm_omni_neuron as plugin


@pytest.fixture
def inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE", raising=False)
    monkeypatch.setattr(runtime, "is_active", lambda: False)


@pytest.fixture
def cpu_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")


def test_import_loads_neither_vllm_nor_vllm_omni() -> None:
    probe = (
        "import sys, vllm_omni_neuron as plugin\n"
        "plugin.neuron_omni_platform_plugin(); plugin.neuron_platform_plugin()\n"
        "print([name for name in ('vllm', 'vllm_omni', 'diffusers', 'transformers') if name in sys.modules])\n"
    )
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1"}
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "[]", result.stdout


@pytest.mark.usefixtures("inactive")
def test_plugins_are_quiet_where_neuron_is_not_in_play(caplog: pytest.LogCaptureFixture) -> None:
    assert plugin.neuron_omni_platform_plugin() is None
    assert plugin.neuron_platform_plugin() is None
    assert plugin.register_neuron_pipelines() is None
    assert caplog.records == []


@pytest.mark.usefixtures("inactive")
def test_stock_vllm_omni_is_untouched_where_inactive() -> None:
    probe = (
        "import vllm_omni_neuron as plugin\n"
        "from vllm_omni.diffusion.executor.abstract import DiffusionExecutor as executor\n"
        "from vllm_omni.diffusion import registry\n"
        "before = (executor.__dict__['get_class'], dict(registry._DIFFUSION_MODELS))\n"
        "plugin.register_neuron_pipelines()\n"
        "assert before == (executor.__dict__['get_class'], registry._DIFFUSION_MODELS)\n"
        "from vllm_omni.platforms import current_omni_platform\n"
        "print(type(current_omni_platform).__name__)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_NEURON_CPU_MODE"}
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "Neuron" not in result.stdout


@pytest.mark.usefixtures("cpu_mode")
def test_plugins_name_the_platform_classes() -> None:
    assert plugin.neuron_omni_platform_plugin() == "vllm_omni_neuron.platforms.omni_platform.NeuronOmniPlatform"
    assert plugin.neuron_platform_plugin() == "vllm_omni_neuron.platforms.vllm_platform.NeuronPlatform"


@pytest.mark.usefixtures("cpu_mode")
@pytest.mark.parametrize(("name", "answer"), [("neuron", "theirs"), ("neuron_device", None)])
def test_vllm_neuron_answers_for_vllm_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: str | None
) -> None:
    """Of two plugins with one name vLLM asks one; of two names it refuses two answers."""
    theirs = metadata.EntryPoint(name, "vllm_neuron:plugin", "vllm.platform_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [theirs])
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda _self: lambda: "theirs")
    assert plugin.neuron_platform_plugin() == answer


def test_the_native_route_is_in_the_environment_before_vllm_neuron_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm_neuron takes the XLA route, with gloo alone, unless VLLM_NEURON_BACKEND is neuron_native."""
    names = ("VLLM_NEURON_BACKEND", "VLLM_NEURON_LIBTORCH_NEURONX_LITE")
    for name in names:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(runtime, "is_active", lambda: True)
    monkeypatch.setitem(sys.modules, "libtorch_neuronx_lite", types.ModuleType("libtorch_neuronx_lite"))
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    theirs = metadata.EntryPoint("neuron", "vllm_neuron:plugin", "vllm.platform_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [theirs])
    seen: list[str] = []

    def load(_self: metadata.EntryPoint) -> Callable[[], str]:
        seen.extend(os.environ[name] for name in names)
        return lambda: "theirs"

    monkeypatch.setattr(metadata.EntryPoint, "load", load)
    assert plugin.neuron_platform_plugin() == "theirs"
    assert seen == ["neuron_native", "1"]


def test_importing_vllm_starts_no_build_of_cuda_kernels(monkeypatch: pytest.MonkeyPatch, cpu_mode: None) -> None:
    monkeypatch.delenv("HUMMING_DISABLE_PARALLEL_BUILD", raising=False)
    # The library's modules that build when imported; the probe imports what loads them in a worker.
    probe = (
        "import subprocess\n"
        "started = []\n"
        "popen = subprocess.Popen.__init__\n"
        "def record(self, arguments, *args, **kwargs):\n"
        "    started.append(str(arguments))\n"
        "    return popen(self, arguments, *args, **kwargs)\n"
        "subprocess.Popen.__init__ = record\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.device_type\n"
        "import humming.ops.utils, humming.utils.nvrtc\n"
        "print([command for command in started if 'humming' in command])\n"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout


def test_a_failure_is_logged_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "perhaps")
    with caplog.at_level(logging.ERROR), pytest.raises(runtime.EnvironmentVariableError, match="perhaps"):
        plugin.neuron_omni_platform_plugin()
    assert "neuron_omni_platform_plugin failed" in caplog.text
    assert plugin.__version__ in caplog.text


def test_lazy_exports() -> None:
    for name in plugin.__all__:
        assert getattr(plugin, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        plugin.no_such_name  # noqa: B018
