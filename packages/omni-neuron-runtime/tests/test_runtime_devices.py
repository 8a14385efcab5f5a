# SPDX-License-Identifier: Apache-2.0
import pytest

from omni_neuron_runtime import (
    CPU_MODE_DEVICE_COUNT,
    EnvironmentVariableError,
    NeuronPackageError,
    device_count,
    devices,
    env,
    has_neuron_device,
    hbm_bytes_per_core,
    is_active,
    is_cpu_mode,
    parse_core_ranges,
    platform_target,
    visible_cores,
)


@pytest.fixture(autouse=True)
def _machine_without_device(monkeypatch, tmp_path):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "DEVICE_GLOB", str(tmp_path / "neuron*"))


@pytest.fixture
def neuron_device(tmp_path):
    (tmp_path / "neuron0").touch()


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", [0]), ("0-3,7", [0, 1, 2, 3, 7]), ("7,0-1", [7, 0, 1]), (" 2 - 3 , 5 ", [2, 3, 5]), ("4-4", [4])],
)
def test_core_ranges(text, cores):
    assert parse_core_ranges(text) == cores


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("3-1", "descends"),
        ("a", "'a' is neither a number nor a range"),
        ("-1", "'-1' is neither"),
        ("0,1,1", "core 1 is named twice"),
        ("0-3,2", "core 2 is named twice"),
        ("", "'' is neither"),
        ("0,", "'' is neither"),
        ("1.5", "'1.5' is neither"),
        ("0-1-2", "'0-1-2' is neither"),
        ("²", "is neither"),
    ],
)
def test_core_range_errors_name_value_and_syntax(text, wrong):
    with pytest.raises(ValueError, match="is not a list of cores") as error:
        parse_core_ranges(text)
    assert wrong in str(error.value)
    assert repr(text) in str(error.value)
    assert '"0-3,7"' in str(error.value)


def test_without_device_or_cpu_mode_nothing_is_active():
    assert not is_cpu_mode()
    assert not has_neuron_device()
    assert not is_active()
    assert device_count() == 0


def test_cpu_mode_counts_enough_devices_for_any_layout(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert is_active()
    assert device_count() == CPU_MODE_DEVICE_COUNT >= 64
    assert platform_target() == "cpu"
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-3,7")
    assert device_count() == 5


def test_visible_devices_come_before_visible_cores(monkeypatch):
    assert visible_cores() is None
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    assert visible_cores() == [4, 5]
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "1")
    assert visible_cores() == [1]
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "x")
    with pytest.raises(EnvironmentVariableError, match="NEURON_VISIBLE_DEVICES: 'x' is not a list of cores"):
        visible_cores()


def test_a_device_without_its_packages_says_what_is_missing(monkeypatch, neuron_device):
    assert has_neuron_device()
    assert is_active()
    with pytest.raises(NeuronPackageError, match="libtorch_neuronx_lite is not installed"):
        device_count()
    with pytest.raises(NeuronPackageError, match="NEURON_PLATFORM_TARGET_OVERRIDE can name the chip"):
        platform_target()
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    assert device_count() == 8
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert platform_target() == "trn2"


def test_cpu_mode_wins_over_a_device_and_the_override_over_cpu_mode(monkeypatch, neuron_device):
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert device_count() == CPU_MODE_DEVICE_COUNT
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert platform_target() == "trn3"


def test_device_memory():
    assert hbm_bytes_per_core("trn2") == 24 * 2**30
    with pytest.raises(ValueError, match=r"'cpu'; known: inf2, trn1, trn2, trn3"):
        hbm_bytes_per_core("cpu")
