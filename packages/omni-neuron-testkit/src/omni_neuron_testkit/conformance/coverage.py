# SPDX-License-Identifier: Apache-2.0
"""The published model without its weights: checkpoint keys against parameters, and the planner's sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_neuron_parallel import Topology, destroy_parallel, initialize_parallel
from omni_neuron_runtime import declared_world

from .case import Published
from .ranks import load

TILE_RANKS = 8
Publish = Callable[[], Mapping[str, Published]]


def problems(published: Publish, spec: Any, tp_sizes: Sequence[int]) -> list[str]:
    """What does not fit between parameters, mapping and keys, in sentences, for each TP size that the spec allows."""
    found = []
    limit = spec.axes.get("tp", 1)
    for size in dict.fromkeys((1, *tp_sizes)):
        if limit is not None and size > limit:
            continue
        for component, published_one in in_declared_world(size, published).items():
            found += [f"{component}, TP {size}: {problem}" for problem in _problems_of(Published(*published_one), size)]
    components = set(published())
    found += [
        f"{component.name}: published() leaves it out, and its kind is {component.kind}"
        for component in spec.of_kind("transformer")
        if component.name not in components and not component.optional
    ]
    return found


def count_parameters(published: Mapping[str, Published]) -> int:
    """Parameters of all components."""
    return sum(parameter.numel() for one in published.values() for parameter in Published(*one).module.parameters())


def in_declared_world(tp: int, make: Publish) -> Mapping[str, Published]:
    """What `make` returns on one of `tp` ranks, the others of which are merely declared."""
    if tp == 1:
        return make()
    with declared_world(tp):
        initialize_parallel(Topology(tp=tp))
        try:
            return make()
        finally:
            destroy_parallel()


def _problems_of(one: Published, size: int) -> list[str]:
    from vllm_omni_neuron.sdk import mapping_coverage

    return mapping_coverage(one.module, dict(one.mapping), one.shapes, tuple(one.unused), size=size).problems


def check_plan(spec: Any, name: str, real_size: tuple[int, int, int], published: Publish) -> dict[str, Any]:
    """Plan the published model at its real size; figures for the report.

    Raises:
        AssertionError: there is no plan, its weights are not the modules', or no layout fits.
    """
    from omni_neuron_parallel.planning import GIB, TARGETS, VideoShape, suggest

    named = [known for known in spec.plans if known]
    chosen = name or (named[0] if len(named) == 1 else "")
    assert chosen in named, (
        f"spec.plans has {', '.join(named) or 'no published model'}; name one in published_name, or give a reason in "
        "not_supported['memory_plan']"
    )
    sizes = load(spec.plans[chosen])()
    planned = {"transformer": sizes.dit.parameters(1), "text_encoder": sizes.text_encoder.parameters(1)}
    kinds = {component.name: component.kind for component in spec.components}
    for component, one in published().items():
        if kinds.get(component) in planned:
            real = sum(parameter.numel() for parameter in Published(*one).module.parameters())
            expected = planned[kinds[component]]
            assert real == expected, f"{component} has {real} parameters, the plan of {chosen} counts {expected}"
    shape, target = VideoShape(*real_size), TARGETS["trn2"]
    # Whole frames on one rank; where that is too much, tiles on several, if the model has them.
    decoding = (1, TILE_RANKS) if "vae_patch" in spec.axes else (1,)
    plans = (one.plan for ranks in decoding for one in suggest(sizes, shape, target, vae_patch=ranks))
    best = next((plan for plan in plans if plan.memory.fits), None)
    assert best is not None, f"{chosen} at {'×'.join(map(str, real_size))} fits no layout of a trn2"
    tiles = f", VAE patch {best.case.layout.vae_patch}" if best.case.layout.vae_patch > 1 else ""
    return {"model": chosen, "layout": f"{best.case.layout}{tiles}", "GiB a rank": best.memory.peak / GIB}
