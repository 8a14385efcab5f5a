# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from omni_neuron_runtime import (
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    get_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)


class MemorySlice:
    """A `TensorSlice` over a tensor in memory that notes how many elements were taken."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.taken = 0

    def get_shape(self):
        return list(self.tensor.shape)

    def get_dtype(self):
        return "F32"

    def __getitem__(self, index):
        part = self.tensor[index]
        self.taken += part.numel()
        return part


def weight(*shape):
    return MemorySlice(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape))


def test_the_default_takes_exactly_one_whole_tensor():
    parameter = nn.Parameter(torch.empty(2, 3))
    whole = weight(2, 3)
    assert torch.equal(get_weight_loader(parameter).load([whole], rank=5), whole.tensor)
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"takes exactly 1 checkpoint tensor.*got {count}"):
            get_weight_loader(parameter).load([weight(2)] * count, 0)


def test_a_loader_is_an_attribute_of_the_parameter():
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    loader = SafetensorsWeightLoader(lambda slices, rank: slices[0][:] * rank)
    set_weight_loader(parameter, loader)
    assert get_weight_loader(parameter) is parameter.weight_loader is loader
    assert torch.equal(loader.load([weight(2)], 3), torch.tensor([0.0, 3.0]))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_shards_tile_the_tensor_and_read_nothing_else(dim, transposed):
    whole = weight(8, 12)
    size = whole.tensor.shape[dim] // 4
    loader = sharding_weight_loader(dim, size, 4, is_storage_transposed=transposed)
    shards = []
    for rank in range(4):
        stored = MemorySlice(whole.tensor.t().contiguous()) if transposed else MemorySlice(whole.tensor)
        shards.append(loader.load([stored], rank))
        assert shards[-1].is_contiguous()
        assert stored.taken == 8 * 12 // 4
    assert torch.equal(torch.cat(shards, dim), whole.tensor)


def test_the_shard_index_repeats_over_ranks():
    loader = sharding_weight_loader(0, 2, 2)
    assert torch.equal(loader.load([weight(4)], 5), torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_last_shards_are_padded_with_zeros(size, dim):
    shape = (size, 3) if dim == 0 else (3, size)
    whole = weight(*shape)
    shards = [sharding_weight_loader(dim, 2, 4, pad_shard=True).load([whole], rank) for rank in range(4)]
    joined = torch.cat(shards, dim)
    assert joined.shape[dim] == 8
    assert torch.equal(joined.narrow(dim, 0, size), whole.tensor)
    assert not joined.narrow(dim, size, 8 - size).any()


def test_padding_of_a_transposed_tensor():
    stored = weight(3, 5)  # [in, out] of a parameter [out, in]
    shards = [sharding_weight_loader(0, 2, 4, True, pad_shard=True).load([stored], rank) for rank in range(4)]
    joined = torch.cat(shards)
    assert torch.equal(joined[:5], stored.tensor.t())
    assert not joined[5:].any()
    assert shards[3].shape == (2, 3)  # begins past the end of the tensor


@pytest.mark.parametrize(
    ("loader", "shape", "message"),
    [
        (sharding_weight_loader(0, 2, 4), (9, 3), r"dim 0 of shape \[9, 3\] holds 9, expected 8 \(4 shards of 2\)"),
        (sharding_weight_loader(0, 2, 4), (7, 3), "holds 7, expected 8"),
        (sharding_weight_loader(0, 2, 4, pad_shard=True), (9, 3), "holds 9, expected at most 8"),
        (sharding_weight_loader(1, 2, 4), (8,), r"no dim 1 to shard in shape \[8\]"),
        (sharding_weight_loader(0, 2, 4, True), (8, 1, 1), "stored transposed has at most two dims"),
        (scaled_bias_loader(0.5), (8, 1), r"from a tensor of 1 dim\(s\), found shape \[8, 1\]"),
        (scaled_bias_loader(0.5, padded_size=4), (8,), "bias of 8 does not fit into the padded size 4"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_both_sizes(loader, shape, message):
    with pytest.raises(ValueError, match=message):
        loader.load([weight(*shape)], 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_qkv_keeps_each_ranks_heads_together(transposed):
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    stored = [MemorySlice(part.t().contiguous() if transposed else part) for part in (q, k, v)]
    loader = fused_qkv_weight_loader(4, 2, 0, 2, is_storage_transposed=transposed)
    for rank in range(2):
        expected = torch.cat([q[4 * rank : 4 * rank + 4], k[2 * rank : 2 * rank + 2], v[2 * rank : 2 * rank + 2]])
        assert torch.equal(loader.load(stored, rank), expected)
    with pytest.raises(ValueError, match=r"fused QKV.*exactly 3 checkpoint tensor\(s\), got 2"):
        loader.load(stored[:2], 0)
    with pytest.raises(ValueError, match="holds 8, expected 4"):
        loader.load([stored[0]] * 3, 0)


def test_fused_qkv_biases():
    loader = fused_qkv_weight_loader(2, 2, 0, 2)
    assert loader.load([weight(4), weight(4), weight(4)], 1).tolist() == [2.0, 3.0] * 3


def test_a_scaled_bias_is_whole_scaled_once_and_padded():
    loader = scaled_bias_loader(1 / 4, padded_size=5)
    assert loader.load([weight(3)], 2).tolist() == [0.0, 0.25, 0.5, 0.0, 0.0]
    # Rounded once: the product of a bfloat16 bias is not rounded to bfloat16 before the cast to the parameter's dtype.
    bias = MemorySlice(torch.tensor([1.0078125], dtype=torch.bfloat16))
    assert scaled_bias_loader(1 / 5).load([bias], 0).item() == pytest.approx(1.0078125 / 5, rel=1e-7)
    double = MemorySlice(torch.tensor([1 / 3], dtype=torch.float64))
    assert scaled_bias_loader(1 / 5).load([double], 0).item() == 1 / 3 * (1 / 5)
