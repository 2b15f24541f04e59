"""Gymnasium environments whose every number is known."""

import multiprocessing
import os
import subprocess
import threading
import time
from typing import Any

import gymnasium
import numpy as np


class Frames(gymnasium.Env):
    """Show frames `[3, 12, 10]`, channels first, and how many steps were taken; an episode takes four steps."""

    observation_space = gymnasium.spaces.Dict(
        camera=gymnasium.spaces.Box(0, 255, (3, 12, 10), np.uint8), steps=gymnasium.spaces.Box(0.0, 4.0, (1,))
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self.steps += 1
        return self._obs(), 1.0, self.steps == 4, False, {}

    def _obs(self) -> dict:
        frame = (np.arange(360).reshape(3, 12, 10) + self.steps) % 251
        return {"camera": frame.astype(np.uint8), "steps": np.array([self.steps], np.float32)}


class Counting(gymnasium.Env):
    """Observe `[steps taken, number of the episode]`; the reward is the number of the step, from 1.

    Odd episodes terminate after 3 steps, even ones are truncated after 5.
    """

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, bad_step: int = 0, raise_step: int = 0, hang_step: int = 0, bad_reset: int = 0) -> None:
        self.steps = self.episode = self.total = 0
        self.bad_step, self.raise_step, self.hang_step = bad_step, raise_step, hang_step
        self.bad_reset = bad_reset

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self._obs() * (np.nan if self.episode == self.bad_reset else 1.0), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(int(action)), action
        self.steps, self.total = self.steps + 1, self.total + 1
        if self.total == self.raise_step:
            raise RuntimeError("the motor\nis on fire")
        if self.total == self.hang_step:
            time.sleep(1e6)
        odd = self.episode % 2 == 1
        obs = self._obs() * (np.nan if self.total == self.bad_step else 1.0)
        return obs, float(self.steps), odd and self.steps == 3, not odd and self.steps == 5, self._info()

    def _info(self) -> dict:
        return {}

    def _obs(self) -> np.ndarray:
        return np.array([self.steps, self.episode], np.float64)


class Telling(Counting):
    """Tell `left`, 10 minus the step, `parts` of it, in odd episodes at their end `won`, and what is no number."""

    def _info(self) -> dict:
        told = {"left": 10 - self.steps, "word": "no", "row": np.zeros(3), "parts": {"half": (10 - self.steps) / 2}}
        told["episode_steps"] = np.float64(self.steps)
        return told | ({"won": True} if self.episode % 2 == 1 and self.steps == 3 else {})


class Locks(gymnasium.Env):
    """Show a door's number, from 2 to 5, and a hint, from 7; action `number - 3`, from -1 to 2, pays 1 and opens it.

    Episodes take eight steps.
    """

    observation_space = gymnasium.spaces.Dict(
        door=gymnasium.spaces.Discrete(4, start=2), hint=gymnasium.spaces.MultiDiscrete([2, 3], start=[7, 0])
    )
    action_space = gymnasium.spaces.Discrete(4, start=-1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        assert self.action_space.contains(int(action)), action
        self.steps += 1
        reward = float(action == self.door - 3)
        return self._next(), reward, self.steps == 8, False, {}

    def render(self) -> np.ndarray:
        return np.zeros((8, 8, 3), np.uint8)

    def _next(self) -> dict:
        self.door = int(self.np_random.integers(2, 6))
        return self.shown(self.door)

    @staticmethod
    def shown(door: int) -> dict:
        return {"door": np.int64(door), "hint": np.array([7 + door % 2, door % 3])}


class Silent(Exception):
    """Raise when asked for a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unsendable(Exception):
    """Hold what cannot be pickled."""

    def __init__(self, *what: object) -> None:
        super().__init__(*what)
        self.lock = threading.Lock()


class Deadly(Exception):
    """End the thread that asks for a text."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class Raising(Counting):
    """Raise an exception of a kind of its own in the 40th step, and another one when closed after that."""

    def __init__(self, kind: type[Exception] = Silent) -> None:
        super().__init__()
        self.kind = kind

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.total == 39:
            raise self.kind("oil", "fire")
        return super().step(action)

    def close(self) -> None:
        if self.total == 39:
            raise OSError("closed in flames")


class Tallied(Counting):
    """Write the number of its steps to a file when it is closed."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def close(self) -> None:
        with open(self.file, "a") as file:
            file.write(f"{self.total}\n")


class Starting(Counting):
    """Start two processes, the second in a session of its own, and write to a file who has started which."""

    def __init__(self, file: str) -> None:
        super().__init__()
        for own in (False, True):
            child = subprocess.Popen(["sleep", "3600"], start_new_session=own)
            with open(file, "a") as log:
                log.write(f"{os.getpid()} {child.pid}\n")


class Ending(Counting):
    """Start a process, end it in `close`, and write to a file how it ended."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.child = file, subprocess.Popen(["sleep", "100"])

    def close(self) -> None:
        self.child.terminate()
        code = self.child.wait(20)
        with open(self.file, "a") as log:
            log.write(f"{code}\n")


class Unopened(Counting):
    """In another process: with a file, write to it and hang in the constructor; without one, raise there."""

    def __init__(self, file: str = "") -> None:
        super().__init__()
        if multiprocessing.parent_process() is None:
            return
        if not file:
            raise OSError("no display")
        with open(file, "a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(1e6)
