# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint: there, small, and in Wan2.2's layout."""

from __future__ import annotations

import json

import pytest

import omni_neuron_shapes
from omni_neuron_shapes import model_path, write_image_to_video

MEGABYTE = 1e6


def test_layout_and_size():
    folder = model_path()
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline" and index["boundary_ratio"] == 0.875
    for component in ("transformer", "transformer_2", "vae", "text_encoder"):
        assert list((folder / component).glob("*.safetensors")), component
    vae = json.loads((folder / "vae" / "config.json").read_text())
    assert len(vae["latents_mean"]) == len(vae["latents_std"]) == vae["z_dim"]
    assert all(spread > 0 and spread != 1 for spread in vae["latents_std"])
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 15 * MEGABYTE
    assert "95 %" in (folder / "README.md").read_text()


def test_the_image_to_video_sibling_is_whole(tmp_path):
    folder = write_image_to_video(tmp_path / "i2v")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanImageToVideoPipeline" and index["boundary_ratio"] == 0.875
    z_dim = json.loads((folder / "vae" / "config.json").read_text())["z_dim"]
    for component in ("transformer", "transformer_2"):
        config = json.loads((folder / component / "config.json").read_text())
        assert (config["in_channels"], config["out_channels"]) == (2 * z_dim + 4, z_dim)
        ours, theirs = ((place / component) for place in (folder, model_path()))
        [weights], [others] = (list(place.glob("*.safetensors")) for place in (ours, theirs))
        assert weights.read_bytes() != others.read_bytes()
    for component in ("vae", "text_encoder", "tokenizer", "scheduler"):
        assert any((folder / component).iterdir()), component
    assert "WanImageToVideoPipeline" in (folder / "README.md").read_text()


def test_a_missing_checkpoint_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(omni_neuron_shapes, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="built without its data"):
        model_path()
