# SPDX-License-Identifier: Apache-2.0
"""Parts of tiny checkpoints in the real diffusers layout, with random weights: for tests, benchmarks and demos."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

TokenizerKind = Literal["t5", "qwen2"]
# Turns of a conversation as Qwen's chat models mark them, without the parts for tools.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def perturb_constants(model: nn.Module) -> None:
    """Give norms' gains and biases random values: fresh ones are 1 and 0, which would hide a mixed-up mapping."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.1 * torch.randn_like(parameter))


def ascii_tokenizer(kind: TokenizerKind = "t5") -> Any:
    """A tokenizer of T5's or Qwen2's kind over ASCII characters, not trained; its `save_pretrained` writes it.

    T5's turns other characters into `<unk>`; Qwen2's knows all bytes, the marks of a conversation and its template.

    Raises:
        ValueError: another kind.
    """
    if kind not in get_args(TokenizerKind):
        raise ValueError(f"kind = {kind!r}: valid values are {', '.join(get_args(TokenizerKind))}")
    return _t5_tokenizer() if kind == "t5" else _qwen2_tokenizer()


def write_model_index(
    folder: str | Path, class_name: str, components: Mapping[str, tuple[str, str] | None], **extra: Any
) -> None:
    """Write model_index.json.

    Args:
        folder: of the checkpoint; made if missing.
        class_name: diffusers' pipeline class.
        components: library and class by component, such as ("transformers", "UMT5EncoderModel"); None for one that
            the pipeline knows and this checkpoint has not.
        extra: further entries, such as boundary_ratio.
    """
    import diffusers

    index: dict[str, Any] = {"_class_name": class_name, "_diffusers_version": diffusers.__version__, **extra}
    index |= {name: [None, None] if entry is None else list(entry) for name, entry in components.items()}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_components(
    folder: str | Path,
    components: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "10GB",
) -> None:
    """Write components, each to the folder of its name, as diffusers' pipelines read them.

    Args:
        folder: of the checkpoint.
        components: models, tokenizers, schedulers and processors of diffusers or transformers, by name.
        dtype: of the models' weights on disk.
        max_shard_size: of a weights file, in diffusers' notation; small values give several files with an index, as
            large models have.
    """
    for name, component in components.items():
        path = Path(folder) / name
        if isinstance(component, nn.Module):
            component.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)  # type: ignore[operator]
        else:
            component.save_pretrained(path)


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    characters = [chr(code) for code in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocabulary += [(character, -6.0) for character in characters]
    vocabulary += [("▁" + character, -7.0) for character in characters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def _qwen2_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel  # type: ignore[import-untyped]
    from transformers import Qwen2Tokenizer

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocabulary = {token: number for number, token in enumerate((*special, *sorted(ByteLevel.alphabet())))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(special[1:]))
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
