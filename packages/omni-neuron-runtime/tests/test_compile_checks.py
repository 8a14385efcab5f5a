# SPDX-License-Identifier: Apache-2.0
"""What the backends refuse, with the message that says why; `neuron_check` needs torch only."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_neuron_runtime import (
    COUNTERS,
    CompileError,
    compile_errors,
    compile_options,
    component_compiler_args,
    register_process_group_replica_groups,
)
from omni_neuron_runtime.compile import replica_groups


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    COUNTERS.reset()


def compiled(function, *inputs, dynamic=False):
    run = torch.compile(
        function, backend="neuron_check", fullgraph=True, dynamic=dynamic, options=compile_options("transformer")
    )
    with torch.inference_mode(), compile_errors("transformer"):
        return run(*inputs)


def error_of(function, *inputs, **options):
    with pytest.raises(CompileError) as error:
        compiled(function, *inputs, **options)
    return str(error.value)


def test_a_good_graph_runs():
    def function(x):
        y = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (8,)), approximate="tanh")
        y = y.clone()
        y[..., 0::2] = y[..., 1::2] * 0.1
        return y.roll(3, 1), y.var(-1), torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=False)

    x = torch.randn(1, 4, 6, 8)
    for got, wanted in zip(compiled(function, x), function(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert COUNTERS.graphs == 1


def complex_rope(x):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * pairs).flatten(-2)


def in_float64(x):
    return (x.double() * 2).float()


def of_data_dependent_shape(x):
    return x[x > 0]


def with_noise(x):
    return x + torch.randn_like(x)


def with_fft(x):
    return torch.fft.rfft(x).abs()


def unsupported(x):
    return torch.linalg.qr(x).R


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (complex_rope, ["view_as_complex", "complex", "real RoPE", "pairs = torch.view_as_complex"]),
        (in_float64, ["torch.float64", "compute in float32", "return (x.double() * 2).float()"]),
        (with_noise, ["is not lowered for Neuron", "pass them in as a tensor", "torch.randn_like"]),
        (with_fft, ["_fft_r2c", "Neuron has no FFT: write it as a matrix product", "torch.fft.rfft(x).abs()"]),
        (unsupported, ["is not lowered for Neuron", "write it with other operations", "torch.linalg.qr"]),
    ],
)
def test_a_node_is_named_with_its_line_and_advice(function, words):
    message = error_of(function, torch.randn(4, 8))
    assert message.startswith("transformer: node ")
    assert __file__.rpartition("/")[2] in message
    for word in words:
        assert word in message


def masked_attention(x):
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool)
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], mask)


def causal_attention(x):
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)


@pytest.mark.parametrize(("function", "argument"), [(masked_attention, "attn_mask"), (causal_attention, "is_causal")])
def test_attention_that_lite_does_not_legalise(function, argument):
    message = error_of(function, torch.randn(4, 8))
    assert f"attention with {argument}," in message and "softmax in float32" in message
    assert "return torch.nn.functional.scaled_dot_product_attention(x[None]" in message


def test_a_dynamic_shape():
    message = error_of(lambda x: x * 2, torch.randn(4, 8), dynamic=True)
    assert "dynamic shape" in message and "dynamic=False" in message
    message = error_of(of_data_dependent_shape, torch.randn(4, 8))
    assert "depends on data: use torch.where" in message and "return x[x > 0]" in message


def test_a_graph_break():
    message = error_of(lambda x: print(x) or x, torch.randn(4, 8))
    assert message.startswith("transformer is not one full graph")
    assert "print" in message and "fullgraph=True" in message


def test_gradients():
    weight = torch.nn.Parameter(torch.randn(8))
    with pytest.raises(CompileError, match="needs gradients"), compile_errors("transformer"):
        torch.compile(lambda x: x * weight, backend="neuron_check", fullgraph=True)(torch.randn(8)).sum().backward()


def test_unknown_options():
    with pytest.raises(CompileError, match=r"options \['speed'\] mean nothing"), compile_errors("x"):
        torch.compile(lambda x: x * 2, backend="neuron_check", options={"speed": 3})(torch.randn(8))


@pytest.fixture
def world_of_four(monkeypatch):
    # c10d counts group names from 0 in every world: other tests of this process may have registered the same ones.
    monkeypatch.setattr(replica_groups, "_partitions", {})
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_group_that_is_not_registered(world_of_four):
    group = dist.new_group([0, 1], group_desc="pair")

    def reduced(x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name))

    message = error_of(reduced, torch.randn(4))
    assert f"process group {group.group_name!r} (ranks [0, 1]) does not cover the world of 4 ranks" in message
    register_process_group_replica_groups(group.group_name, [[0, 1]])
    message = error_of(reduced, torch.randn(4))
    assert "is registered with [[0, 1]], which hold 2 ranks; the world has 4" in message
    register_process_group_replica_groups(group.group_name, [[0, 1], [2, 3]])
    compiled(reduced, torch.randn(4))


def test_a_reduction_that_is_not_lowered(world_of_four):
    world = dist.group.WORLD.group_name

    def averaged(x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "avg", world))

    assert "reduces with 'avg'; valid are sum, max" in error_of(averaged, torch.randn(4))

    def uneven(x):
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_to_all_single(x, [1, 1, 1, 2], [1, 1, 1, 2], world)
        )

    assert "sends parts of different sizes ([1, 1, 1, 2] to" in error_of(uneven, torch.randn(5))


@pytest.mark.parametrize("package", ["torch_mlir", "jax"])
def test_the_extra_is_not_installed(package, monkeypatch):
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] is not installed")
    monkeypatch.setitem(sys.modules, package, None)
    run = torch.compile(lambda x: x * 2, backend="neuron_stablehlo", options=compile_options("transformer"))
    words = r"transformer: neuron_stablehlo needs .* which do(es)? not import .*pip install .*\[stablehlo\]"
    with torch.inference_mode(), pytest.raises(CompileError, match=words), compile_errors("transformer"):
        run(torch.randn(4))


def test_options():
    assert compile_options("vae", ["-O1", "--auto-cast=none"], "work") == {
        "model_name": "vae",
        "compiler_args": ["--optimization-level=1", "--auto-cast=none"],
        "compiler_workdir": "work",
    }
    assert compile_options("vae") == {"model_name": "vae", "compiler_args": ["--optimization-level=2"]}
    with pytest.raises(ValueError, match="several optimization levels"):
        compile_options("vae", ["-O1", "--optimization-level=2"])
    with pytest.raises(ValueError, match=r"compiler argument 'O1': valid is one option"):
        compile_options("vae", ["O1"])


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_arguments_of_the_components(component, monkeypatch):
    assert "--hbm-scratchpad-page-size=2048" in component_compiler_args(component)
    monkeypatch.setenv("NEURON_SCRATCHPAD_PAGE_SIZE", "1024")
    arguments = component_compiler_args(component)
    assert "--auto-cast=none" in arguments and "--hbm-scratchpad-page-size=1024" in arguments
    assert compile_options(component, arguments)["compiler_args"] == arguments
    assert any("instruction-limit" in argument for argument in arguments) == (component == "vae")
    with pytest.raises(ValueError, match="component = 'unet': valid are transformer, text_encoder, vae"):
        component_compiler_args("unet")
