# SPDX-License-Identifier: Apache-2.0
"""Collectives of compiled graphs, executed on several ranks; the replica groups of layouts that only exist on paper."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_ranks import collectives_agree, masked_attention_agrees
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni_neuron_kernels import dispatch
from omni_neuron_parallel import (
    ContextMethod,
    RankPool,
    Topology,
    context_attention,
    destroy_parallel,
    get_group,
    initialize_parallel,
)
from omni_neuron_runtime import CompileError, compile_errors, declared_world, execute_on_all_ranks, lower_on_paper

LAYOUTS = [Topology(tp=t, cp=c, cfg=g) for t, c, g in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2)) if 1 < t * c * g <= 8]
LARGE = [Topology(tp=4, cp=8, cfg=2), Topology(tp=8, cp=4)]


@pytest.mark.parametrize("topology", [Topology(tp=2, cp=2), Topology(cp=2, cfg=2)], ids=str)
def test_neuron_check_runs_collectives(four_ranks: RankPool, topology: Topology, tmp_path: Path) -> None:
    for report in four_ranks.run(collectives_agree, topology, "neuron_check", str(tmp_path)):
        assert report["difference"] == 0


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_mask_is_data_of_one_graph(two_ranks: RankPool, method: str) -> None:
    for report in two_ranks.run(masked_attention_agrees, method):
        assert report["graphs"] == 2
        assert report["difference"] < 1e-5  # type: ignore[operator]


def _nodes_of_compiled_attention(method: ContextMethod, device: str = "cpu", **options: Any) -> list[str]:
    """Compiled as rank 1 of TP2×CP2: the calls in the graph, and the arguments of a ring's node that are no tensors."""
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                plain = [argument for argument in node.args if isinstance(argument, list | tuple | int)]
                called.append(" ".join(map(str, (node.target, *plain))))
        return graph.forward

    torch._dynamo.reset()
    q = torch.empty(1, 6, 2, 8, device=device)
    with declared_world(4, rank=1):
        initialize_parallel(Topology(tp=2, cp=2))
        try:
            group = get_group("cp")
            compiled = torch.compile(
                lambda q: context_attention(q, q, q, group=group, method=method, **options),
                backend=backend,
                fullgraph=True,
                dynamic=False,
            )
            with torch.inference_mode(), compile_errors("attention"):
                compiled(q)
        finally:
            destroy_parallel()
    return called


def test_the_ring_of_a_kernel_is_one_node_with_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("collective_permute" in call for call in _nodes_of_compiled_attention("ring"))
    candidates = dispatch._candidates
    taking = dispatch.Implementation(lambda q, *_, **__: q.clone(), lambda *_, **__: None, 100)
    fake = (dispatch._Candidate("some", "kernels", taking),)
    monkeypatch.setattr(dispatch, "_candidates", lambda op: fake if op == "ring_in_graph" else candidates(op))
    ring = [call for call in _nodes_of_compiled_attention("ring") if call.startswith(("omni_neuron", "_c10d"))]
    assert ring == ["omni_neuron_kernels.ring_attention [0, 2, 1, 3] 2 1"]
    gathered = " ".join(_nodes_of_compiled_attention("auto"))
    assert "all_gather" in gathered and "flash_attention" in gathered and "ring" not in gathered


@pytest.mark.parametrize(
    ("options", "reason"), [({}, "tensors on meta, not on a Neuron device"), ({"return_lse": True}, "have no kernel")]
)
def test_a_ring_that_only_the_host_can_compile_is_refused_for_a_device(options: dict[str, Any], reason: str) -> None:
    message = rf"method = 'ring' cannot be compiled for meta \(.*{reason}.*valid are gather and auto"
    with pytest.raises(CompileError, match=message):
        _nodes_of_compiled_attention("ring", "meta", **options)
    assert not any("ring" in call for call in _nodes_of_compiled_attention("auto", "meta"))


def test_stablehlo_collectives_on_four_ranks(four_ranks: RankPool, tmp_path: Path) -> None:
    """One rank lowers and compiles, the other three load what it made; then a warm start on all of them."""
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    cold, warm = (
        four_ranks.run(collectives_agree, Topology(tp=2, cp=2), "neuron_stablehlo", str(tmp_path)) for _ in range(2)
    )
    assert [report["graphs"] for report in cold + warm] == [1] * 8
    assert sum(report["lowerings"] for report in cold) == sum(report["compilations"] for report in cold) == 1
    assert all(report["lowerings"] == report["compilations"] == 0 for report in warm)
    assert {tuple(report["keys"]) for report in cold + warm} == {tuple(cold[0]["keys"])}
    assert len(cold[0]["keys"]) == 1
    assert max(report["difference"] for report in cold + warm) < 1e-5


class Collectives(torch.nn.Module):
    """Every collective on every axis of more than one rank."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        groups = [get_group(axis) for axis in ("tp", "cp", "cfg")]
        return [
            result
            for group in groups
            for result in (
                group.all_reduce(x),
                group.all_gather(x, 1),
                group.reduce_scatter(x, 0),
                group.start_rotate(x)() + 1,
            )
        ]


def test_eight_ranks_in_one_process() -> None:
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    topology = Topology(tp=2, cp=2, cfg=2)
    with declared_world(topology.world_size):
        initialize_parallel(topology)
        try:
            [graph] = lower_on_paper(lambda: (Collectives(), {"x": torch.empty(4, 6)}), "collectives")
        finally:
            destroy_parallel()
    given = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(topology.world_size)]
    results = execute_on_all_ranks(graph.text, [[x] for x in given])
    for place, axis in enumerate(("tp", "cp", "cfg")):
        for group in topology.groups(axis):
            parts = [given[rank] for rank in group]
            for index, rank in enumerate(group):
                reduced, gathered, scattered, rotated = results[rank][4 * place : 4 * place + 4]
                torch.testing.assert_close(reduced, sum(parts))
                assert torch.equal(gathered, torch.cat(parts, dim=1))
                torch.testing.assert_close(scattered, sum(parts).chunk(len(group))[index])  # type: ignore[union-attr]
                assert torch.equal(rotated, parts[index - 1] + 1)


@pytest.mark.parametrize("topology", LAYOUTS + LARGE, ids=str)
def test_replica_groups_in_the_text_are_the_topologys(topology: Topology) -> None:
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    from omni_neuron_runtime.compile.graph_checks import check_graph
    from omni_neuron_runtime.compile.lowering import import_graph

    axes = [axis for axis in ("tp", "cp", "cfg") if topology.size(axis) > 1]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [get_group(axis).all_reduce(x) for axis in axes]

    texts = set()
    for rank in (0, topology.world_size - 1):
        dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
        try:
            initialize_parallel(topology)
            graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(torch.randn(2))
            check_graph(graph, "graph")
            texts.add(import_graph(graph, "graph").text)
        finally:
            destroy_parallel()
            dist.destroy_process_group()
    [text] = texts
    written = [
        [[int(rank) for rank in group.split(",")] for group in re.findall(r"\[([\d, ]+)\]", line)]
        for line in re.findall(r"replica_groups = dense<\[(.*?)\]> :", text)
    ]
    assert written == [[list(group) for group in topology.groups(axis)] for axis in axes]
    for groups in written:
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
