# SPDX-License-Identifier: Apache-2.0
"""docs/quantization.md: its stage YAML is one, and its settings mean what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from omni_neuron_wan22 import Fp8Settings
from vllm_omni_neuron.stage_config import to_deploy_config

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"


def test_the_documented_stage_is_one() -> None:
    [stage] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    [entry] = to_deploy_config(yaml.safe_load(stage))["stages"]
    settings = Fp8Settings.from_settings(entry["model_config"])
    assert settings == Fp8Settings(Path("/models/Wan_2.2_ComfyUI_Repackaged"))
    assert settings.row_mx == ("attn1", "attn2", "ffn")


def test_the_documented_python_settings_are_valid() -> None:
    [code] = re.findall(r"additional_config=(\{.*?\}),\n\)", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    settings = Fp8Settings.from_settings(yaml.safe_load(code))  # a Python literal that is YAML, too
    assert settings is not None and settings.row_mx == ()
