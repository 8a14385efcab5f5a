# SPDX-License-Identifier: Apache-2.0
"""The judge: what a video of the shapes model shows, from its frames alone.

The ground is the median of the frame's border. What differs from it is the shape: its median colour names the colour,
the path of its centroid the direction, and the overlap with templates of equal area and centroid the shape.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .shapes import AREAS, COLOURS, DIRECTIONS, SHAPES, Array, Subject, coverage

STRICT_OVERLAP = 0.8
"""Mean overlap with the best template above which a shape is well-formed."""

STRICT_STRAIGHTNESS = 0.9
"""Share of the movement along the direction above which a path is straight."""

_MIN_CONTRAST = 0.15  # of the shape against the ground, in [0, 1]: below there is nothing to judge
_MIN_AREA = 0.005  # of the frame
_MIN_TRAVEL = 0.08  # of the shorter side, from the first frame to the last


@dataclass(frozen=True)
class Verdict:
    """What the judge saw. Confidences are in [0, 1].

    Attributes:
        colour, shape, direction: names, or None where there is nothing that could have one.
        colour_confidence: how much nearer the colour is than the second nearest: 1 − d₁/d₂.
        shape_confidence: how much better the best template overlaps than the second: overlap₁ − overlap₂.
        direction_confidence: share of the movement along the direction.
        overlap: mean over frames of the best template's overlap (intersection over union).
        worst_overlap: of the worst frame, for the same template.
        rgb: median colour of the shape, each in [0, 1].
        travel: pixels from the first frame to the last, by a straight fit.
        frames_with_shape: in how many frames something was found.
        frames: how many there are.
    """

    colour: str | None
    shape: str | None
    direction: str | None
    colour_confidence: float
    shape_confidence: float
    direction_confidence: float
    overlap: float
    worst_overlap: float
    rgb: tuple[float, float, float] | None
    travel: float
    frames_with_shape: int
    frames: int

    @property
    def subject(self) -> Subject | None:
        """Colour, shape and direction together, or None where one is missing."""
        if self.colour is None or self.shape is None or self.direction is None:
            return None
        return Subject(self.colour, self.shape, self.direction)

    @property
    def well_formed(self) -> bool:
        """The strict gate: a clean outline, a straight path, and the shape in every frame."""
        return (
            self.overlap > STRICT_OVERLAP
            and self.direction_confidence > STRICT_STRAIGHTNESS
            and self.frames_with_shape == self.frames
        )

    def matches(self, subject: Subject, *, strict: bool = False) -> bool:
        """Whether the video shows `subject`, and with `strict` also passes the strict gate."""
        return self.subject == subject and (self.well_formed or not strict)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {**asdict(self), "well_formed": self.well_formed}

    def __str__(self) -> str:
        if self.subject is None:
            seen = ", ".join(f"{name} {getattr(self, name) or '?'}" for name in ("colour", "shape", "direction"))
            return f"no clear subject ({seen})"
        return self.subject.caption()


def judge(frames: Any) -> Verdict:
    """Judge one video.

    Args:
        frames: `[T, H, W, 3]`, anything NumPy can make an array of: uint8, or floating point in [0, 1].

    Raises:
        ValueError: the shape or the values are not those of a video.
    """
    video = _as_video(frames)
    count, height, width, _ = video.shape
    edges = (video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1])
    border = np.concatenate([edge.reshape(-1, 3) for edge in edges])
    contrast = np.linalg.norm(video - np.median(border, axis=0), axis=-1) / math.sqrt(3)
    # The shape's own contrast: that of the strongest pixels, at least as many as the smallest shape would have.
    strongest = np.sort(contrast.reshape(-1))[-max(1, int(contrast.size * _MIN_AREA)) :]
    level = float(np.median(strongest))
    if level < _MIN_CONTRAST:
        return _nothing(count)
    alpha = np.clip(contrast / level, 0.0, 1.0)
    alpha[alpha < 0.25] = 0.0  # compression noise of the ground
    mask = alpha > 0.5
    found = [frame for frame in range(count) if mask[frame].mean() > _MIN_AREA]
    if not found:
        return _nothing(count)

    rgb = np.median(video[contrast > 0.8 * level], axis=0)
    colour, colour_confidence = _nearest_colour(rgb)
    centres = np.array([_centroid(alpha[frame]) for frame in found])
    direction, straightness, travel = _direction(np.array(found), centres, min(height, width), count)
    overlaps = np.array([_overlaps(alpha[frame], centre) for frame, centre in zip(found, centres, strict=True)])
    order = np.argsort(overlaps.mean(axis=0))[::-1]
    best, second = order[0], order[1]
    mean = overlaps.mean(axis=0)
    return Verdict(
        colour=colour,
        shape=SHAPES[best],
        direction=direction,
        colour_confidence=colour_confidence,
        shape_confidence=float(mean[best] - mean[second]),
        direction_confidence=straightness,
        overlap=float(mean[best]),
        worst_overlap=float(overlaps[:, best].min()),
        rgb=(float(rgb[0]), float(rgb[1]), float(rgb[2])),
        travel=travel,
        frames_with_shape=len(found),
        frames=count,
    )


def read_video(path: Any) -> npt.NDArray[np.uint8]:
    """Frames `[T, H, W, 3]` of a video file.

    Raises:
        ValueError: the file has no video stream or no frame.
        ModuleNotFoundError: PyAV is not installed (`omni-neuron-testkit[video]`).
    """
    import av

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream")
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    if not frames:
        raise ValueError(f"{path} has no frame")
    return np.stack(frames)


def _as_video(frames: Any) -> Array:
    video = np.asarray(frames)
    if video.ndim == 5 and video.shape[0] == 1:
        video = video[0]
    if video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise ValueError(f"frames have shape {tuple(video.shape)}; one video is [frames, height, width, 3]")
    if video.dtype == np.uint8:
        return (video / 255).astype(np.float32)
    if not np.issubdtype(video.dtype, np.floating):
        raise ValueError(f"frames are {video.dtype}; uint8, or floating point in [0, 1], is valid")
    if not np.isfinite(video).all() or video.min() < -0.01 or video.max() > 1.01:
        raise ValueError(f"frames reach from {video.min():.3g} to {video.max():.3g}; floating point must lie in [0, 1]")
    return video.astype(np.float32)


def _nothing(frames: int) -> Verdict:
    return Verdict(None, None, None, 0.0, 0.0, 0.0, 0.0, 0.0, None, 0.0, 0, frames)


def _nearest_colour(rgb: npt.NDArray[Any]) -> tuple[str, float]:
    distances = {name: float(np.linalg.norm(rgb - np.array(colour))) for name, colour in COLOURS.items()}
    first, second = sorted(distances, key=distances.__getitem__)[:2]
    return first, 1 - distances[first] / distances[second]


def _centroid(alpha: Array) -> tuple[float, float]:
    """Centroid x, y in pixels, pixel (0, 0) spanning 0 to 1."""
    height, width = alpha.shape
    total = float(alpha.sum())
    x = float((alpha.sum(axis=0) * (np.arange(width) + 0.5)).sum()) / total
    y = float((alpha.sum(axis=1) * (np.arange(height) + 0.5)).sum()) / total
    return x, y


def _direction(
    times: npt.NDArray[Any], centres: npt.NDArray[Any], side: int, frames: int
) -> tuple[str | None, float, float]:
    """Direction, share of the movement along it, and travel, by a straight fit of the centroids over time."""
    if len(times) < 2:
        return None, 0.0, 0.0
    slope = np.polyfit(times, centres, 1)[0]
    travel = slope * (frames - 1)
    axis = int(np.argmax(np.abs(travel)))
    distance = float(abs(travel[axis]))
    if distance < _MIN_TRAVEL * side:
        return None, 0.0, distance
    # Steps back and steps across count against it, so a jumpy path is not straight even where its fit is.
    steps = np.diff(centres, axis=0)
    along = float((steps[:, axis] * np.sign(travel[axis])).sum())
    straightness = max(0.0, along) / float(np.abs(steps).sum())
    sign = (int(np.sign(travel[0])), 0) if axis == 0 else (0, int(np.sign(travel[1])))
    [name] = [name for name, step in DIRECTIONS.items() if step == sign]
    return name, straightness, distance


def _overlaps(alpha: Array, centre: tuple[float, float]) -> list[float]:
    """Overlap (soft intersection over union) with each of `SHAPES` at that centroid and of equal area."""
    height, width = alpha.shape
    area = float(alpha.sum())
    overlaps = []
    for shape in SHAPES:
        template = coverage(shape, *centre, math.sqrt(area / AREAS[shape]), height=height, width=width)
        overlaps.append(float(np.minimum(alpha, template).sum() / np.maximum(alpha, template).sum()))
    return overlaps
