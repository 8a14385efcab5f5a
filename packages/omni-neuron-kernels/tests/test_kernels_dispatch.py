# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import omni_neuron_nkisim
from omni_neuron_kernels import (
    Implementation,
    adaln_modulate,
    dispatch,
    explain,
    flash_attention,
    gated_mlp,
    mlp,
    nki_launch,
    nki_provider,
    output_projection,
    rms_norm,
)

X, WEIGHT = torch.randn(3, 5, 64), torch.randn(64)


def heads(batch=1, queries=40, keys=70, count=4, key_heads=2, dim=32, dtype=torch.float32):
    q = torch.randn(batch, queries, count, dim).to(dtype)
    return q, *(torch.randn(batch, keys, key_heads, dim).to(dtype) for _ in range(2))


@pytest.fixture
def no_simulator() -> Iterator[None]:
    omni_neuron_nkisim.uninstall()
    yield
    omni_neuron_nkisim.install()


def launches(monkeypatch):
    """Names of the kernels that are launched from now on."""
    from omni_neuron_nkisim import launch

    names: list[str] = []
    original = launch.remember
    monkeypatch.setattr(launch, "remember", lambda stats: (names.append(stats.kernel), original(stats))[1])
    return names


def test_the_simulator_runs_every_op_and_agrees_with_the_reference(monkeypatch):
    q, k, v = heads(batch=2)
    hidden, branch = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    gate, scale, shift = torch.randn(3, 2, 64)
    layers = (torch.randn(64, 100), torch.randn(100), torch.randn(100, 30), torch.randn(30))

    def everything():
        return [
            rms_norm(X, WEIGHT),
            *adaln_modulate(hidden, scale, shift),
            *adaln_modulate(hidden, scale, shift, branch=branch, gate=gate),
            flash_attention(q, k, v, key_length=60),
            flash_attention(50 * q, k, v, key_length=60),
            mlp(X, *layers),
            gated_mlp(X, layers[0], layers[0], layers[2]),
            gated_mlp(X, layers[0], layers[0], layers[2], activation="gelu_tanh"),
            output_projection(X, *layers[:2]),
        ]

    names = launches(monkeypatch)
    simulated = everything()
    norms = ["rms_norm", "adaln_modulate", "gated_adaln_modulate"]
    layers_run = ["mlp", "gated_mlp", "gated_mlp", "output_projection"]
    assert names == [*norms, "flash_attention", "flash_attention", *layers_run]
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    for ours, reference in zip(simulated, everything(), strict=True):
        assert ours.dtype == reference.dtype and ours.shape == reference.shape
        assert float((ours - reference).norm() / reference.norm()) < 1e-5
    assert len(names) == 9


def test_the_choice_and_its_reasons(monkeypatch):
    choice = explain("rms_norm", X, WEIGHT)
    assert (choice.provider, set(choice.refusals)) == ("nki-simulator", {"nki"})
    assert choice.distribution.startswith("omni-neuron-kernels 0.")
    assert "tensors on cpu" in choice.refusals["nki"]
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    choice = explain("rms_norm", X, WEIGHT)
    assert choice.provider == "torch"
    assert choice.refusals["nki-simulator"] == "VLLM_NEURON_DISABLE_NKI_KERNELS=1"
    assert "not nki-simulator: VLLM_NEURON_DISABLE_NKI_KERNELS=1" in str(choice)


def test_without_the_simulator_the_reference_runs(no_simulator):
    choice = explain("rms_norm", X, WEIGHT)
    assert choice.provider == "torch"
    assert "OMNI_NEURON_NKISIM=1" in choice.refusals["nki-simulator"]
    torch.testing.assert_close(rms_norm(X, WEIGHT), F.rms_norm(X, (64,), WEIGHT, 1e-6))


