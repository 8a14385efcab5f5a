# SPDX-License-Identifier: Apache-2.0
"""Graphs lowered to StableHLO and executed on the CPU by XLA, in one process."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_neuron_runtime import (
    COUNTERS,
    ArtifactCache,
    CompileError,
    KernelOp,
    compile_errors,
    compile_options,
    register_kernel_op,
    register_process_group_replica_groups,
)
from omni_neuron_runtime.compile import lower_child
from omni_neuron_runtime.compile.lowering import lower

pytest.importorskip("torch_mlir", reason="the extra [stablehlo] is not installed")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    COUNTERS.reset()


class Model(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)
        self.conv = torch.nn.Conv3d(2, 4, 3, padding=1)
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x, frames):
        y = torch.nn.functional.gelu(self.norm(self.linear(x)), approximate="tanh").softmax(-1) * 2.0 + self.table
        y = y.clone()
        y[:, 0::2] = y[:, 1::2] * 0.1
        heads = y.view(1, 4, 4, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        picked = y.index_select(0, torch.arange(4, device=y.device).flip(0))
        unit = torch.nn.functional.normalize(y, dim=-1)
        return y.roll(3, 1), y.var(-1), attended, self.conv(frames), picked, (y > 1).any(-1), unit


def run(model, cache, dtype=torch.float32, **options):
    inputs = [torch.randn(4, 9)[:, 1:].to(dtype), torch.randn(1, 2, 3, 4, 5).to(dtype)]
    settings = compile_options("model", ["-O1"], str(cache))
    compiled = torch.compile(model, backend="neuron_stablehlo", fullgraph=True, dynamic=False, options=settings)
    with torch.inference_mode(), compile_errors("model"):
        return compiled(*inputs), model(*inputs)


def test_it_computes_what_torch_computes_and_a_warm_start_compiles_nothing(tmp_path):
    for got, wanted in zip(*run(Model(), tmp_path), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    assert (COUNTERS.graphs, COUNTERS.lowerings, COUNTERS.compilations) == (1, 1, 1)
    [entry] = ArtifactCache(tmp_path).entries()
    text = (tmp_path / "modules" / entry["key"] / "module.mlir").read_text()
    assert "f64" not in text and "arith." not in text and "dynamic" not in text
    assert entry["facts"]["compiler_args"] == ["--optimization-level=1"]

    # Other weights, another process as far as the cache can tell: the same key, nothing is compiled.
    torch._dynamo.reset()
    COUNTERS.reset()
    for got, wanted in zip(*run(Model(seed=1), tmp_path), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    assert (COUNTERS.graphs, COUNTERS.lowerings, COUNTERS.compilations) == (1, 0, 0)
    assert (COUNTERS.artifact_hits, COUNTERS.executable_hits) == (1, 1)

    # Another dtype is another graph.
    COUNTERS.reset()
    got, wanted = run(Model().bfloat16(), tmp_path, torch.bfloat16)
    torch.testing.assert_close(got[2], wanted[2], rtol=3e-2, atol=3e-2)
    assert COUNTERS.lowerings == 1


def test_collectives_carry_the_whole_partition(tmp_path):
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        ops = torch.ops._c10d_functional
        name = dist.new_group([2, 3]).group_name
        register_process_group_replica_groups(name, [[0, 1], [2, 3], [4, 5], [6, 7]])

        def function(x):
            return (
                ops.wait_tensor(ops.all_reduce(x, "sum", name)),
                ops.wait_tensor(ops.all_reduce(x, "max", name)),
                ops.wait_tensor(ops.all_gather_into_tensor(x, 2, name)) * 2,
                ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 2, name)),
                ops.wait_tensor(ops.all_to_all_single(x, [2, 2], [2, 2], name)),
            )

        settings = compile_options("collectives", (), str(tmp_path))
        compiled = torch.compile(function, backend="neuron_stablehlo", fullgraph=True, options=settings)
        # The other ranks do not exist, so it ends where their executables would be loaded.
        with torch.inference_mode(), pytest.raises(Exception, match="rank 3 waited"), compile_errors("x"):
            compiled(torch.randn(4, 8))
    finally:
        dist.destroy_process_group()
    [entry] = ArtifactCache(tmp_path).entries()
    text = (tmp_path / "modules" / entry["key"] / "module.mlir").read_text()
    groups = "replica_groups = dense<[[0, 1], [2, 3], [4, 5], [6, 7]]> : tensor<4x2xi64>"
    assert re.findall(r'"stablehlo\.(\w+)"', text) == [
        "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
    ]  # fmt: skip
    assert text.count(groups) == 5
    assert "torch" not in text


def bad_reference(kind):
    """A kernel op whose reference cannot be in a composite."""

    def reference(x):
        if kind == "communicates":
            return torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        return (x.double() * 2).float()

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    register_kernel_op(KernelOp(f"stablehlo_test.{kind}", run, torch.empty_like, reference, lambda: "1"))
    return getattr(torch.ops.stablehlo_test, kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("in_float64", r"model, reference of stablehlo_test.in_float64: node .*float64; .*compute in float32"),
        ("communicates", r"reference of stablehlo_test.communicates: node .* communicates; do that outside of the op"),
    ],
)
def test_a_reference_that_cannot_be_lowered(kind, words, tmp_path):
    op = bad_reference(kind)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        settings = compile_options("model", (), str(tmp_path))
        compiled = torch.compile(lambda x: op(x) + 1, backend="neuron_stablehlo", fullgraph=True, options=settings)
        with torch.inference_mode(), pytest.raises(CompileError, match=words), compile_errors("model"):
            compiled(torch.randn(4))
    finally:
        dist.destroy_process_group()


RAW = "module {\n func.func @main(%arg0: !torch.vtensor<[2],f32>) -> !torch.vtensor<[2],f32> {\n  BODY\n }\n}\n"


def test_a_lowering_that_fails_names_the_line():
    body = "return %0 : !torch.vtensor<[2],f32>"
    bad = RAW.replace("BODY", '%0 = torch.operator "torch.x.y"(%arg0) : (!torch.vtensor<[2],f32>) -> '
                      f"!torch.vtensor<[2],f32>\n  {body}")  # fmt: skip
    with pytest.raises(CompileError, match=r"graph: torch-mlir could not lower the graph .*at %0 = torch.operator"):
        lower(bad, "graph")


def test_a_lowering_that_leaves_double_precision():
    doubles = RAW.replace("BODY", "return %arg0 : !torch.vtensor<[2],f32>").replace("f32", "f64")
    with pytest.raises(CompileError, match=r"graph: the lowering left a f64 tensor, .*func\.func @main"):
        lower(doubles, "graph")


def test_a_lowering_has_limits():
    good = RAW.replace("BODY", "return %arg0 : !torch.vtensor<[2],f32>")
    with pytest.raises(CompileError, match=r"took more than 0\.1 GiB of address space \(OMNI_NEURON_COMPILE_MEMORY_GB"):
        lower(good, "graph", memory_bytes=100 * 2**20)
    with pytest.raises(CompileError, match=r"took more than 0 s \(OMNI_NEURON_COMPILE_TIMEOUT_S\)"):
        lower(good, "graph", seconds=0.01)


def test_double_precision_scalars_get_the_dtype_that_they_are_converted_to():
    text = """
    %c = arith.constant dense<0xFFF0000000000000> : tensor<1xf64>
    %d = arith.constant dense<3> : tensor<i64>
    %0 = stablehlo.convert %c : tensor<1xf64>
    %1 = stablehlo.reshape %0 : (tensor<1xf64>) -> tensor<f64>
    %2 = stablehlo.convert %1 : (tensor<f64>) -> tensor<bf16>
    %3 = stablehlo.convert %d : (tensor<i64>) -> tensor<f32>
    return %2, %3 : tensor<bf16>, tensor<f32>
"""
    tidied = lower_child.tidy(text)
    assert "%2 = stablehlo.constant dense<0xFF80> : tensor<bf16>" in tidied
    assert "%3 = stablehlo.constant dense<3.0> : tensor<f32>" in tidied


def test_functions_have_constants_of_their_own():
    text = """
  func.func @main() -> tensor<f32> {
    %c = stablehlo.constant dense<2.0> : tensor<f64>
    %0 = stablehlo.convert %c : (tensor<f64>) -> tensor<f32>
    return %0 : tensor<f32>
  }
  func.func @other(%c: tensor<f64>) -> tensor<f32> {
    %0 = stablehlo.convert %c : (tensor<f64>) -> tensor<f32>
    return %0 : tensor<f32>
  }
"""
    assert lower_child.tidy(text).count("stablehlo.constant") == 1
