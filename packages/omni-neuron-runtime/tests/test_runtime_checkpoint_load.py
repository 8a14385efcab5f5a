# SPDX-License-Identifier: Apache-2.0
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omni_neuron_runtime import (
    CheckpointError,
    SafetensorsCheckpoint,
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)
from omni_neuron_runtime.weights.files import read_header
from omni_neuron_runtime.weights.plan import ParameterRead
from omni_neuron_runtime.weights.prefetch import READ_THROUGH_BYTES, planned_ranges

HIDDEN, INNER = 16, 32
METHODS = ("load_sharded", "load_sharded_pipelined")
MAPPING = {
    "qkv": ["q.weight", "k.weight", "v.weight"],
    "up": "up.weight",
    "up_bias": "up.bias",
    "down": ["down.weight"],
    "down_bias": "down.bias",
    "norm": "norm.weight",
    "scale": "scale",
}


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    shapes = {f"{name}.weight": (HIDDEN, HIDDEN) for name in "qkv"}
    shapes |= {"up.weight": (INNER, HIDDEN), "up.bias": (INNER,), "down.weight": (HIDDEN, INNER)}
    shapes |= {"down.bias": (HIDDEN,), "norm.weight": (HIDDEN,), "scale": ()}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path, tensors):
    keys = sorted(tensors)
    for number in range(3):
        part = {key: tensors[key] for key in keys[number::3]}
        save_file(part, tmp_path / f"part{number}.safetensors")
    return tmp_path


def _model(tp, dtype=torch.float32):
    model = nn.Module()

    def add(name, shape, loader=None):
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        if loader is not None:
            set_weight_loader(parameter, loader)
        model.register_parameter(name, parameter)

    hidden, inner = HIDDEN // tp, INNER // tp
    add("qkv", (3 * hidden, HIDDEN), fused_qkv_weight_loader(hidden, hidden, 0, tp))
    add("up", (inner, HIDDEN), sharding_weight_loader(0, inner, tp))
    add("up_bias", (inner,), sharding_weight_loader(0, inner, tp))
    add("down", (HIDDEN, inner), sharding_weight_loader(1, inner, tp))
    add("down_bias", (HIDDEN,), scaled_bias_loader(1 / tp))
    add("norm", (HIDDEN,))
    add("scale", ())
    return model


