# SPDX-License-Identifier: Apache-2.0
"""Contract tests of the seam, against stand-ins and not against Neuron's own packages.

Those are not on the public index. The stand-ins are built from the names and signatures that were recorded from public
copies and call sites of `vllm_neuron` and `libtorch_neuronx_lite`; a call that does not fit a recorded signature
raises TypeError. They prove that the seam calls what was recorded, not that the recording is still true.
"""

import importlib.machinery
import os
import sys
import types

import pytest
import torch

from omni_neuron_runtime import (
    EnvironmentVariableError,
    KernelOp,
    NeuronPackageError,
    autoload_problem,
    check_logical_cores,
    compile_backend_name,
    device_count,
    devices,
    env,
    get_compile_backend,
    get_dist_backend,
    hbm_bytes_per_core,
    initialize_device_runtime,
    neuron_packages,
    partition_of,
    platform_target,
    register_kernel_op,
    register_process_group_replica_groups,
    synchronize,
)
from omni_neuron_runtime.compile import kernel_ops


def _install(monkeypatch, name, **attributes):
    """Put a stand-in module, and the packages above it, into sys.modules."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        dotted = ".".join(parts[:end])
        if dotted not in sys.modules:
            module = types.ModuleType(dotted)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(dotted, None, is_package=True)
            monkeypatch.setitem(sys.modules, dotted, module)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    for attribute, value in attributes.items():
        setattr(sys.modules[name], attribute, value)


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch, tmp_path):
    for name in env.VARIABLES:
        monkeypatch.setenv(name, "")  # some are written: this takes them back
        monkeypatch.delenv(name)
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(devices, "DEVICE_GLOB", str(tmp_path / "neuron*"))


@pytest.fixture
def calls():
    return []


@pytest.fixture
def lite(monkeypatch, calls):
    """Recorded: `_compiler.device_count()` and `.nki_op(name, fn=None, mutates_args=())`,
    `.compile.platform.get_platform_target()` and `HBM_MEMORY_GB`, `.compile.native_backend.register()`,
    `_compiler.distributed.mesh_registry._MESH_REGISTRY`."""

    def lite_device_count() -> int:
        calls.append("device_count")
        return 32

    def nki_op(name, fn=None, mutates_args=()):
        calls.append((name, fn, mutates_args))

    def get_platform_target() -> str:
        return "trn2"

    def register() -> str:
        calls.append("register")
        return "neuron_native_lite"

    registry: dict[str, list[list[int]]] = {}
    _install(monkeypatch, "libtorch_neuronx_lite._compiler", device_count=lite_device_count, nki_op=nki_op)
    _install(monkeypatch, "libtorch_neuronx_lite._compiler.distributed.mesh_registry", _MESH_REGISTRY=registry)
    _install(
        monkeypatch,
        "libtorch_neuronx_lite.compile.platform",
        get_platform_target=get_platform_target,
        HBM_MEMORY_GB={"trn2": 23, "trn4": 48},
    )
    _install(monkeypatch, "libtorch_neuronx_lite.compile.native_backend", register=register)
    return registry


@pytest.fixture
def vllm_neuron(monkeypatch, calls):
    """Recorded: `envs.get_compile_backend_name()`, `envs.get_dist_backend()`, which depend on
    `VLLM_NEURON_BACKEND == "neuron_native"` alone, and `vllm.platform.NeuronPlatform.set_device_count(n)`."""

    def is_native_backend() -> bool:
        return os.environ.get("VLLM_NEURON_BACKEND") == "neuron_native"

    def get_compile_backend_name() -> str:
        return "neuron_native_lite" if is_native_backend() else "neuron_libtorch"

    def recorded_dist_backend() -> str:
        return "cpu:gloo,neuron:neuron" if is_native_backend() else "gloo"

    class NeuronPlatform:
        @classmethod
        def set_device_count(cls, n: int) -> None:
            calls.append(("set_device_count", n))

    _install(
        monkeypatch,
        "vllm_neuron.envs",
        get_compile_backend_name=get_compile_backend_name,
        get_dist_backend=recorded_dist_backend,
    )
    _install(monkeypatch, "vllm_neuron.vllm.platform", NeuronPlatform=NeuronPlatform)


def test_nothing_installed():
    assert neuron_packages() == {"vllm_neuron": None, "libtorch_neuronx_lite": None, "nki": None}
    for call in (get_compile_backend, get_dist_backend, lambda: initialize_device_runtime(0, 1)):
        with pytest.raises(NeuronPackageError) as error:
            call()
        assert "libtorch_neuronx_lite is not installed" in str(error.value)
        assert "\n" not in str(error.value)
    register_process_group_replica_groups("tp", [[0, 1]])


def test_cpu_mode_needs_nothing(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert get_compile_backend() is None
    assert get_dist_backend() == "gloo"
    with pytest.raises(NeuronPackageError, match="VLLM_NEURON_CPU_MODE=1"):
        initialize_device_runtime(0, 1)


def test_an_unknown_backend_is_refused_in_every_mode(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_BACKEND", "inductor")
    for mode in ("0", "1"):
        monkeypatch.setenv("VLLM_NEURON_CPU_MODE", mode)
        with pytest.raises(EnvironmentVariableError, match=r"VLLM_NEURON_BACKEND='inductor'.*neuron_native"):
            get_compile_backend()


def test_lite_alone(lite, calls):
    assert neuron_packages()["libtorch_neuronx_lite"] == "unknown"
    assert device_count() == 32
    assert platform_target() == "trn2"
    assert get_compile_backend() == "neuron_native_lite"
    assert get_dist_backend() == "cpu:gloo,neuron:neuron"
    assert calls == ["device_count", "register"]


def test_kernel_ops_are_lites_once_its_backend_is_there(lite, calls, monkeypatch):
    monkeypatch.setattr(kernel_ops, "_ops", {})

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op = KernelOp("seam_test.double", double, torch.empty_like, double, lambda: "1")
    register_kernel_op(op)
    assert calls == [] and not hasattr(torch.ops.seam_test, "double")
    for _ in range(2):
        get_compile_backend()
    assert calls == ["register", ("seam_test::double", double, ()), "register"]
    with pytest.raises(ValueError, match=r"kernel op 'seam_test\.double' is registered already"):
        register_kernel_op(op)
    with pytest.raises(ValueError, match=r"kernel op 'double': valid is namespace\.name"):
        register_kernel_op(KernelOp("double", double, torch.empty_like, double, lambda: "1"))
    # Without Lite, as in CPU mode, it is torch's at once.
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    register_kernel_op(KernelOp("seam_test.twice", double, torch.empty_like, double, lambda: "1"))
    assert torch.ops.seam_test.twice(torch.ones(1)).item() == 2


def test_lites_memory_table_comes_before_ours(lite):
    assert hbm_bytes_per_core("trn2") == 23 * 2**30
    assert hbm_bytes_per_core("trn4") == 48 * 2**30
    assert hbm_bytes_per_core("trn3") == 36 * 2**30


@pytest.mark.parametrize("chosen", ["", "neuron", "neuron_native"])
def test_both_packages_take_the_native_route_by_every_name(chosen, lite, vllm_neuron, calls, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_NEURON_BACKEND", chosen)
    assert compile_backend_name() == "neuron_native"
    assert calls == [] and os.environ["VLLM_NEURON_BACKEND"] == chosen, "asking for the name does nothing"
    assert get_dist_backend() == "cpu:gloo,neuron:neuron"
    assert calls == []
    assert get_compile_backend() == "neuron_native_lite"
    assert calls == ["register"]
    assert os.environ["VLLM_NEURON_BACKEND"] == "neuron_native"
    assert os.environ["VLLM_NEURON_LIBTORCH_NEURONX_LITE"] == "1"
    assert not caplog.records
    monkeypatch.setenv("VLLM_NEURON_LIBTORCH_NEURONX_LITE", "0")
    with pytest.raises(EnvironmentVariableError, match="VLLM_NEURON_LIBTORCH_NEURONX_LITE=0 rules out the native"):
        get_dist_backend()


def test_the_xla_route_beside_lite(lite, vllm_neuron, calls, monkeypatch, caplog):
    monkeypatch.setattr(kernel_ops, "_ops", {})

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def quadruple(x: torch.Tensor) -> torch.Tensor:
        return x * 4

    register_kernel_op(KernelOp("seam_xla.triple", triple, torch.empty_like, triple, lambda: "1"))
    assert not hasattr(torch.ops.seam_xla, "triple")
    monkeypatch.setenv("VLLM_NEURON_BACKEND", "vllm_neuron")
    assert get_dist_backend() == "gloo"
    assert get_compile_backend() == "neuron_libtorch"
    assert "deprecated XLA route" in caplog.text and "--optimization-level" in caplog.text
    assert not os.environ.get("VLLM_NEURON_LIBTORCH_NEURONX_LITE")
    register_kernel_op(KernelOp("seam_xla.quadruple", quadruple, torch.empty_like, quadruple, lambda: "1"))
    ones = torch.ones(1)
    assert (torch.ops.seam_xla.triple(ones).item(), torch.ops.seam_xla.quadruple(ones).item()) == (3, 4)
    assert calls == [], "Lite has no part in it"


def test_vllm_neuron_alone(vllm_neuron):
    assert compile_backend_name() == "vllm_neuron"
    assert get_compile_backend() == "neuron_libtorch"
    assert get_dist_backend() == "gloo"


def test_a_distributed_backend_without_device_tensors_is_refused(lite, vllm_neuron, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm_neuron.envs"], "get_dist_backend", lambda: "gloo")
    with pytest.raises(NeuronPackageError, match="names the distributed backend 'gloo' for the native route"):
        get_dist_backend()


def test_running_a_graph_that_did_not_compile_is_warned_of(lite, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1")
    get_compile_backend()
    assert not caplog.records
    monkeypatch.setenv("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "0")
    get_compile_backend()
    assert "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=0" in caplog.text


def test_waiting_for_the_device_where_torch_can(monkeypatch):
    monkeypatch.delattr(torch, "neuron", raising=False)
    synchronize()
    monkeypatch.setattr(torch, "neuron", types.SimpleNamespace(), raising=False)
    synchronize()
    waited = []
    torch.neuron.synchronize = lambda: waited.append(True)
    synchronize()
    assert waited == [True]


@pytest.mark.parametrize(("target", "size", "valid"), [("trn2", 1, False), ("trn3", 4, False), ("inf2", 1, True)])
def test_logical_cores_of_another_size(target, size, valid, lite, monkeypatch):
    check_logical_cores()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    check_logical_cores()
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(size))
    if valid:
        check_logical_cores()
    else:
        with pytest.raises(EnvironmentVariableError, match=f"={size} is not supported on {target}: valid is 2"):
            check_logical_cores()
        monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
        check_logical_cores()


@pytest.mark.parametrize("name", ["neuron_native", "neuron", "vllm_neuron"])
def test_a_backend_that_is_not_installed(name, monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_BACKEND", name)
    package = "vllm_neuron" if name == "vllm_neuron" else "libtorch_neuronx_lite"
    with pytest.raises(NeuronPackageError, match=f"{package} is not installed"):
        get_compile_backend()


@pytest.mark.parametrize("name", ["neuron_stablehlo", "neuron_check"])
def test_our_backends_run_in_cpu_mode_only(name, lite, monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_BACKEND", name)
    assert device_count() == 32
    with pytest.raises(NeuronPackageError, match=rf"VLLM_NEURON_BACKEND={name} computes on the CPU"):
        get_compile_backend()
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    assert get_compile_backend() == name
    monkeypatch.setenv("VLLM_NEURON_BACKEND", "neuron_native")
    assert get_compile_backend() is None


def test_torch_neuronx_beside_lite(lite, monkeypatch):
    assert autoload_problem() is None
    _install(monkeypatch, "torch_neuronx")
    with pytest.raises(NeuronPackageError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0") as error:
        initialize_device_runtime(0, 1)
    assert str(error.value) == autoload_problem()
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ
    for call in (get_compile_backend, device_count):
        with pytest.raises(NeuronPackageError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
            call()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert autoload_problem() is None


def test_the_runtime_is_bound_to_one_core(lite, vllm_neuron, calls, monkeypatch):
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "host:61234")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-31")
    initialize_device_runtime(core=5, device_count=8)
    assert calls == [("set_device_count", 8)]
    assert env.get("NEURON_RT_VISIBLE_CORES") == [5]
    assert sys.modules["os"].environ["NEURON_RT_ROOT_COMM_ID"] == "host:61234"


def test_replica_groups_are_registered_as_a_full_partition(lite, monkeypatch):
    register_process_group_replica_groups("cp", ((0, 2), (3, 1)))
    assert lite == {"cp": [[0, 2], [3, 1]]}
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    register_process_group_replica_groups("tp", [[0]])
    assert "tp" not in lite
    assert partition_of("tp") == ((0,),)


@pytest.mark.parametrize("groups", [[], [[]], [[0, 1], [1, 2]], [[0, 1], [3]], [[1, 2]]])
def test_replica_groups_that_are_no_partition_are_refused(groups):
    with pytest.raises(ValueError, match="'tp' do not hold each rank of the world exactly once"):
        register_process_group_replica_groups("tp", groups)


def test_an_undetectable_chip(lite, monkeypatch):
    def get_platform_target() -> str:
        raise RuntimeError("no metadata service")

    _install(monkeypatch, "libtorch_neuronx_lite.compile.platform", get_platform_target=get_platform_target)
    with pytest.raises(NeuronPackageError, match="no metadata service; NEURON_PLATFORM_TARGET_OVERRIDE"):
        platform_target()


def test_a_package_that_fails_while_it_is_imported_is_named(monkeypatch, tmp_path):
    (tmp_path / "libtorch_neuronx_lite").mkdir()
    (tmp_path / "libtorch_neuronx_lite" / "__init__.py").write_text("raise RuntimeError('backend fallback')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NeuronPackageError, match=r"libtorch_neuronx_lite unknown failed .*RuntimeError: backend fallb"):
        get_compile_backend()


def test_a_placeholder_package_is_named(monkeypatch):
    _install(monkeypatch, "libtorch_neuronx_lite")
    with pytest.raises(NeuronPackageError, match=r"is installed but libtorch_neuronx_lite._compiler does not import"):
        device_count()
    _install(monkeypatch, "libtorch_neuronx_lite._compiler.distributed.mesh_registry")
    with pytest.raises(NeuronPackageError, match=r"has no libtorch_neuronx_lite._compiler.device_count"):
        device_count()
    with pytest.raises(NeuronPackageError, match="_MESH_REGISTRY: an incompatible version"):
        register_process_group_replica_groups("tp", [[0, 1]])
