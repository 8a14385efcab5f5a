# SPDX-License-Identifier: Apache-2.0
"""FP8 kernels: quantisation bit for bit, projections within what the same quantisation costs in torch."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from omni_neuron_kernels import (
    NativeFp8Error,
    adaln_modulate_fp8,
    explain,
    fp8_mlp,
    fp8_output_projection,
    fp8_qkv_projection,
    pack_fp8_weight,
    quantize_mx,
    reference_fp8,
    row_quantize,
    scale_rule,
)
from omni_neuron_nkisim import TensorSpec, run_spmd, settings

FORMS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EPSILON = 1e-6
both_cores = pytest.mark.parametrize("lnc", [1, 2])


@pytest.fixture
def trn3():
    with settings(target="trn3"):
        yield


def kernels(module):
    return importlib.import_module(f"omni_neuron_kernels.nki_kernels.{module}")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def same_bits(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def groups_of_all_sizes(rows, width):
    """Groups of 32 of very different size, one of zeros, halves between codes, values that become subnormal."""
    x = random(rows, width) * 2.0 ** torch.randint(
        -12, 12, (rows, width // 32), generator=torch.Generator()
    ).repeat_interleave(32, 1)
    x[0, :32] = 0
    x[-1, 32:64] = torch.linspace(1, 1.9375, 32)
    x[-1, 64:96] = torch.tensor([1.0, 2.0**-9, 2.0**-12, -0.0] * 8)
    return x.bfloat16()


def golden(x, form, rule):
    """Codes and scales of one row from the formulas alone: the nearest code in a table, ties to even codes."""
    bits, top, largest = (3, 0x7E, 8) if form == "e4m3fn" else (2, 0x7B, 15)
    table = torch.arange(top + 1, dtype=torch.uint8).view(FORMS[form]).double().tolist()
    codes, scales = [], []
    for group in x.double().unflatten(0, (-1, 32)).tolist():
        peak = max(abs(value) for value in group)
        power = -127 if peak == 0 else math.frexp(peak)[1] - 1 - largest + (rule == "doubled")
        scales.append(power + 127)
        for value in group:
            size = abs(math.ldexp(value, -power))
            code = min(range(top + 1), key=lambda c: (abs(table[c] - size), c % 2))
            codes.append(code | (0x80 if math.copysign(1, value) < 0 else 0))
    assert table[1] == 2.0 ** (-6 - bits if bits == 3 else -14 - bits)
    return codes, scales


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("version", "rule"), [("0.4.0", "ocp"), ("0.6.0", "doubled")])
@pytest.mark.parametrize(("rows", "width"), [(3, 128), (130, 640)])
def test_quantize_mx_bit_for_bit(form, version, rule, rows, width, monkeypatch):
    x = groups_of_all_sizes(rows, width)
    with settings(target="trn3", nki_version=version):
        assert scale_rule() == rule
        assert explain("quantize_mx", x, form=form).provider == "nki-simulator"
        other = {"ocp": "doubled", "doubled": "ocp"}[rule]
        assert f"rule {other}" in explain("quantize_mx", x, form=form, rule=other).refusals["nki-simulator"]
        data, scales = quantize_mx(x, form=form)
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    for ours, theirs in zip((data, scales), quantize_mx(x, form=form, rule=rule), strict=True):
        same_bits(ours, theirs)
    codes, exponents = golden(x[-1], form, rule)
    assert data[-1].view(torch.uint8).tolist() == codes
    assert scales[-1].tolist() == exponents
    assert scales[0, 0] == 0


def test_the_rule_is_that_of_the_nki_version():
    for version, rule in (
        ("0.3.0", "ocp"),
        ("0.4.1", "ocp"),
        ("0.5.0", "doubled"),
        ("1.0", "doubled"),
        ("x", "doubled"),
    ):
        with settings(nki_version=version):
            assert scale_rule() == rule


@both_cores
@pytest.mark.parametrize(
    ("form", "largest", "target"), [("e4m3", 240, "trn2"), ("e4m3", 240, "trn3"), ("e4m3fn", 448, "trn3")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_quantize_bit_for_bit(form, largest, target, dtype, lnc, monkeypatch):
    x = (random(150, 77) * 10.0 ** random(150, 1, seed=1)).to(dtype)
    x[3] = 0
    with settings(target=target):
        names = {"e4m3": "float8_e4m3", "e4m3fn": "float8_e4m3fn"}
        data, scale = kernels("norms").row_quantize[lnc](x, float(largest), names[form])
        assert explain("row_quantize", x, form=form).provider == "nki-simulator"
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    wanted, wanted_scale = row_quantize(x, form=form)
    same_bits(data.view(torch.float8_e4m3fn), wanted)
    assert torch.equal(scale, wanted_scale)
    values = wanted.float()
    assert values.abs().amax(1)[:3].tolist() == [largest] * 3 and not values[3].any()
    # Half a unit in the last of three bits, or half the smallest subnormal.
    assert bool(((values * scale - x.float()).abs() <= (x.float().abs() / 16).maximum(scale * 2.0**-10) * 1.0001).all())


def fp8_linear(rows, columns, seed):
    """A weight, and it as FP8 with a scale per column."""
    weight = random(rows, columns, seed=seed) / math.sqrt(rows) * (1 + torch.arange(columns) % 3)
    data, scale = row_quantize(weight.T)
    return weight, data.T.contiguous(), scale[:, 0].contiguous()


def mx_rounded(x):
    """x as MX E4M3 holds it by this version's rule, float64; zeros are appended to whole groups."""
    padded = F.pad(x.bfloat16(), (0, -x.shape[-1] % 32))
    data, scales = quantize_mx(padded)
    values = data.double().unflatten(-1, (-1, 32)) * 2.0 ** (scales.double() - 127)[..., None]
    return values.flatten(-2)[..., : x.shape[-1]]