def _expected(tensors, tp, rank):
    hidden, inner = HIDDEN // tp, INNER // tp
    rows, columns = slice(rank * hidden, (rank + 1) * hidden), slice(rank * inner, (rank + 1) * inner)
    return {
        "qkv": torch.cat([tensors[f"{name}.weight"][rows] for name in "qkv"]),
        "up": tensors["up.weight"][columns],
        "up_bias": tensors["up.bias"][columns],
        "down": tensors["down.weight"][:, columns],
        "down_bias": tensors["down.bias"] / tp,
        "norm": tensors["norm.weight"],
        "scale": tensors["scale"],
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_its_shard(folder, tensors, method, tp, dtype):
    for rank in range(tp):
        model = _model(tp, dtype)
        result = getattr(SafetensorsCheckpoint(folder), method)(rank, tp, model, MAPPING, "cpu")
        assert list(result.state_dict) == [name for name, _ in model.named_parameters()]
        assert result.missing_keys == result.unexpected_keys == []
        for name, expected in _expected(tensors, tp, rank).items():
            assert torch.equal(result.state_dict[name], expected.to(dtype)), name
            assert result.state_dict[name].is_contiguous()
        model.load_state_dict(result.state_dict, assign=True)
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_rank_reads_its_slices_and_nothing_else(folder, tensors, method):
    replicated = 4 * (2 * HIDDEN + 1)
    sharded = sum(tensor.nbytes for tensor in tensors.values()) - replicated
    for tp in (1, 2, 4, 8):
        checkpoint = SafetensorsCheckpoint(folder)
        getattr(checkpoint, method)(tp - 1, tp, _model(tp), MAPPING, "cpu")
        assert checkpoint.stats.bytes_read == sharded // tp + replicated
        assert checkpoint.stats.parameters == len(MAPPING)


def test_results_own_their_memory(folder, tensors, method):
    result = getattr(SafetensorsCheckpoint(folder), method)(0, 1, _model(1), MAPPING, "cpu")
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.write(b"\0" * file.stat().st_size)
    for name, expected in _expected(tensors, 1, 0).items():
        assert torch.equal(result.state_dict[name], expected), name
        assert result.state_dict[name].untyped_storage().nbytes() == expected.nbytes


def test_a_part_of_a_larger_tensor_does_not_keep_it_alive(folder, method):
    model = _model(1)
    set_weight_loader(model.norm, SafetensorsWeightLoader(lambda slices, rank: slices[0][:].repeat(64)[:HIDDEN]))
    result = getattr(SafetensorsCheckpoint(folder), method)(0, 1, model, MAPPING, "cpu")
    assert result.state_dict["norm"].untyped_storage().nbytes() == 4 * HIDDEN


def test_dtype_override_casts_floating_parameters_only(tmp_path, method):
    save_file({"w": torch.randn(4).double(), "n": torch.arange(4)}, tmp_path / "x.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(4, device="meta"))
    model.n = nn.Parameter(torch.empty(4, dtype=torch.int64, device="meta"), requires_grad=False)
    load = getattr(SafetensorsCheckpoint(tmp_path), method)
    result = load(0, 1, model, {"w": "w", "n": "n"}, "cpu", dtype_override=torch.bfloat16)
    assert result.state_dict["w"].dtype == torch.bfloat16
    assert result.state_dict["n"].dtype == torch.int64
    with pytest.raises(CheckpointError, match=r"'w' from 'n' I64.*torch.int64 cannot be cast to torch.float32"):
        load(0, 1, model, {"w": "n", "n": "w"}, "cpu")


def test_loaders_see_the_checkpoints_dtype(tmp_path, method):
    save_file({"w": torch.tensor([1.5, 2.5]).to(torch.float8_e4m3fn)}, tmp_path / "x.safetensors")
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2, device="meta"))
    seen = []

    def transform(slices, rank):
        seen.append(slices[0].get_dtype())
        part = slices[0][:]
        seen.append(part.dtype)
        return part.float() * 2

    set_weight_loader(model.w, SafetensorsWeightLoader(transform))
    result = getattr(SafetensorsCheckpoint(tmp_path), method)(0, 1, model, {"w": "w"}, "cpu")
    assert result.state_dict["w"].tolist() == [3.0, 5.0]
    assert seen[-2:] == ["F8_E4M3", torch.float8_e4m3fn]


def test_missing_keys_are_named_with_their_parameters_and_the_nearest(folder, method):
    mapping = MAPPING | {"up": "ups.weight", "qkv": ["q.weight", "nothing_like_it", "v.weight"]}
    checkpoint = SafetensorsCheckpoint(folder)
    with pytest.raises(CheckpointError) as error:
        getattr(checkpoint, method)(0, 1, _model(1), mapping, "cpu")
    message = str(error.value)
    assert "checkpoint key(s) not found for 2 parameter(s)" in message
    assert "up wants 'ups.weight' (nearest: 'up.weight')" in message
    assert "qkv wants 'nothing_like_it'" in message
    assert checkpoint.stats.bytes_read == 0
    result = getattr(checkpoint, method)(0, 1, _model(1), mapping, "cpu", strict=False)
    assert result.missing_keys == ["nothing_like_it", "ups.weight"]
    assert result.state_dict.keys() == MAPPING.keys() - {"up", "qkv"}


