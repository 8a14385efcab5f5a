# SPDX-License-Identifier: Apache-2.0
"""The world of the shapes model: one solid shape of one colour that moves in one direction on a plain ground.

Words, captions and a renderer. The training program draws its data from here, the judge its templates, and tests the
truth that the judge is checked on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.92, 0.08, 0.08),
    "green": (0.08, 0.80, 0.12),
    "blue": (0.12, 0.20, 0.95),
    "yellow": (0.95, 0.88, 0.06),
    "magenta": (0.92, 0.10, 0.88),
    "white": (0.96, 0.96, 0.96),
}
"""Name to RGB in [0, 1]."""

SHAPES = ("circle", "square", "triangle")

DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Name to the sign of movement along x and y; y grows downwards."""

CAPTIONS = (
    "a {colour} {shape} moving {direction}",
    "a {colour} {shape} moves {direction}",
    "the {colour} {shape} is moving {direction}",
    "{colour} {shape} moving {direction}",
    "a video of a {colour} {shape} moving {direction}",
    "a {shape} that is {colour} moves {direction}",
    "a {colour} {shape} slides {direction} on a dark background",
    "moving {direction}, a {colour} {shape}",
)
"""Caption templates; the first is the plain one."""


@dataclass(frozen=True)
class Subject:
    """What a caption asks for.

    Attributes:
        colour: a key of `COLOURS`.
        shape: one of `SHAPES`.
        direction: a key of `DIRECTIONS`.
    """

    colour: str
    shape: str
    direction: str

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("colour", self.colour, COLOURS),
            ("shape", self.shape, SHAPES),
            ("direction", self.direction, DIRECTIONS),
        ):
            if value not in valid:
                raise ValueError(f"{name} is {value!r}; valid are {', '.join(valid)}")

    def caption(self, template: int = 0) -> str:
        """The caption by the template of that index of `CAPTIONS`."""
        return CAPTIONS[template].format(colour=self.colour, shape=self.shape, direction=self.direction)


def all_subjects() -> list[Subject]:
    """Every colour, shape and direction: 72 subjects, direction fastest."""
    return [Subject(*words) for words in itertools.product(COLOURS, SHAPES, DIRECTIONS)]


def subject_of(caption: str) -> Subject | None:
    """The subject that a caption names, or None where it does not name exactly one colour, shape and direction."""
    words = "".join(letter if letter.isalpha() else " " for letter in caption.lower()).split()
    found = [{word for word in words if word in valid} for valid in (COLOURS, SHAPES, DIRECTIONS)]
    if any(len(names) != 1 for names in found):
        return None
    return Subject(*(names.pop() for names in found))


@dataclass(frozen=True)
class Scene:
    """Where and how a subject moves. Lengths are in pixels, brightness in [0, 1].

    Attributes:
        radius: of the circle; the square's half side; the triangle's circumradius is 1.25 times it.
        speed: per frame.
        along, across: offset of the path's middle from the frame's middle, along the direction and across it (down,
            or right for vertical paths).
        ground: brightness of the grey ground.
    """

    radius: float = 11.0
    speed: float = 1.9
    along: float = 0.0
    across: float = 0.0
    ground: float = 0.1


def render(
    subject: Subject, scene: Scene | None = None, *, frames: int = 17, height: int = 64, width: int = 64
) -> Array:
    """Draw a clip.

    Returns:
        `[frames, height, width, 3]` in [0, 1], edges anti-aliased.
    """
    scene = scene or Scene()
    step_x, step_y = DIRECTIONS[subject.direction]
    colour = np.asarray(COLOURS[subject.colour], dtype=np.float32)
    clip = np.empty((frames, height, width, 3), dtype=np.float32)
    for frame in range(frames):
        travelled = scene.along + scene.speed * (frame - (frames - 1) / 2)
        x = width / 2 + travelled * step_x + (scene.across if step_x == 0 else 0.0)
        y = height / 2 + travelled * step_y + (scene.across if step_y == 0 else 0.0)
        inside = coverage(subject.shape, x, y, scene.radius, height=height, width=width)[..., None]
        clip[frame] = scene.ground * (1 - inside) + colour * inside
    return clip


def coverage(shape: str, x: float, y: float, radius: float, *, height: int, width: int) -> Array:
    """How much of each pixel the shape covers.

    Args:
        shape: one of `SHAPES`.
        x, y: its centroid in pixels; pixel (0, 0) spans 0 to 1.
        radius: see `Scene`.

    Returns:
        `[height, width]` in [0, 1], from the signed distance to the edge (exact on straight edges).
    """
    dx = (np.arange(width, dtype=np.float32) + 0.5 - x)[None, :]
    dy = (np.arange(height, dtype=np.float32) + 0.5 - y)[:, None]
    if shape == "circle":
        distance = np.sqrt(dx * dx + dy * dy) - radius
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - radius
    elif shape == "triangle":
        inner = TRIANGLE_SIZE * radius / 2  # inscribed circle of an equilateral triangle, point up
        slope = math.sqrt(3) / 2
        distance = np.maximum(np.abs(dx) * slope - dy / 2, dy) - inner
    else:
        raise ValueError(f"shape is {shape!r}; valid are {', '.join(SHAPES)}")
    return np.clip(0.5 - distance, 0.0, 1.0).astype(np.float32)


TRIANGLE_SIZE = 1.25
"""Circumradius of the triangle over `Scene.radius`."""

AREAS = {"circle": math.pi, "square": 4.0, "triangle": 3 * math.sqrt(3) / 4 * TRIANGLE_SIZE**2}
"""Area of each shape over the square of `Scene.radius`."""


def random_scenes(seed: int, *, frames: int = 17, height: int = 64, width: int = 64) -> Iterator[Scene]:
    """Endless scenes such as the shapes model is trained on, the whole path within the frame.

    Args:
        seed: equal seeds give equal scenes.
    """
    generator = np.random.default_rng(seed)
    scale = min(height, width) / 64
    while True:
        radius, speed = scale * generator.uniform(10.5, 11.5), scale * generator.uniform(1.8, 2.0)
        free = max(0.0, min(height, width) / 2 - TRIANGLE_SIZE * radius)
        path_free = max(0.0, free - speed * (frames - 1) / 2)
        yield Scene(
            radius=radius,
            speed=speed,
            along=generator.uniform(-0.6, 0.6) * path_free,
            across=generator.uniform(-0.25, 0.25) * free,
            ground=generator.uniform(0.09, 0.11),
        )
