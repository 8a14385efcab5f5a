# SPDX-License-Identifier: Apache-2.0
"""A toy text-to-video model: the example of a model package for vllm-omni-neuron."""
