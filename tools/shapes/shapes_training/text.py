# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and text encoder.

The encoder is trained before the experts and frozen: every token's output must tell colour, shape and direction to a
linear probe. Wan's cross-attention has no mask, and a prompt of ten tokens stands among some five hundred of padding;
with outputs that each carry the whole subject, an expert learns early to read any one of them.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from omni_neuron_testkit import CAPTIONS, COLOURS, DIRECTIONS, SHAPES, Subject, all_subjects

from .budget import Budget
from .loop import Loop, generators

NOTHING = ("", "low quality", "blurry, noisy", "nothing", "a video")
"""Captions that name no subject; the first is the usual negative prompt."""

_WORD_SCORE, _LETTER_SCORE = -4.0, -9.0


def make_tokenizer() -> T5Tokenizer:
    """A tokenizer of T5's kind with a piece for each word of the captions; other words fall into letters."""
    text = " ".join([*CAPTIONS, *NOTHING, *COLOURS, *SHAPES, *DIRECTIONS])
    for name in ("{colour}", "{shape}", "{direction}"):
        text = text.replace(name, " ")
    words = sorted({word.strip(string.punctuation) for word in text.split()} - {""})
    pieces = dict.fromkeys("▁" + form for word in words for form in (word, word.capitalize()))
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", _WORD_SCORE)]
    vocabulary += [(piece, _WORD_SCORE) for piece in pieces]
    vocabulary += [(chr(code), _LETTER_SCORE) for code in range(33, 127)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def make_text_encoder(budget: Budget) -> UMT5EncoderModel:
    """A fresh UMT5 encoder."""
    config = UMT5Config(
        vocab_size=len(make_tokenizer()),
        d_model=budget.text_dim,
        d_kv=budget.text_dim // budget.text_heads,
        d_ff=budget.text_ffn_dim,
        num_layers=budget.text_layers,
        num_heads=budget.text_heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        is_encoder_decoder=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = UMT5EncoderModel(config)
    with torch.no_grad():
        # T5's own initial embeddings have a spread of 1 and none of its matrices is scaled by the width.
        for name, parameter in encoder.named_parameters():
            if name.endswith(
                (".wi_0.weight", ".wi_1.weight", ".wo.weight", ".q.weight", ".k.weight", ".v.weight", ".o.weight")
            ):
                nn.init.xavier_uniform_(parameter)
    return encoder


def caption_variants(subject: Subject) -> list[str]:
    """Every template, and each also as a sentence with a capital and a full stop."""
    plain = [subject.caption(template) for template in range(len(CAPTIONS))]
    return plain + [text[0].upper() + text[1:] + "." for text in plain]


def embed(encoder: UMT5EncoderModel, tokenizer: T5Tokenizer, captions: list[str]) -> torch.Tensor:
    """Embeddings `[len(captions), longest, text_dim]`, zero after each caption's end, as `WanPipeline` makes them."""
    tokens = tokenizer(captions, padding=True, return_tensors="pt")
    hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return hidden * tokens.attention_mask[..., None]


class _Probed(nn.Module):
    """The encoder and the probes that its training needs; each has a class more, for captions that name nothing."""

    def __init__(self, encoder: UMT5EncoderModel, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.probes = nn.ModuleList(nn.Linear(width, len(names) + 1) for names in (COLOURS, SHAPES, DIRECTIONS))


def train_text_encoder(budget: Budget, work: Path) -> UMT5EncoderModel:
    """Train the encoder on captions alone; a few minutes at most."""
    torch.manual_seed(budget.seed)
    tokenizer = make_tokenizer()
    model = _Probed(make_text_encoder(budget), budget.text_dim)
    names = [list(COLOURS), list(SHAPES), list(DIRECTIONS)]
    subjects = all_subjects()
    captions = [text for subject in subjects for text in caption_variants(subject)]
    labels = [
        [classes.index(word) for classes, word in zip(names, (s.colour, s.shape, s.direction), strict=True)]
        for s in subjects
        for _ in caption_variants(s)
    ]
    nothing = [len(classes) for classes in names]

    def step(index: int) -> dict[str, torch.Tensor]:
        numbers, _ = generators(budget.seed, "text", index)
        chosen = numbers.integers(len(captions), size=budget.text_batch)
        empty = numbers.random(budget.text_batch) < 0.15
        texts = [
            NOTHING[numbers.integers(len(NOTHING))] if none else captions[i]
            for i, none in zip(chosen, empty, strict=True)
        ]
        wanted = torch.tensor([nothing if none else labels[i] for i, none in zip(chosen, empty, strict=True)])
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        hidden = model.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        real = tokens.attention_mask.bool()
        repeated = wanted[:, None].expand(-1, hidden.shape[1], -1)[real]
        losses = [
            F.cross_entropy(probe(hidden[real]), repeated[:, number]) for number, probe in enumerate(model.probes)
        ]
        return {"loss": torch.stack(losses).mean()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=budget.text_rate, betas=(0.9, 0.99), weight_decay=0.0)
    Loop(work, "text", budget.text_steps, model, optimizer, decay=0.98, warmup=30).run(step)
    return model.encoder
