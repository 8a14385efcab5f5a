# SPDX-License-Identifier: Apache-2.0
"""The engine's own output: kept off the terminal and off stdout, kept in a log where something fails."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, subprocess, sys
from vllm_omni_neuron.cli.progress import EngineOutput, engine_streams
from vllm_omni_neuron.cli.console import print_json

def engine():
    print("python stdout")
    os.write(1, b"descriptor 1\\n")
    sys.stderr.write("python stderr\\n")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    write = sys.stdout.write
    sys.stdout.write = lambda text: write("(Worker pid=1) " + text)  # as vLLM does in its workers

{body}
print_json({{"result": 1}})
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, timeout=60, check=True
    )


def test_all_output_of_the_engine_goes_to_the_log_which_is_removed() -> None:
    result = run("with EngineOutput(show=True) as output:\n    output.phase('working')\n    engine()")
    assert result.stdout == '{\n  "result": 1\n}\n'
    assert result.stderr.splitlines() == ["working"]


def test_the_log_of_a_failure_is_kept() -> None:
    body = (
        "try:\n    with EngineOutput(show=False) as output:\n        engine()\n        raise ValueError\n"
        "except ValueError:\n    sys.stderr.write(str(output.log))"
    )
    log = Path(run(body).stderr)
    try:
        lines = log.read_text().splitlines()
    finally:
        log.unlink()
    assert set(lines) == {"python stdout", "descriptor 1", "python stderr", "child"}


def test_verbose_output_goes_to_stderr_and_leaves_stdout_to_the_result() -> None:
    result = run("with engine_streams():\n    engine()")
    assert result.stdout == '{\n  "result": 1\n}\n'
    assert set(result.stderr.splitlines()) == {"python stdout", "descriptor 1", "python stderr", "child"}


def test_the_denoising_bar_is_read_from_the_log() -> None:
    from vllm_omni_neuron.cli.progress import EngineOutput

    with EngineOutput(show=False) as output:
        output._step("Loading safetensors: 50%|#####     | 1/2 [00:01<00:01,  1.0s/it]")
        [task] = output._progress.tasks
        assert task.total is None
        output._step(" 25%|##5       | 10/40 [00:01<00:03, 10.0it/s]")
        assert (task.completed, task.total, task.description) == (10, 40, "denoising")
        output._step("(DiffusionWorker pid=17)  50%|#####     | 20/40 [00:02<00:02, 10.0it/s]")
        assert (task.completed, task.total) == (20, 40)
        output._step("100%|##########| 40/40 [00:04<00:00, 10.0it/s]")
        [task] = output._progress.tasks
        assert (task.total, task.description) == (None, "decoding the video")


def test_a_terminal_shows_progress_and_nothing_of_the_engine() -> None:
    body = "with EngineOutput(show=True) as output:\n    output.phase('working')\n    engine()"
    primary, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(terminal)
    stdout, _ = process.communicate(timeout=60)
    shown = os.read(primary, 1 << 16).decode()
    os.close(primary)
    assert process.returncode == 0
    assert stdout == '{\n  "result": 1\n}\n'
    assert "working" in shown
    for text in ("python stdout", "descriptor 1", "python stderr", "child"):
        assert text not in shown
