# SPDX-License-Identifier: Apache-2.0
from omni_neuron_wan22.__about__ import __version__
