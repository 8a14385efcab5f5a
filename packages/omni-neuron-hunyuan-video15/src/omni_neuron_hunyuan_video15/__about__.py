# SPDX-License-Identifier: Apache-2.0
"""The version of this distribution; `hatch version` reads and writes it."""

__version__ = "0.1.0"
