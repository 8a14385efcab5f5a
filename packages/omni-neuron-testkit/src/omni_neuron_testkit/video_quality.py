# SPDX-License-Identifier: Apache-2.0
"""PSNR and SSIM of one video against another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_WINDOW = 11  # pixels: of the Gaussian window of SSIM


@dataclass(frozen=True)
class VideoQuality:
    """How near a video is to its reference. 8-bit values; PSNR in dB, infinite where all are equal.

    Attributes:
        psnr: of all frames together.
        ssim: mean over frames.
        frame_psnr, frame_ssim: of each frame.
    """

    psnr: float
    ssim: float
    frame_psnr: tuple[float, ...]
    frame_ssim: tuple[float, ...]

    @property
    def worst_frame(self) -> int:
        """The frame with the least SSIM."""
        return int(np.argmin(self.frame_ssim))

    @property
    def identical(self) -> bool:
        """Whether every value of every frame is equal."""
        return math.isinf(self.psnr)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data; an infinite PSNR is None."""
        return {
            "psnr": _finite(self.psnr),
            "ssim": self.ssim,
            "identical": self.identical,
            "worst_frame": self.worst_frame,
            "frame_psnr": [_finite(value) for value in self.frame_psnr],
            "frame_ssim": list(self.frame_ssim),
        }


def video_quality(actual: Any, reference: Any) -> VideoQuality:
    """Compare frames with frames.

    SSIM is that of Wang et al. 2004, by scikit-image: a Gaussian window of 11 pixels and σ 1.5, mean over the channels.

    Args:
        actual, reference: uint8 `[T, H, W, 3]`, of equal shape.

    Raises:
        ValueError: what is given is no pair of such videos; sizes or numbers of frames differ.
        ModuleNotFoundError: scikit-image is not installed (`omni-neuron-testkit[accuracy]`).
    """
    from skimage.metrics import structural_similarity

    ours, theirs = np.asarray(actual), np.asarray(reference)
    check_comparable(ours, theirs)
    frame_psnr, frame_ssim, squares = [], [], 0.0
    for first, second in zip(ours, theirs, strict=True):
        square = float(np.square(np.subtract(first, second, dtype=np.float64)).mean())
        squares += square
        frame_psnr.append(_psnr(square))
        frame_ssim.append(
            float(
                structural_similarity(
                    first,
                    second,
                    channel_axis=-1,
                    data_range=255,
                    gaussian_weights=True,
                    sigma=1.5,
                    use_sample_covariance=False,
                )
            )
        )
    return VideoQuality(_psnr(squares / len(ours)), float(np.mean(frame_ssim)), tuple(frame_psnr), tuple(frame_ssim))


def check_comparable(actual: npt.NDArray[Any], reference: npt.NDArray[Any]) -> None:
    """Refuse what `video_quality` cannot compare, saying which number differs."""
    for name, frames in (("the video", actual), ("the reference", reference)):
        if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape or frames.dtype != np.uint8:
            raise ValueError(
                f"{name} is {frames.dtype} of shape {list(frames.shape)}; uint8 [frames, height, width, 3] is valid"
            )
    if len(actual) != len(reference):
        raise ValueError(f"the video has {len(actual)} frames, the reference {len(reference)}")
    (height, width), (other_height, other_width) = actual.shape[1:3], reference.shape[1:3]
    if (height, width) != (other_height, other_width):
        raise ValueError(
            f"the video is {width}×{height} pixels (width × height), the reference {other_width}×{other_height}"
        )
    if min(height, width) < _WINDOW:
        raise ValueError(f"{width}×{height} pixels (width × height) are less than SSIM's window of {_WINDOW} pixels")


def _psnr(mean_square: float) -> float:
    return 10 * math.log10(255**2 / mean_square) if mean_square else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
