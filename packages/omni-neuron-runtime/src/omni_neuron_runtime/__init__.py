# SPDX-License-Identifier: Apache-2.0
from omni_neuron_runtime.__about__ import __version__
