# SPDX-License-Identifier: Apache-2.0
"""The two platform classes. Import the one you mean: vLLM asks for its own while it is itself being imported."""
