# SPDX-License-Identifier: Apache-2.0
from vllm_omni_neuron.__about__ import __version__
