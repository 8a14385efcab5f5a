# SPDX-License-Identifier: Apache-2.0
"""From a prompt to token ids, as Wan was trained: cleaned text, a fixed length, truncation said out loud."""

from __future__ import annotations

import functools
import html
import importlib.util
import logging
import re

import torch
from transformers import PreTrainedTokenizerBase

from vllm_omni_neuron.sdk import tokenize

logger = logging.getLogger(__name__)


@functools.cache
def _has_ftfy() -> bool:
    if importlib.util.find_spec("ftfy") is not None:
        return True
    logger.warning("ftfy is not installed: mojibake in prompts stays (uv pip install 'omni-neuron-wan22[ftfy]')")
    return False


def clean_prompt(text: str) -> str:
    """Mend mojibake (where ftfy is installed), undo HTML escapes twice, and collapse white space."""
    if _has_ftfy():
        import ftfy

        text = ftfy.fix_text(text)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokenize` of the cleaned prompt."""
    return tokenize(tokenizer, prompt, max_length, clean=clean_prompt)
