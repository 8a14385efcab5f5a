# SPDX-License-Identifier: Apache-2.0
"""A lint for the Python subset that NKI kernels may use: `lint(paths)`, or `python -m omni_neuron_nkisim.lint FILES`.

The simulator runs any Python; the compiler does not. The whole grammar is not published, so a file without findings may
still be refused.
"""

from omni_neuron_nkisim.lint.reach import Finding, lint

__all__ = ["Finding", "lint"]
