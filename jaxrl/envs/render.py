"""Simple images of environment states, drawn on the host with Pillow."""

from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIZE = (400, 300)
_PALETTE = np.array(
    [[31, 119, 180], [255, 127, 14], [44, 160, 44], [214, 39, 40], [148, 103, 189], [140, 86, 75], [23, 190, 207]],
    np.float32,
)


def draw_state(name: str, state: Any, obs: Any) -> np.ndarray:
    """Draw a state as `[H, W, 3]` uint8: by the sketch of environment `name`, else `obs` as a grid or as bars."""
    sketch = _SKETCHES.get(name)
    if sketch is not None:
        return _on_canvas(sketch, state)
    leaves = [obs] if isinstance(obs, np.ndarray) else list(obs.values() if isinstance(obs, dict) else obs)
    if len(leaves) == 1 and leaves[0].ndim in (2, 3) and min(leaves[0].shape[:2]) > 1:
        return draw_grid(leaves[0])
    return draw_bars(np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in leaves]))


def draw_grid(obs: np.ndarray) -> np.ndarray:
    """Draw `[H, W]` or `[H, W, C]` as coloured cells, one colour per channel."""
    cells = np.asarray(obs, np.float32).reshape(obs.shape[0], obs.shape[1], -1)
    # The largest value has the full colour of its channel.
    cells = cells / max(float(np.abs(cells).max()), 1e-6)
    colours = _PALETTE[np.arange(cells.shape[2]) % len(_PALETTE)]
    strength = np.clip(cells, 0, 1)
    picture = np.clip(np.einsum("hwc,cd->hwd", strength, colours), 0, 255).astype(np.uint8)
    scale = max(1, 300 // max(picture.shape[:2]))
    return np.asarray(picture.repeat(scale, axis=0).repeat(scale, axis=1))


def draw_bars(values: np.ndarray) -> np.ndarray:
    """Draw a vector as bars around a centre line, with values squashed to `(-1, 1)`."""

    def bars(draw: ImageDraw.ImageDraw, _: Any) -> None:
        width = SIZE[0] / max(len(values), 1)
        for i, value in enumerate(np.tanh(values)):
            ends = sorted((SIZE[1] / 2, SIZE[1] / 2 * (1 - float(value) * 0.9)))
            draw.rectangle([i * width + 2, ends[0], (i + 1) * width - 2, ends[1]], fill=(31, 119, 180))

    return _on_canvas(bars, None)


def _on_canvas(sketch: Any, state: Any) -> np.ndarray:
    image = Image.new("RGB", SIZE, "white")
    sketch(ImageDraw.Draw(image), state)
    return np.asarray(image)


def _cartpole(draw: ImageDraw.ImageDraw, state: Any) -> None:
    x, y = 200 + float(state.x) * 200 / 2.6, 220
    tip = (x + 140 * np.sin(float(state.theta)), y - 140 * np.cos(float(state.theta)))
    draw.line([0, y + 15, 400, y + 15], fill="black")
    draw.rectangle([x - 28, y - 15, x + 28, y + 15], fill=(60, 60, 60))
    draw.line([(x, y - 10), tip], fill=(202, 152, 101), width=9)
    draw.ellipse([x - 4, y - 14, x + 4, y - 6], fill=(129, 132, 203))


def _pendulum(draw: ImageDraw.ImageDraw, state: Any) -> None:
    angle = float(state.theta)
    tip = (200 + 110 * np.sin(angle), 150 - 110 * np.cos(angle))
    draw.line([(200, 150), tip], fill=(204, 77, 77), width=16)
    draw.ellipse([195, 145, 205, 155], fill="black")


def _acrobot(draw: ImageDraw.ImageDraw, state: Any) -> None:
    first = float(state.joint_angle1)
    second = first + float(state.joint_angle2)
    elbow = (200 + 65 * np.sin(first), 150 + 65 * np.cos(first))
    tip = (elbow[0] + 65 * np.sin(second), elbow[1] + 65 * np.cos(second))
    draw.line([(0, 85), (400, 85)], fill="black")
    draw.line([(200, 150), elbow, tip], fill=(0, 150, 150), width=10)


def _mountain_car(draw: ImageDraw.ImageDraw, state: Any) -> None:
    xs = np.linspace(-1.2, 0.6, 100)
    points = [(float(400 * (x + 1.2) / 1.8), float(240 - 80 * (np.sin(3 * x) + 1))) for x in xs]
    draw.line(points, fill="black", width=2)
    x = float(state.position)
    px, py = 400 * (x + 1.2) / 1.8, 240 - 80 * (np.sin(3 * x) + 1)
    draw.ellipse([px - 10, py - 20, px + 10, py], fill=(60, 60, 160))


_SKETCHES = {
    "CartPole-v1": _cartpole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car,
}
