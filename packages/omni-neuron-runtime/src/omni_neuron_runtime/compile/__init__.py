# SPDX-License-Identifier: Apache-2.0
"""The compile route: which backend, its options, its cache, and the two backends that run on a CPU.

`omni_neuron_runtime` exports what others need; see docs/compilation.md for how a graph travels through these modules.
"""