def test_unexpected_keys_are_returned_for_the_caller_to_judge(folder, method):
    save_file({"lora.a": torch.zeros(1), "extra": torch.zeros(1)}, folder / "part9.safetensors")
    result = getattr(SafetensorsCheckpoint(folder), method)(0, 1, _model(1), MAPPING, "cpu")
    assert result.unexpected_keys == ["extra", "lora.a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "up.bias", "up_bias": "up.bias"}, "'up.bias' is mapped 2 times: by norm, up_bias"),
        ({"qkv": ["q.weight", "q.weight", "v.weight"]}, "'q.weight' is mapped 2 times: by qkv"),
        ({"norms": "norm.bias"}, r"no parameter of the model: norms \(nearest: 'norm'\)"),
        ({"norm": []}, "parameters without a checkpoint key: norm"),
    ],
)
def test_a_wrong_mapping_is_an_error_even_where_not_strict(folder, method, change, message):
    with pytest.raises(CheckpointError, match=message):
        getattr(SafetensorsCheckpoint(folder), method)(0, 1, _model(1), MAPPING | change, "cpu", strict=False)


def test_a_wrong_shape_names_parameter_key_file_and_both_shapes(folder, tensors, method):
    tensors["norm.weight"] = torch.zeros(HIDDEN + 2)
    for file in folder.glob("*.safetensors"):
        if "norm.weight" in read_header(file):
            save_file({key: tensors[key] for key in read_header(file)}, file)
            name = file.name
    with pytest.raises(CheckpointError) as error:
        getattr(SafetensorsCheckpoint(folder), method)(0, 1, _model(1), MAPPING, "cpu")
    message = str(error.value)
    for part in ("parameter 'norm'", "'norm.weight' F32 [18]", name, "expected shape [16], found [18]"):
        assert part in message


def test_a_loaders_own_error_names_parameter_key_and_file(folder, method):
    model = _model(1)
    set_weight_loader(model.up, sharding_weight_loader(0, 16, 4))
    with pytest.raises(CheckpointError) as error:
        getattr(SafetensorsCheckpoint(folder), method)(0, 4, model, MAPPING, "cpu")
    message = str(error.value)
    for part in (
        "parameter 'up'",
        "'up.weight' F32 [32, 16]",
        ".safetensors",
        "holds 32, expected 64 (4 shards of 16)",
    ):
        assert part in message


def test_the_rank_is_checked(folder, method):
    with pytest.raises(ValueError, match="rank 2 is not a rank of world size 2; valid: 0 to 1"):
        getattr(SafetensorsCheckpoint(folder), method)(2, 2, _model(2), MAPPING, "cpu")


def test_a_file_that_vanishes_after_the_check(folder, method):
    checkpoint = SafetensorsCheckpoint(folder)
    checkpoint.validate()
    for file in checkpoint.files:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"part\d.safetensors"):
        getattr(checkpoint, method)(0, 1, _model(1), MAPPING, "cpu")


def _weight_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]


def test_the_pipeline_leaves_no_thread_behind_whether_it_works_or_fails(folder):
    model = _model(1)
    SafetensorsCheckpoint(folder).load_sharded_pipelined(0, 1, model, MAPPING, "cpu")
    assert _weight_threads() == []

    def broken(slices, rank):
        raise ZeroDivisionError("in the loader")

    set_weight_loader(model.norm, SafetensorsWeightLoader(broken))
    with pytest.raises(CheckpointError, match=r"'norm' from 'norm.weight'.*ZeroDivisionError") as error:
        SafetensorsCheckpoint(folder).load_sharded_pipelined(0, 1, model, MAPPING, "cpu")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert _weight_threads() == []


def test_an_error_of_the_transfer_stops_the_other_stages(folder):
    with pytest.raises(RuntimeError, match="nowhere"):
        SafetensorsCheckpoint(folder).load_sharded_pipelined(0, 1, _model(1), MAPPING, "nowhere")
    assert _weight_threads() == []


