# SPDX-License-Identifier: Apache-2.0
"""From a prompt to token ids: a fixed length, truncation said out loud. No vLLM needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def tokenize(
    tokenizer: Any, text: str, max_length: int, *, clean: Callable[[str], str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, each `[1, max_length]` int64, padded at the end.

    A longer text is cut to `max_length` tokens, with a warning that names both counts; the shape never changes.

    Args:
        tokenizer: of transformers; its special tokens are added. A chat template is applied before, to `text`.
        text: the prompt.
        max_length: tokens.
        clean: applied to `text` before.
    """
    text = text if clean is None else clean(text)
    encoded = tokenizer(
        [text],
        padding="max_length",
        padding_side="right",
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
