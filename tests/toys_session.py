"""Sessions small enough for a test, and loops that drive them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jaxrl
from jaxrl.training.leaves import state_digest

SPEC = jaxrl.EnvSpec("scripted", jaxrl.Box(-10.0, 10.0, (2,)), jaxrl.Discrete(3))


def small(spec: Any = SPEC, **settings: Any) -> jaxrl.Session:
    """A session of DQN over three steps, with two environments unless asked for otherwise."""
    given = {"num_envs": 2, "opt_interval": 4, "warmup": 20, "max_opts": 1_000, "save_interval": 0, **settings}
    parts: dict[str, Any] = {
        "agent": jaxrl.dqn(features=(8,), epsilon_decay=20, target_interval=5),
        "buffer": jaxrl.uniform(40, batch_size=8),
        "processor": jaxrl.n_step(3),
    }
    parts |= {name: given.pop(name) for name in list(given) if name in parts}
    return jaxrl.Session(spec, parts.pop("agent"), **parts, **given)


class Script:
    """`N` environments whose every number follows from how many steps were taken and from the actions."""

    def __init__(self, num_envs: int = 2, step: int = 0) -> None:
        self.num_envs, self.step, self.actions = num_envs, step, np.zeros(num_envs, int)

    def obs(self, fresh: np.ndarray | None = None) -> np.ndarray:
        """What is seen now; where an episode has just ended, the first of the next one if `fresh` says so."""
        seen = np.stack([np.sin(self.step + np.arange(self.num_envs)), 0.1 * self.actions], axis=1)
        return seen if fresh is None else np.where(fresh[:, None], seen + 3.0, seen)

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return reward, successor, terminated and truncated; episodes of the environments end in turns."""
        self.step, self.actions = self.step + 1, np.asarray(actions)
        place = self.step + np.arange(self.num_envs)
        return self.actions - 0.5, self.obs(), place % 5 == 0, place % 7 == 0


def drive(session: jaxrl.Session, script: Script, steps: int, between: Callable[[], Any] = lambda: None) -> None:
    """Take `steps` steps, calling `between` after each half of one."""
    for _ in range(steps):
        # Before the first step every episode begins, yet there is nothing that this would have to look different from.
        actions = session.act(script.obs(session.ended))
        between()
        session.observe(*script.advance(actions))
        between()


def digest(session: jaxrl.Session) -> str:
    """Return the sha256 of all that a session would save."""
    now = session._now
    return state_digest((now.state, now.sums, now.host, np.array([now.steps, now.invalid])))
