# SPDX-License-Identifier: Apache-2.0
"""Training of the shapes model: a tiny checkpoint of Wan2.2's two-expert layout, from scratch on CPU cores.

`train.py` beside this package runs it; the stages are in `stages`, sizes and step counts in `budget`.
"""
