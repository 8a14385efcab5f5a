# SPDX-License-Identifier: Apache-2.0
"""Planning a layout before it runs: tokens, memory, traffic, FLOPs and a roofline. Estimates, not measurements.

A model package describes its model as `ModelSizes`; nothing here knows one. docs/planning.md of the repository has
every formula and the source of every figure.
"""

from omni_neuron_parallel.planning.compute import Work, hbm_bytes, plan_work
from omni_neuron_parallel.planning.hardware import GIB, MEASURED, TARGETS, Figure, MeasuredMemory, Target
from omni_neuron_parallel.planning.layout import METHODS, Case, Layout, Method, PlanError, TokenSplit, VideoShape
from omni_neuron_parallel.planning.memory import Memory, MemoryItem, plan_memory, tiles_per_rank
from omni_neuron_parallel.planning.model import Linear, ModelSizes, Rows, Split, VaeSizes, Vector, Weights
from omni_neuron_parallel.planning.report import plan_as_json, suggestions_as_json
from omni_neuron_parallel.planning.roofline import Plan, Suggestion, Transfer, plan, suggest
from omni_neuron_parallel.planning.traffic import Traffic, plan_traffic

__all__ = [
    "GIB",
    "MEASURED",
    "METHODS",
    "TARGETS",
    "Case",
    "Figure",
    "Layout",
    "Linear",
    "MeasuredMemory",
    "Memory",
    "MemoryItem",
    "Method",
    "ModelSizes",
    "Plan",
    "PlanError",
    "Rows",
    "Split",
    "Suggestion",
    "Target",
    "TokenSplit",
    "Traffic",
    "Transfer",
    "VaeSizes",
    "Vector",
    "VideoShape",
    "Weights",
    "Work",
    "hbm_bytes",
    "plan",
    "plan_as_json",
    "plan_memory",
    "plan_traffic",
    "plan_work",
    "suggest",
    "suggestions_as_json",
    "tiles_per_rank",
]
