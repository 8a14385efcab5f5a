# SPDX-License-Identifier: Apache-2.0
from omni_neuron_parallel.__about__ import __version__
