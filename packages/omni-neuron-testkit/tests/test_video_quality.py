# SPDX-License-Identifier: Apache-2.0
"""PSNR and SSIM of videos."""

from __future__ import annotations

import math

import numpy as np
import pytest

from omni_neuron_testkit import Subject, render, video_quality

VIDEO = (render(Subject("red", "circle", "right"))[:4, :32, :32] * 200 + 20).astype(np.uint8)


def test_identical():
    quality = video_quality(VIDEO, VIDEO)
    assert quality.identical and math.isinf(quality.psnr) and quality.ssim == 1.0
    assert quality.as_json()["psnr"] is None


def test_values():
    other = VIDEO.copy()
    other[2] += 10  # one frame of four
    quality = video_quality(other, VIDEO)
    assert quality.frame_psnr[2] == pytest.approx(20 * math.log10(255 / 10))
    assert quality.psnr == pytest.approx(20 * math.log10(255 / 10) + 10 * math.log10(4))
    assert quality.worst_frame == 2 and quality.frame_ssim[2] < 1 and quality.frame_ssim[0] == 1
    assert quality.ssim == pytest.approx(np.mean(quality.frame_ssim))


def test_structure_counts_for_ssim():
    noise = np.random.default_rng(0).integers(-10, 11, VIDEO.shape)
    noisy = (VIDEO + noise).clip(0, 255).astype(np.uint8)
    shifted = (VIDEO + np.uint8(6)).astype(np.uint8)  # about as many dB
    assert video_quality(noisy, VIDEO).ssim < video_quality(shifted, VIDEO).ssim - 0.05


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (VIDEO[:3], "the video has 3 frames, the reference 4"),
        (VIDEO[:, :24], r"the video is 32×24 pixels \(width × height\), the reference 32×32"),
        (VIDEO / 255, "the video is float64 of shape"),
        (VIDEO[:0], r"uint8 of shape \[0, 32, 32, 3\]"),
    ],
)
def test_what_cannot_be_compared(other, message):
    with pytest.raises(ValueError, match=message):
        video_quality(other, VIDEO)


def test_frames_below_the_window():
    with pytest.raises(ValueError, match="less than SSIM's window of 11"):
        video_quality(VIDEO[:, :8], VIDEO[:, :8])
