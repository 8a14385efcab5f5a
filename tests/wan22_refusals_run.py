# SPDX-License-Identifier: Apache-2.0
"""Run by test_wan22_engine.py in a process of its own: engines that must not start.

usage: wan22_refusals_run.py CASES_JSON REPORT_FILE, cases being {name: [model, settings]}
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

from vllm_omni.entrypoints.omni import Omni


def main() -> None:
    report = {}
    for name, (model, settings) in json.loads(sys.argv[1]).items():
        try:
            Omni(model=model, dtype="float32", **settings).close()
            error = ""
        except Exception as raised:
            error = str(raised)
        report[name] = {"error": error, "processes": len(multiprocessing.active_children())}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
