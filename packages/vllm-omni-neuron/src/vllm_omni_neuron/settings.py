# SPDX-License-Identifier: Apache-2.0
"""What a user tells a model package through vLLM-Omni's engine configuration."""

from __future__ import annotations

from typing import Any


def model_settings(od_config: Any) -> dict[str, Any]:
    """The settings that are the model package's own, such as `tp_sequence_parallel` or `tensor_capture`.

    A stage YAML or a deploy configuration holds them in `model_config`. From Python vLLM-Omni 0.30 drops
    `Omni(model_config=…)` for architectures that it knows itself, and hands `Omni(additional_config=…)` on; so both are
    read.

    Args:
        od_config: vLLM-Omni's `OmniDiffusionConfig`.

    Returns:
        Both mappings as one, vLLM-Omni's own entries in `additional_config` included.

    Raises:
        ValueError: one name with two values.
    """
    settings = dict(getattr(od_config, "additional_config", None) or {})
    for name, value in (od_config.model_config or {}).items():
        if settings.setdefault(name, value) != value:
            raise ValueError(
                f"{name} is {value!r} in model_config and {settings[name]!r} in additional_config; give it once"
            )
    return settings
