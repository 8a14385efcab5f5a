# SPDX-License-Identifier: Apache-2.0
"""Cleaning and tokenising of prompts, with and without ftfy."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from omni_neuron_wan22 import prompt as prompt_module
from omni_neuron_wan22.prompt import clean_prompt, tokenize_prompt


@pytest.fixture
def without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_module._has_ftfy.cache_clear()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ftfy" else find_spec(name, *a))


@pytest.fixture(autouse=True)
def _forget() -> None:
    prompt_module._has_ftfy.cache_clear()


def test_without_ftfy_there_is_one_warning_and_the_rest_of_the_cleaning(
    without_ftfy: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert clean_prompt("  a  &amp;lt;b&amp;gt;\n c ") == "a <b> c"
        clean_prompt("again")
    assert [record.getMessage() for record in caplog.records if "ftfy" in record.getMessage()] == [
        "ftfy is not installed: mojibake in prompts stays (uv pip install 'omni-neuron-wan22[ftfy]')"
    ]


@pytest.mark.skipif(importlib.util.find_spec("ftfy") is None, reason="ftfy is not installed")
def test_with_ftfy_mojibake_is_mended() -> None:
    assert clean_prompt("schÃ¶n &amp; gut") == "schön & gut"


def test_plain_text_gives_the_same_ids_either_way(tiny: Path, request: pytest.FixtureRequest) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    first, _ = tokenize_prompt(tokenizer, "a red circle", 32)
    request.getfixturevalue("without_ftfy")
    second, _ = tokenize_prompt(tokenizer, "a red circle", 32)
    assert first.tolist() == second.tolist()


def test_long_prompts_are_cut_with_both_counts_named(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "tokenizer")
    with caplog.at_level(logging.WARNING):
        ids, mask = tokenize_prompt(tokenizer, "a " * 599, 512)
    assert ids.shape == mask.shape == (1, 512)
    assert "the prompt has 600 tokens; only the first 512 reach the model" in caplog.text
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        tokenize_prompt(tokenizer, "a " * 511, 512)
    assert "tokens" not in caplog.text