def test_a_stage_that_hangs_ends_in_an_error_that_says_where(folder):
    model = _model(1)
    release = threading.Event()

    def hang(slices, rank):
        whole = slices[0][:]
        release.wait(20)
        return whole

    set_weight_loader(model.norm, SafetensorsWeightLoader(hang))
    start = time.monotonic()
    threading.Timer(1.5, release.set).start()
    with pytest.raises(CheckpointError, match=r"stalled: nothing arrived within 0.3 s \(.*read: parameter 'norm'"):
        SafetensorsCheckpoint(folder, stall_timeout_s=0.3).load_sharded_pipelined(0, 1, model, MAPPING, "cpu")
    assert time.monotonic() - start < 10
    assert _weight_threads() == []


def test_few_parameters_are_in_flight(tmp_path):
    count = 40
    save_file({f"w{number:02}": torch.zeros(4) for number in range(count)}, tmp_path / "x.safetensors")
    model = nn.Module()
    made, transferred, ahead = [], [], []

    class Counted(SafetensorsWeightLoader):
        def load(self, slices, rank):
            value = super().load(slices, rank)  # the planning run ends in here
            made.append(1)
            ahead.append(len(made) - len(transferred))
            return value

    for number in range(count):
        parameter = nn.Parameter(torch.empty(4, device="meta"))
        set_weight_loader(parameter, Counted())
        model.register_parameter(f"w{number:02}", parameter)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    consume = checkpoint._consume

    def slow_consume(pipeline, ready, stages, device):
        items = ready.items

        def slow_items(timeout_s=None):
            for item in items(timeout_s):
                time.sleep(0.002)
                transferred.append(1)
                yield item

        ready.items = slow_items
        return consume(pipeline, ready, stages, device)

    checkpoint._consume = slow_consume
    checkpoint.load_sharded_pipelined(0, 1, model, {f"w{n:02}": f"w{n:02}" for n in range(count)}, "cpu")
    assert len(made) == count
    assert max(ahead) <= 5


def _ranges(tmp_path, loader, shape, tp_rank, dtype=torch.float32):
    save_file({"first": torch.zeros(3), "w": torch.zeros(shape, dtype=dtype)}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["w"]
    read = ParameterRead("w", torch.Size(()), dtype, loader, (entry,))
    return entry, planned_ranges(read, tp_rank)


def test_prefetch_of_rows_is_one_exact_range(tmp_path):
    entry, [run] = _ranges(tmp_path, sharding_weight_loader(0, 4, 4), (16, 10), 2)
    assert (run.start, run.length) == (entry.start + 2 * 4 * 10 * 4, 4 * 10 * 4)


def test_prefetch_of_columns_reads_small_gaps_through_and_skips_large_ones(tmp_path):
    entry, [run] = _ranges(tmp_path, sharding_weight_loader(1, 4, 4), (8, 16), 1)
    assert (run.start, run.length) == (entry.start + 4 * 4, (7 * 16 + 4) * 4)
    wide = READ_THROUGH_BYTES // 4
    entry, runs = _ranges(tmp_path, sharding_weight_loader(1, wide, 4), (3, 4 * wide), 1)
    assert [(run.start - entry.start, run.length) for run in runs] == [
        ((4 * row + 1) * 4 * wide, 4 * wide) for row in range(3)
    ]


def test_prefetch_takes_nothing_for_padding_and_for_loaders_that_need_data(tmp_path):
    assert _ranges(tmp_path, sharding_weight_loader(0, 2, 4, pad_shard=True), (5, 3), 3)[1] == []
    loader = SafetensorsWeightLoader(lambda slices, rank: slices[0][int(slices[0].missing)])
    assert _ranges(tmp_path, loader, (4,), 0)[1] == []


def test_no_process_group_is_needed(folder):
    assert not torch.distributed.is_initialized()
    SafetensorsCheckpoint(folder).load_sharded_pipelined(3, 4, _model(4), MAPPING, "cpu")


def test_a_few_tensors_are_read_whole(folder, tensors):
    read = SafetensorsCheckpoint(folder).read(["scale", "up.weight"])
    assert list(read) == ["scale", "up.weight"]
    for key, tensor in read.items():
        assert torch.equal(tensor, tensors[key])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        SafetensorsCheckpoint(folder).read(["other"])