def test_on_a_device_the_chip_decides(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2")
    assert "inf2" in (nki_provider._not_on_device("neuron") or "")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert nki_provider._not_on_device("neuron") is None


REFUSED = {
    "rms_norm too wide": ("rms_norm", (torch.zeros(1, 8193), torch.zeros(8193)), {}, "at most 8192"),
    "rms_norm in float16": ("rms_norm", (X.half(), WEIGHT), {}, "torch.float16"),
    "rms_norm without rows": ("rms_norm", (X[:0], WEIGHT), {}, "without elements"),
    "rms_norm with a gradient": ("rms_norm", (X.clone().requires_grad_(), WEIGHT), {}, "no backward"),
    "adaln_modulate too wide": (
        "adaln_modulate",
        (torch.zeros(1, 1, 5633), torch.zeros(1, 5633), torch.zeros(1, 5633)),
        {},
        "at most 5632",
    ),
    "adaln_modulate of two dtypes": (
        "adaln_modulate",
        (torch.zeros(1, 1, 8), torch.zeros(1, 8), torch.zeros(1, 8)),
        {"branch": torch.zeros(1, 1, 8).bfloat16(), "gate": torch.zeros(1, 8)},
        "branch torch.bfloat16",
    ),
    "flash_attention past the VAE's head dim": ("flash_attention", heads(dim=385), {}, "head dim 385"),
    "flash_attention with a negative scale": ("flash_attention", heads(), {"scale": -0.1}, "above zero"),
    "qkv_projection with a gradient through its tables": (
        "qkv_projection",
        (torch.zeros(1, 4, 8), torch.zeros(8, 24), None),
        {"heads": (1, 1), "head_dim": 8, "rotation": (torch.zeros(4, 4, requires_grad=True), torch.zeros(4, 4))},
        "no backward",
    ),
    "mlp too wide for SBUF": (
        "mlp",
        (torch.zeros(1, 5120), torch.zeros(5120, 13824), torch.zeros(13824), torch.zeros(13824, 8), torch.zeros(8)),
        {},
        "bytes of SBUF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_outside_a_limit_torch_runs_and_says_why(name):
    op, tensors, options, reason = REFUSED[name]
    choice = explain(op, *tensors, **options)
    assert choice.provider == "torch"
    assert reason in choice.refusals["nki-simulator"]


def test_the_widest_projection_that_is_taken_fits_on_chip():
    """Where wide stripes of the weight would not fit beside the bias, narrow ones are taken."""
    shapes = (1024, 4096), (4096, 30_720), (30_720,)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    assert nki_provider._OPS["output_projection"][1](*tensors) is None
    specs = [omni_neuron_nkisim.TensorSpec(shape, "bfloat16") for shape in shapes[:2]]
    kernel = nki_launch.kernels_of("feed_forward").output_projection[2]
    with omni_neuron_nkisim.settings(target="trn2", execute=False, check_live_capacity=True):
        kernel(*specs, omni_neuron_nkisim.TensorSpec((1, 30_720), "float32"))


def test_a_bias_of_another_dtype_is_taken():
    x, weight, bias = torch.randn(2, 8).bfloat16(), torch.randn(8, 8).bfloat16(), torch.randn(8)
    expected = output_projection(x, weight, bias.bfloat16())
    torch.testing.assert_close(output_projection(x, weight, bias), expected, atol=0.05, rtol=0.05)
    with torch.enable_grad():  # a gradient: the reference
        assert mlp(x.clone().requires_grad_(), weight, bias, weight, bias).dtype is torch.bfloat16


def test_a_head_dim_past_the_limit_still_computes():
    q, k, v = heads(dim=400)
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(flash_attention(q, k, v), expected)


def test_a_compiled_graph_is_whole_and_asks_the_dispatcher_when_it_runs(monkeypatch):
    names = launches(monkeypatch)

    def model(x, weight, q, k, v):
        return adaln_modulate(rms_norm(x, weight), x[:, 0], x[:, 1])[0], flash_attention(q, k, v)

    arguments = (X, WEIGHT, *heads())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    simulated = compiled(*arguments)
    assert names == ["rms_norm", "adaln_modulate", "flash_attention"]
    for ours, eager in zip(simulated, model(*arguments), strict=True):
        torch.testing.assert_close(ours, eager)
    omni_neuron_nkisim.uninstall()
    compiled(*arguments)
    assert len(names) == 6


def test_a_third_partys_kernel_goes_first_where_its_priority_is_higher(monkeypatch):
    theirs = Implementation(lambda x, weight, *, epsilon: x, lambda x, weight, **options: None, priority=60)
    found = {**dispatch._providers(), "fast": ("other 1.0", {"rms_norm": theirs})}
    monkeypatch.setattr(dispatch, "_providers", lambda: found)
    dispatch._candidates.cache_clear()
    try:
        assert explain("rms_norm", X, WEIGHT).distribution == "other 1.0"
        assert rms_norm(X, WEIGHT) is X
        assert explain("mlp", X, *(torch.zeros(s) for s in ((64, 8), (8,), (8, 2), (2,)))).provider == "nki-simulator"
    finally:
        dispatch._candidates.cache_clear()


def test_an_unknown_op_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'softmax'; there are adaln_modulate, adaln_modulate_fp8, "):
        explain("softmax", X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, WEIGHT[:3]), "weight has shape"),
        (lambda: adaln_modulate(X, WEIGHT, WEIGHT), "scale has shape"),
        (lambda: adaln_modulate(X, X[:, 0], X[:, 0], branch=X), "go together"),
        (lambda: flash_attention(*heads(), key_length=71), r"valid are 1\.\.70"),
        (lambda: flash_attention(*heads(count=3)), "valid is a multiple"),
        (lambda: mlp(X, WEIGHT, WEIGHT, WEIGHT, WEIGHT), "are not"),
        (lambda: gated_mlp(X, X[0], WEIGHT, WEIGHT), "are not"),
        (lambda: gated_mlp(X, X[0], X[0], X[0], activation="relu"), "valid are gelu_tanh, silu"),
        (lambda: output_projection(X, WEIGHT[:, None], WEIGHT), "bias has shape"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_the_package_imports_no_nki():
    source = "import sys, omni_neuron_kernels; sys.exit('nki' in sys.modules or 'omni_neuron_nkisim' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], timeout=120).returncode == 0
