# SPDX-License-Identifier: Apache-2.0
"""`python -m omni_neuron_nkisim.lint FILES`: findings on standard output, exit status 1 if there are any."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from omni_neuron_nkisim.lint.reach import lint


def main(arguments: Sequence[str] | None = None) -> int:
    """Lint the files and folders of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_neuron_nkisim.lint", description="Check NKI kernels for Python that NKI does not take."
    )
    parser.add_argument("paths", nargs="+", metavar="FILES", help="Python files, or folders of them")
    try:
        findings = lint(parser.parse_args(arguments).paths)
    except FileNotFoundError as error:
        parser.error(str(error))
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
