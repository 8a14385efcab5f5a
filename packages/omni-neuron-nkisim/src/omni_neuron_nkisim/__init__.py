# SPDX-License-Identifier: Apache-2.0
"""A NumPy functional simulator of AWS's NKI language: runs kernels, collectives included, where no Trainium is.

It checks what the public documentation states, computes in float32, counts instructions and estimates their cost. It
was never compared with AWS's simulator or a device.
"""

from omni_neuron_nkisim.__about__ import __version__
from omni_neuron_nkisim.arguments import TensorSpec
from omni_neuron_nkisim.configuration import Settings, settings
from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.install import install, install_if_asked, is_installed, uninstall
from omni_neuron_nkisim.launch import Kernel, jit, run_spmd, simulate
from omni_neuron_nkisim.lint import Finding, lint
from omni_neuron_nkisim.stats import CoreStats, RunStats, last_stats, report

__all__ = [
    "CoreStats",
    "Finding",
    "Kernel",
    "NkiValidationError",
    "RunStats",
    "Settings",
    "TensorSpec",
    "__version__",
    "install",
    "is_installed",
    "jit",
    "last_stats",
    "lint",
    "report",
    "run_spmd",
    "settings",
    "simulate",
    "uninstall",
]

install_if_asked()
