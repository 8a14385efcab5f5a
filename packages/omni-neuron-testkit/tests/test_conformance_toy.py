# SPDX-License-Identifier: Apache-2.0
"""The toy, which has no fault, passes the whole kit."""

from __future__ import annotations

import pytest
from conformance_toy_reference import ToySuite

pytestmark = pytest.mark.usefixtures("installed_toy")


class TestToy(ToySuite):
    pass
