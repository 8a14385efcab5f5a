# SPDX-License-Identifier: Apache-2.0
"""A model package's settings, whichever way vLLM-Omni hands them on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_omni_neuron import model_settings


def test_both_ways_are_one() -> None:
    config = SimpleNamespace(model_config={"a": 1, "b": 2}, additional_config={"b": 2, "c": 3})
    assert model_settings(config) == {"a": 1, "b": 2, "c": 3}
    assert model_settings(SimpleNamespace(model_config=None, additional_config=None)) == {}
    assert config.additional_config == {"b": 2, "c": 3}


def test_two_values_of_one_name() -> None:
    config = SimpleNamespace(model_config={"a": 1}, additional_config={"a": 2})
    with pytest.raises(ValueError, match="a is 1 in model_config and 2 in additional_config"):
        model_settings(config)
