"""Environments whose actions have several parts, and whose best reward is known."""

from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs import Env, TimeStep
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.trees import Array, Key

PLACES = (-0.5, 0.1, 0.6)
"""Where to aim at what the observation says, 0, 1 or 2."""
SPACE = {"aim": (Box(-1.0, 1.0, (1,)), MultiDiscrete((2, 2))), "move": Discrete(3)}
"""Actions of all kinds, nested."""


class Marksman(NamedTuple):
    seen: Array
    mask: Array
    """Bool `[3]`: all true without a mask."""
    mistakes: Array
    """Forbidden actions taken so far."""


def marksman(masked: bool = False, length: int = 1) -> Env:
    """Pay 1 for the `move` that is seen, less the squared distance to the place to aim at there; at most 1.

    With a mask, one `move` is forbidden at random at each step, never the one that is seen, and pays 1000.
    """
    place = jnp.asarray(PLACES)
    shown = {"seen": Discrete(3)}
    masks: dict[str, Any] = {"action_mask": {"move": Box(0, 1, (3,), bool)}} if masked else {}
    spec = EnvSpec("Marksman", {**shown, **masks}, SPACE, length)

    def begin(key: Key, mistakes: Array) -> Marksman:
        seen_key, mask_key = jax.random.split(key)
        seen = jax.random.randint(seen_key, (), 0, 3)
        forbidden = (seen + jax.random.randint(mask_key, (), 1, 3)) % 3
        return Marksman(seen, jnp.arange(3) != forbidden if masked else jnp.ones(3, bool), mistakes)

    def show(state: Marksman) -> dict[str, Any]:
        return {"seen": state.seen, **({"action_mask": {"move": state.mask}} if masked else {})}

    def reset(key: Key) -> tuple[Marksman, dict[str, Any]]:
        state = begin(key, jnp.int32(0))
        return state, show(state)

    def step(state: Marksman, action: Any, key: Key) -> tuple[Marksman, TimeStep]:
        wrong = ~state.mask[action["move"]]
        reward = (action["move"] == state.seen) - jnp.square(action["aim"][0][0] - place[state.seen])
        after = begin(key, state.mistakes + wrong)
        return after, TimeStep(show(after), jnp.where(wrong, 1000.0, reward), False)

    return Env(spec, reset, step)


class Strict(gymnasium.Env):
    """Take only what is in its space, with the dtypes and shapes of its parts, and pay as `marksman` does.

    Episodes take four steps.
    """

    observation_space = gymnasium.spaces.Dict(seen=gymnasium.spaces.Discrete(3, start=4))
    parts: ClassVar[dict[str, Any]] = {
        # 0.6 is rounded up in float32, and that is where to aim at one of three observations.
        "aim": gymnasium.spaces.Tuple(
            [gymnasium.spaces.Box(-0.6, 0.6, (1,), np.float64), gymnasium.spaces.MultiBinary(2)]
        ),
        "move": gymnasium.spaces.Discrete(3, start=4),
        "turn": gymnasium.spaces.MultiDiscrete([2, 3], start=[-1, 5]),
    }

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, kind: str = "dict", render_mode: str | None = None) -> None:
        spaces = gymnasium.spaces
        self.kind, self.render_mode = kind, render_mode
        self.action_space = spaces.Dict(self.parts) if kind == "dict" else spaces.Tuple([*self.parts.values()])
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        assert self.action_space.contains(action), action
        (where, buttons), move, turn = (action[name] for name in self.parts) if self.kind == "dict" else action
        assert (where.dtype, where.shape) == (np.float64, (1,))
        assert (buttons.dtype, buttons.shape) == (np.int8, (2,))
        assert (turn.dtype, turn.shape) == (np.int64, (2,))
        assert np.ndim(move) == 0
        reward = float(move == self.seen) - float((where[0] - PLACES[self.seen - 4]) ** 2)
        self.steps += 1
        return self._next(), reward, False, self.steps == 4, {}

    def render(self) -> np.ndarray:
        return np.zeros((8, 8, 3), np.uint8)

    def _next(self) -> dict:
        self.seen = int(self.np_random.integers(4, 7))
        return {"seen": np.int64(self.seen)}
