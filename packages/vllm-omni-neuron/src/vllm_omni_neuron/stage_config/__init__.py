# SPDX-License-Identifier: Apache-2.0
"""Stage configurations: the documented `stage_args` YAML, checked and turned into 0.30's deploy configuration.

vLLM-Omni 0.30 removed `stage_configs_path`. A stage YAML keeps working here: `load_stage_config` reads and checks it,
`to_deploy_config` translates it, `write_deploy_config` writes the file for `--deploy-config`, and
`explain_stage_configs_path` is the message for somebody who still passes the old path.
"""

from __future__ import annotations

from .deploy import deploy_yaml, explain_stage_configs_path, to_deploy_config, write_deploy_config
from .loader import StageConfigError, load_stage_config, parse_stage_config
from .reference import key_table
from .schema import StageConfig, StageEntry

__all__ = [
    "StageConfig",
    "StageConfigError",
    "StageEntry",
    "deploy_yaml",
    "explain_stage_configs_path",
    "key_table",
    "load_stage_config",
    "parse_stage_config",
    "to_deploy_config",
    "write_deploy_config",
]
