# SPDX-License-Identifier: Apache-2.0
"""Shared by this package's tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the command line's tests last: after `test_cli_generate`, caplog sees nothing of our loggers' warnings.

    The tests of the registry and of the executor then fail in the same process, though nothing is wrong with them. Why
    has not been found; each file passes in a process of its own, and in this order all do in one.
    """
    items.sort(key=lambda item: item.path.name.startswith("test_cli"))