def check(result, exact, emulated, quantised):
    """`emulated` is computed in float64 from the same quantised numbers, `exact` from those before."""
    assert result.dtype == torch.bfloat16 and result.shape == exact.shape
    assert error(emulated, exact) > 0.005
    assert error(result, emulated) < (0.01 if quantised else 0.006)
    assert error(result, exact) < 1.05 * error(emulated, exact)


def check_output_projection(rows, width, columns):
    x, (weight, data, scale), bias = random(1, rows, width).bfloat16(), fp8_linear(width, columns, 1), random(columns)
    result = fp8_output_projection(x, pack_fp8_weight(data), scale, bias, native=True)
    exact = x.double() @ weight.double() + bias.double()
    check(result, exact, mx_rounded(x) @ (data.double() * scale.double()) + bias.double(), True)


@pytest.mark.parametrize(("rows", "width", "columns"), [(140, 640, 600), (3, 100, 7), (1, 128, 512)])
def test_output_projection(rows, width, columns, trn3):
    check_output_projection(rows, width, columns)


def check_mlp(rows, width, inner, columns):
    x, biases = random(rows, width), (random(inner, seed=5), random(columns, seed=6))
    up, down = fp8_linear(width, inner, 1), fp8_linear(inner, columns, 2)
    tokens, x_scale = row_quantize(x)
    packed = [tensor for part in (up, down) for tensor in (pack_fp8_weight(part[1]), part[2])]
    result = fp8_mlp(tokens, x_scale, *packed[:2], biases[0], *packed[2:], biases[1], native=True)
    wide = [bias.double() for bias in biases]
    exact = F.gelu(x.double() @ up[0].double() + wide[0], approximate="tanh") @ down[0].double() + wide[1]
    hidden = (tokens.double() * x_scale.double()) @ (up[1].double() * up[2].double()) + wide[0]
    hidden = mx_rounded(F.gelu(hidden, approximate="tanh"))
    check(result, exact, hidden @ (down[1].double() * down[2].double()) + wide[1], True)


