# SPDX-License-Identifier: Apache-2.0
import os
import runpy
import sys

import pytest

from omni_neuron_runtime import EnvironmentVariableError, env, environment_defaults


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_typed():
    assert env.get("VLLM_NEURON_CPU_MODE") is False
    assert env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S") == 600
    assert env.get("VLLM_PLUGINS") is None
    assert env.get("NEURON_VISIBLE_DEVICES") is None


def test_values_are_read_anew_and_typed(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("OMNI_NEURON_COLLECTIVE_TIMEOUT_S", "5")
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-2,7")
    monkeypatch.setenv("VLLM_PLUGINS", "a,b")
    assert env.get("VLLM_NEURON_CPU_MODE") is True
    assert env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S") == 5
    assert env.get("NEURON_VISIBLE_DEVICES") == [0, 1, 2, 7]
    assert env.get("VLLM_PLUGINS") == ["a", "b"]
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "0")
    assert env.get("VLLM_NEURON_CPU_MODE") is False


def test_empty_is_unset_except_for_names(monkeypatch):
    for name in env.VARIABLES:
        monkeypatch.setenv(name, "")
    assert not env.is_set("VLLM_NEURON_CPU_MODE")
    assert env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S") == 600
    assert env.is_set("VLLM_PLUGINS")
    assert env.get("VLLM_PLUGINS") == [""]


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("VLLM_NEURON_CPU_MODE", "yes", "0 or 1"),
        ("OMNI_NEURON_COLLECTIVE_TIMEOUT_S", "soon", "a whole number, at least 1"),
        ("OMNI_NEURON_COLLECTIVE_TIMEOUT_S", "0", "at least 1"),
        ("VLLM_NEURON_BACKEND", "cuda", "neuron_native"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9", "inf2 or trn1 or trn2 or trn3"),
        ("NEURON_VISIBLE_DEVICES", "3-1", '"0-3,7"'),
    ],
)
def test_errors_name_variable_value_and_valid_values(monkeypatch, name, value, valid):
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError) as error:
        env.get(name)
    assert name in str(error.value)
    assert repr(value) in str(error.value)
    assert valid in str(error.value)


def test_a_name_outside_the_table_is_an_error_with_the_nearest():
    with pytest.raises(KeyError, match="did you mean VLLM_NEURON_CPU_MODE"):
        env.get("VLLM_NEURON_CPU_MOD")


def test_the_page_is_written_and_checked(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "environment.md"

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["env", str(page), *arguments])
        runpy.run_module("omni_neuron_runtime.env", run_name="__main__")

    run()
    assert all(f"| `{name}` |" in page.read_text() for name in env.VARIABLES)
    run("--check")
    page.write_text(page.read_text() + "edited by hand\n")
    with pytest.raises(SystemExit) as stopped:
        run("--check")
    assert stopped.value.code == 1
    assert "is not current" in capsys.readouterr().err


def test_what_the_user_has_set_wins_over_defaults(monkeypatch):
    monkeypatch.setenv("THE_USERS", "own")
    monkeypatch.delenv("NOBODYS", raising=False)
    with environment_defaults({"THE_USERS": "ours", "NOBODYS": "ours"}) as kept:
        assert kept == {"THE_USERS": "own"}
        assert (os.environ["THE_USERS"], os.environ["NOBODYS"]) == ("own", "ours")
    assert (os.environ["THE_USERS"], "NOBODYS" in os.environ) == ("own", False)
