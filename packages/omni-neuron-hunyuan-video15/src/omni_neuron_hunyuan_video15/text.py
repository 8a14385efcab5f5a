# SPDX-License-Identifier: Apache-2.0
"""What becomes of a prompt: a language model's hidden states of all of it, and ByT5's of the words to be drawn."""

from __future__ import annotations

import re
from typing import Any

import torch

from vllm_omni_neuron.sdk import tokenize

# The model was trained behind this text, blanks included, and reads what follows it.
_INSTRUCTION = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video.",
)
INSTRUCTION = (" " * 9).join(_INSTRUCTION)
INSTRUCTION_TOKENS = 108
MAX_TEXT_LENGTH = 1000
GLYPH_LENGTH = 256
HIDDEN_STATE = -3  # of the language model: the last two layers are not used


def encode_text(tokenizer: Any, language_model: Any, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The language model's `[1, length, text_dim]` and which of them are text, int64 `[1, length]`.

    Args:
        tokenizer: with a chat template.
        language_model: of transformers.
        text: the prompt; the tokens that the template puts behind it count as text.
        length: tokens; a longer text is cut, with a warning.
    """
    turns = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text or " "}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    token_ids, mask = tokenize(tokenizer, chat, INSTRUCTION_TOKENS + length)
    states = language_model(input_ids=token_ids, attention_mask=mask, output_hidden_states=True).hidden_states
    return states[HIDDEN_STATE][:, INSTRUCTION_TOKENS:], mask[:, INSTRUCTION_TOKENS:]


def encode_glyphs(tokenizer: Any, byt5: Any, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ByT5's `[1, 256, glyph_dim]` of the quoted parts of a prompt and which of them are text; zeros without any."""
    quoted = glyph_text(text)
    if not quoted:
        embeds = torch.zeros(1, GLYPH_LENGTH, byt5.config.d_model, dtype=byt5.dtype)
        return embeds, torch.zeros(1, GLYPH_LENGTH, dtype=torch.int64)
    token_ids, mask = tokenize(tokenizer, quoted, GLYPH_LENGTH)
    return byt5(input_ids=token_ids, attention_mask=mask.float())[0], mask


def glyph_text(prompt: str) -> str:
    """The words to be drawn, which are those in straight or curved double quotes, as ByT5 was trained to see them."""
    quoted = dict.fromkeys(straight or curved for straight, curved in re.findall(r'"(.*?)"|“(.*?)”', prompt))
    return "".join(f'Text "{words}". ' for words in quoted)
