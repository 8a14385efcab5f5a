# SPDX-License-Identifier: Apache-2.0
"""NKI kernels. Each module needs `nki` when it is imported, and imports nothing else but the standard library."""
