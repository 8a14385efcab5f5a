# SPDX-License-Identifier: Apache-2.0
"""Train the shapes model and write it as a diffusers folder. README.md beside this file has the details.

python tools/shapes/train.py WORK                      # every text-to-video stage that is not done yet
python tools/shapes/train.py WORK --stage high         # one stage; high, low and decoder may run at the same time
python tools/shapes/train.py WORK --write FOLDER       # the checkpoint, from finished stages
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from shapes_training.assemble import write_checkpoint
from shapes_training.budget import BUDGETS
from shapes_training.plots import plot_losses
from shapes_training.stages import IMAGE_TO_VIDEO, STAGES, TEXT_TO_VIDEO, check_budget, run_stage


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="work folder: state, results and logs; a stopped run resumes from it")
    parser.add_argument("--budget", choices=BUDGETS, default="full")
    parser.add_argument("--stage", choices=STAGES, action="append", help="may be given more than once")
    parser.add_argument("--image-to-video", action="store_true", help="train, or write, the image-to-video sibling too")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the checkpoint instead of training")
    parser.add_argument("--threads", type=int, default=1, help="of torch; another number gives other last digits")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    budget = BUDGETS[arguments.budget]
    check_budget(arguments.work, budget)
    if arguments.write:
        write_checkpoint(budget, arguments.work, arguments.write, image_to_video=arguments.image_to_video)
        return
    stages = arguments.stage or [*TEXT_TO_VIDEO, *(IMAGE_TO_VIDEO if arguments.image_to_video else ())]
    for stage in stages:
        run_stage(stage, budget, arguments.work)
        plot_losses(arguments.work)


if __name__ == "__main__":
    main()
