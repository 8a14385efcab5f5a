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

logger = logging.getLogger(__name__)


@functools.cache
def _has_ftfy() -> bool:
    if importlib.util.find_spec("ftfy") is not None:
        return True
    logger.warning("ftfy is not installed: mojibake in prompts is not mended (pip install 'omni-neuron-wan22[ftfy]')")
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
    """Token ids and attention mask, each `[1, max_length]` int64, padded at the end.

    A longer prompt is cut to `max_length` tokens, with a warning that names both counts; the shape never changes.
    """
    text = clean_prompt(prompt)
    encoded = tokenizer(
        [text],
        padding="max_length",
        max_length=max_length,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    if bool(encoded.attention_mask.all()):
        total = len(tokenizer(text, add_special_tokens=True).input_ids)
        if total > max_length:
            logger.warning("the prompt has %d tokens; only the first %d reach the model", total, max_length)
    return encoded.input_ids, encoded.attention_mask
