# SPDX-License-Identifier: Apache-2.0
"""Environment profiles: merged, with conflicts by name, and what the user has set."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest

from vllm_omni_neuron import environment, preflight
from vllm_omni_neuron.registry import RegisteredModel
from vllm_omni_neuron.sdk import BASE_PROFILE, EnvironmentProfile, ProfileError, merge_profiles

PAGE = "NEURON_SCRATCHPAD_PAGE_SIZE"
TIMEOUT = "OMNI_NEURON_COMPILE_TIMEOUT_S"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BASE_PROFILE.variables, TIMEOUT):
        monkeypatch.delenv(name, raising=False)


def test_a_packages_own_value_goes_before_the_bases_and_is_named() -> None:
    merged = merge_profiles(
        BASE_PROFILE, EnvironmentProfile("acme", {PAGE: "1024", TIMEOUT: "14400"}), EnvironmentProfile("x", {"X": "1"})
    )
    assert merged.variables == {**BASE_PROFILE.variables, PAGE: "1024", TIMEOUT: "14400", "X": "1"}
    assert merged.sources == {**dict.fromkeys(BASE_PROFILE.variables, "base"), PAGE: "acme", TIMEOUT: "acme", "X": "x"}
    assert [str(conflict) for conflict in merged.conflicts] == [f"{PAGE}=1024 (acme) in place of 2048 (base)"]


def test_the_base_is_what_the_contract_of_neurons_packages_asks_for() -> None:
    assert BASE_PROFILE.variables == {
        "NEURON_LOGICAL_NC_CONFIG": "2",
        PAGE: "2048",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "TORCH_NEURONX_VOCAB_SHARDING_SPMD_DISABLE": "1",
        "VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND": "1",
    }


def test_two_packages_that_disagree_are_named_with_both_values() -> None:
    own = [EnvironmentProfile("acme", {TIMEOUT: "60"}), EnvironmentProfile("zeta", {TIMEOUT: "90"})]
    with pytest.raises(ProfileError, match=f"{TIMEOUT} is '60' in the profile acme and '90' in the profile zeta"):
        merge_profiles(BASE_PROFILE, *own)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (TIMEOUT, "soon", f"profile acme: {TIMEOUT}='soon' is not valid"),
        ("VLLM_NEURON_CPU_MODE", "1", "profile acme sets VLLM_NEURON_CPU_MODE, which is for the user to set"),
        ("X", 1, "profile acme: X is 1; write it as text"),
    ],
)
def test_what_a_profile_cannot_set(variable: str, value: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        merge_profiles(BASE_PROFILE, EnvironmentProfile("acme", {variable: value}))


def test_workers_get_the_models_environment_and_the_users_value_wins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = SimpleNamespace(environment={TIMEOUT: "14400", PAGE: "1024"})
    model = RegisteredModel("AcmePipeline", "Acme", "acme", "acme", "acme-video", "1.2")
    monkeypatch.setattr(RegisteredModel, "load_spec", lambda self: spec)
    monkeypatch.setattr(environment, "registered_model", lambda architecture: model)
    monkeypatch.setenv(TIMEOUT, "600")
    profile = environment.profile_of("AcmePipeline")
    own = [variable for variable in environment.resolve(profile) if variable.source != "base"]
    assert own == [
        environment.Variable(PAGE, "1024", "acme-video"),
        environment.Variable(TIMEOUT, "600", "user", replaced="14400"),
    ]
    with caplog.at_level(logging.INFO), preflight.model_environment(SimpleNamespace(model_class_name="AcmePipeline")):
        assert (os.environ[PAGE], os.environ[TIMEOUT]) == ("1024", "600")
    assert PAGE not in os.environ
    said = caplog.text
    assert f"environment of AcmePipeline: {PAGE}=1024 (acme-video) in place of 2048 (base)" in said
    assert f"{TIMEOUT}='600' is set and stays; the profile of AcmePipeline (acme-video) has '14400'" in said