@pytest.mark.parametrize(
    ("rows", "width", "inner", "columns"), [(140, 256, 640, 600), (3, 100, 128, 7), (1100, 128, 128, 8)]
)
def test_mlp(rows, width, inner, columns, trn3):
    check_mlp(rows, width, inner, columns)


def test_several_steps_of_tokens_and_parts_of_weights(trn3, monkeypatch):
    """Each core has three steps of tokens, and each weight comes in two parts."""
    for name, value in {"TOKEN_TILES": 1, "UP_COLUMNS": 512, "DOWN_COLUMNS": 512}.items():
        monkeypatch.setattr(kernels("fp8"), name, value)
    check_output_projection(600, 128, 600)
    check_mlp(600, 128, 640, 600)


def qkv_case(rows, width, heads, d, norm=True, rope=True):
    columns = (heads[0] + 2 * heads[1]) * d
    weight, data, scale = fp8_linear(width, columns, 1)
    gains = tuple(random(1, count * d, seed=3) + 1 for count in heads) if norm else ()
    angles = 10 * random(rows, d // 2, seed=4)
    return (
        random(rows, width),
        weight,
        data,
        scale,
        random(columns, seed=2) + 0.5,
        gains,
        (angles.cos(), angles.sin()) if rope else (),
    )


def qkv(x, weight, bias, heads, d, gains, rotation):
    parts = list(
        (x.double() @ weight.double() + bias.double()).split([n * d for n in (heads[0], heads[1], heads[1])], -1)
    )
    for n, gain in enumerate(gains):
        parts[n] = parts[n] * (parts[n].square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain[0].double()
    for n in range(2 if rotation else 0):
        cos, sin = (table[:, None].double() for table in rotation)
        even, odd = parts[n].unflatten(-1, (-1, d // 2, 2)).unbind(-1)
        parts[n] = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-3)
    return parts


def check_qkv(results, case, tokens, x_scale, heads, d):
    x, weight, data, scale, bias, gains, rotation = case
    exact = qkv(x, weight, bias, heads, d, gains, rotation)
    emulated = qkv(tokens.double() * x_scale.double(), data.double() * scale.double(), bias, heads, d, gains, rotation)
    for result, wanted, theirs in zip(results, exact, emulated, strict=True):
        check(result, wanted, theirs, False)


@pytest.mark.parametrize("all_reduce", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "heads", "d", "norm", "rope"),
    [(150, 200, (9, 9), 64, True, True), (3, 640, (4, 2), 10, True, False), (1, 128, (2, 2), 8, False, True)],
)
def test_qkv_projection(rows, width, heads, d, norm, rope, all_reduce, trn3):
    case = qkv_case(rows, width, heads, d, norm, rope)
    x, _, data, scale, bias, gains, rotation = case
    tokens, x_scale = row_quantize(x[None])
    options = {"heads": heads, "head_dim": d, "epsilon": EPSILON, "native": True}
    options |= {"query_gain": gains[0][0], "key_gain": gains[1][0]} if norm else {}
    options |= {"rotation": rotation} if rope else {}
    if all_reduce:  # as of two ranks with the same heads
        options |= {"ranks": 2, "all_reduce": lambda squares: 2 * squares}
    results = fp8_qkv_projection(tokens, x_scale, pack_fp8_weight(data), scale, bias, **options)
    check_qkv([part[0].flatten(1) for part in results], case, tokens[0], x_scale[0], heads, d)


@pytest.mark.parametrize(("ranks", "lnc"), [(1, 2), (2, 2), (4, 1), (4, 2)])
def test_the_norm_spans_the_heads_of_all_ranks(ranks, lnc, trn3, monkeypatch):
    # Five tiles of tokens: a core has one step of three, or one of two and one of three, and of PSUM two at a time.
    monkeypatch.setattr(kernels("qkv"), "TOKEN_TILES", 2)
    monkeypatch.setattr(kernels("qkv"), "FP8_TOKEN_TILES", 3)
    heads, d, width = (4, 4), 8, 128
    case = qkv_case(600, width, heads, d)
    _, _, data, scale, bias, gains, rotation = case
    tokens, x_scale = row_quantize(case[0])

    def part(tensor, rank):
        return torch.cat([piece.chunk(ranks, -1)[rank] for piece in tensor.chunk(3, -1)], -1).contiguous()

    arguments = []
    for rank in range(ranks):
        weight = pack_fp8_weight(part(data.view(torch.uint8), rank).view(torch.float8_e4m3fn)).flatten(1)
        vectors = (part(scale[None], rank), part(bias[None], rank))
        mine = tuple(gain.chunk(ranks, -1)[rank].contiguous() for gain in gains)
        group = (tuple(range(ranks)),) if ranks > 1 else ()
        local = (heads[0] // ranks,) * 2
        arguments.append(
            (tokens, x_scale, weight, *vectors, local, d, mine, rotation, EPSILON, ranks, group, "bfloat16")
        )
    per_rank = run_spmd(kernels("qkv").fp8_qkv_projection, arguments, lnc=lnc)
    check_qkv([torch.cat(parts, -1) for parts in zip(*per_rank, strict=True)], case, tokens, x_scale, heads, d)


@both_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_adaln_modulate(gated, dtype, lnc, trn3):
    shape = (2, 131, 100)
    hidden, branch = (random(*shape, seed=seed).to(dtype) + seed for seed in (1, 2))
    gate, scale, shift = random(3, 2, 100, seed=3)
    updated = (hidden.double() + gate.double()[:, None] * branch.double()).to(dtype) if gated else hidden
    exact = (
        F.layer_norm(updated.double(), shape[2:], eps=EPSILON) * (1 + scale.double()[:, None]) + shift.double()[:, None]
    )
    options = {"branch": branch, "gate": gate} if gated else {}
    data, row_scale, stream = adaln_modulate_fp8(hidden, scale, shift, epsilon=EPSILON, **options)
    assert error(stream, updated.double()) < 1e-6
    theirs, their_scale = row_quantize(exact.float())
    assert error(data.double() * row_scale.double(), exact) < 1.01 * error(
        theirs.double() * their_scale.double(), exact
    )
    result = kernels("norms").quantized_adaln_modulate[lnc](
        hidden, (branch, gate) if gated else (), scale, shift, EPSILON, 448.0, "float8_e4m3fn"
    )
    same_bits(result[0], data)


def test_operands_may_be_slices_of_larger_ones(trn3):
    """Such as one rank's columns of a packed weight."""
    _, data, scale = fp8_linear(128, 12, 1)
    tokens, x_scale = row_quantize(random(1, 2, 128))
    weight, vectors = pack_fp8_weight(data)[:, :6], torch.stack((scale[:6], random(6)), 1)
    options = {"heads": (1, 1), "head_dim": 2, "native": True}
    sliced = fp8_qkv_projection(tokens, x_scale, weight, vectors[:, 0], vectors[:, 1], **options)
    copies = (weight.contiguous(), vectors[:, 0].contiguous(), vectors[:, 1].contiguous())
    for ours, theirs in zip(sliced, fp8_qkv_projection(tokens, x_scale, *copies, **options), strict=True):
        assert torch.equal(ours, theirs)


def operands(width=128, columns=6):
    _, data, scale = fp8_linear(width, columns, 1)
    tokens, x_scale = row_quantize(random(1, 2, width))
    return tokens, x_scale, pack_fp8_weight(data), scale


def test_trn2_dequantises_unless_that_is_forbidden():
    tokens, x_scale, weight, scale = operands()
    down = pack_fp8_weight(torch.ones(6, 5).to(torch.float8_e4m3fn)), torch.ones(5)
    ops = {
        "fp8_output_projection": ((random(1, 2, 128).bfloat16(), weight, scale, None), {}),
        "fp8_qkv_projection": ((tokens, x_scale, weight, scale, None), {"heads": (1, 1), "head_dim": 2}),
        "fp8_mlp": ((tokens, x_scale, weight, scale, torch.zeros(6), *down, torch.zeros(5)), {}),
    }
    functions = (fp8_output_projection, fp8_qkv_projection, fp8_mlp)
    for (name, (tensors, options)), function in zip(ops.items(), functions, strict=True):
        choice = explain(name, *tensors, **options)
        assert choice.provider == "torch"
        assert "platform target trn2; MX instructions need trn3" in choice.refusals["nki-simulator"]
        with pytest.raises(NativeFp8Error, match=rf"{name} with native=True .*platform target trn2"):
            function(*tensors, native=True, **options)
        function(*tensors, **options)
    plain = weight.view(torch.uint8).permute(0, 2, 1).reshape(128, 6).view(torch.float8_e4m3fn).float() * scale
    x = ops["fp8_output_projection"][0][0]
    torch.testing.assert_close(fp8_output_projection(x, weight, scale, None), (x.float() @ plain).bfloat16())
    value = fp8_qkv_projection(tokens, x_scale, weight, scale, None, heads=(1, 1), head_dim=2)[2]
    torch.testing.assert_close(value[:, :, 0], ((tokens.float() * x_scale) @ plain)[..., 4:].bfloat16())
    for form, reason in (("e4m3fn", "e4m3fn needs trn3"), ("e4m3", None)):
        refusals = explain("row_quantize", random(2, 3), form=form).refusals
        assert (reason in refusals["nki-simulator"]) if reason else "nki-simulator" not in refusals


def test_the_reference_does_not_dequantise_where_that_is_forbidden():
    """What torch.compile traces is the reference, whoever else there is."""
    x, weight, scale = random(1, 2, 128).bfloat16(), *operands()[2:]
    with pytest.raises(NativeFp8Error, match="traced graph"):
        reference_fp8.fp8_output_projection(x, weight, scale, None, native=True)


def test_limits_fall_back_with_a_reason(trn3):
    tokens, x_scale, weight, scale = operands()
    down = pack_fp8_weight(torch.ones(6, 5).to(torch.float8_e4m3fn)), torch.ones(5)
    # Nothing is computed of these: zeros that take no memory.
    zero = torch.zeros(1, dtype=torch.float8_e4m3fn)
    wide = (zero.expand(2048, 9000, 4), torch.zeros(9000), None)
    narrow = (zero.expand(32, 128, 4), torch.zeros(128))
    many = (zero.expand(32, 33_000, 4), torch.zeros(33_000))
    square = (zero.expand(2048, 8192, 4), torch.zeros(8192))
    cases = [
        ("row_quantize", (torch.zeros(1, 5121),), {}, "at most 5120"),
        ("row_quantize", (torch.zeros(1, 8).half(),), {}, "torch.float16"),
        ("quantize_mx", (torch.zeros(1, 32).bfloat16(),), {}, "a multiple of 128"),
        ("quantize_mx", (torch.zeros(1, 5248).bfloat16(),), {}, "at most 5120"),
        ("adaln_modulate_fp8", (torch.zeros(1, 1, 5121), torch.zeros(1, 5121), torch.zeros(1, 5121)), {}, "5120"),
        ("fp8_output_projection", (random(1, 2, 128), weight, scale, None), {}, "torch.float32"),
        ("fp8_output_projection", (torch.zeros(1, 8192).bfloat16(), *wide), {}, "at most 248"),
        ("fp8_output_projection", (torch.zeros(1, 128).bfloat16(), *many, None), {}, "128, 33000 need 258 KiB"),
        ("fp8_mlp", (tokens, x_scale, *narrow, torch.zeros(128), *many, torch.zeros(33_000)), {}, "need 258 KiB"),
        ("fp8_mlp", (tokens, x_scale, *square, torch.zeros(8192), *square, torch.zeros(8192)), {}, "KiB of SBUF"),
        ("fp8_mlp", (tokens, x_scale, weight, scale, torch.zeros(6), *down, torch.zeros(5)), {}, "inner width 6"),
        (
            "fp8_qkv_projection",
            (tokens, x_scale, weight, scale, None),
            {"heads": (1, 1), "head_dim": 2, "dtype": torch.float32},
            "results in torch.float32",
        ),
    ]
    for op, tensors, options, reason in cases:
        choice = explain(op, *tensors, **options)
        assert choice.provider == "torch" and reason in choice.refusals["nki-simulator"], (op, choice)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: row_quantize(random(2, 3), form="e5m2"), "valid are e4m3, e4m3fn"),
        (lambda: quantize_mx(random(2, 32)), "valid are bfloat16"),
        (lambda: quantize_mx(random(2, 31).bfloat16()), "a multiple of 32"),
        (lambda: quantize_mx(random(2, 32).bfloat16(), rule="other"), "valid are ocp, doubled"),
        (lambda: pack_fp8_weight(random(2, 32)), "valid is float8_e4m3fn"),
        (lambda: adaln_modulate_fp8(random(1, 2, 3), random(1, 3), random(1, 3), gate=random(1, 3)), "go together"),
        (lambda: fp8_output_projection(random(1, 2, 129), *operands()[2:], None), "pack_fp8_weight makes"),
        (lambda: fp8_output_projection(random(1, 2, 128), operands()[2], random(5), None), "scale has shape"),
        (
            lambda: fp8_qkv_projection(random(1, 2, 128), *operands()[1:], None, heads=(1, 1), head_dim=2),
            "valid is float8_e4m3fn",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("lnc", [1, 2])
def test_real_shapes_fit(lnc):
    """The sizes of Wan2.2 A14B on one of four ranks, on shapes alone."""

    def spec(*shape, dtype="float32"):
        return TensorSpec(shape, dtype)

    rows, fp8 = 2100, "float8_e4m3fn"
    scales, weight = spec(rows, 1), spec(1280, 4 * 3840, dtype=fp8)
    gains, tables = (spec(1, 1280),) * 2, (spec(rows, 64),) * 2
    with settings(target="trn3", execute=False, check_live_capacity=True, symmetric_ranks=4):
        shared = (spec(1, 3840), spec(1, 3840), (10, 10), 128, gains, tables, EPSILON, 4, ((0, 1, 2, 3),), "bfloat16")
        kernels("qkv").fp8_qkv_projection[lnc](spec(rows, 5120, dtype=fp8), scales, weight, *shared)
        x, vectors = spec(rows, 1280, dtype="bfloat16"), (spec(1, 5120), spec(1, 5120))
        kernels("fp8").fp8_output_projection[lnc](x, spec(320, 4 * 5120, dtype=fp8), *vectors)
        up, down = spec(1280, 4 * 3456, dtype=fp8), spec(864, 4 * 5120, dtype=fp8)
        inner = (spec(864, 4), spec(864, 4))
        tokens = (spec(rows, 5120, dtype=fp8), spec(1, rows))
        kernels("fp8").fp8_mlp[lnc](*tokens, up, *inner, down, *vectors, "bfloat16")
        kernels("fp8").quantize_mx[lnc](spec(200, 5120, dtype="bfloat16"), fp8)
        stream, vector = spec(1, 200, 5120, dtype="bfloat16"), spec(1, 5120)
        kernels("norms").quantized_adaln_modulate[lnc](stream, (stream, vector), vector, vector, EPSILON, 448.0, fp8)
        kernels("norms").row_quantize[lnc](spec(200, 5120), 448.0, fp8)


@pytest.mark.parametrize(("width", "form"), [(5632, None), (5120, "float8_e4m3")])
def test_the_widest_rows_fit(width, form):
    stream, vector = TensorSpec((1, 1000, width), "float32"), TensorSpec((1, width), "float32")
    with settings(target="trn2", execute=False, check_live_capacity=True):
        if form is None:
            kernels("norms").gated_adaln_modulate(stream, stream, vector, vector, vector, EPSILON)
        else:
            gated = (stream, vector)
            kernels("norms").quantized_adaln_modulate(stream, gated, vector, vector, EPSILON, 240.0, form)
