"""What is timed call by call, from the host: learners of actors, environments of Gymnasium, sessions."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from benchmarks.loops import Training
from jaxrl.strategies.base import Strategy


class Learner:
    """The learner of a strategy with actors by itself: its compiled iterations, over one and the same arrival."""

    def __init__(self, strategy: Strategy) -> None:
        assert strategy.actor_fns is not None
        self.training = Training(strategy)
        self.arrival = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), strategy.actor_fns.arrival)

    def us(self, iterations: int) -> float:
        """Make `iterations`; return microseconds per optimisation step."""
        whole, begun = self.training, time.perf_counter()
        for _ in range(iterations):
            whole.state, whole.sums = whole.compiled(whole.state, whole.sums, self.arrival, np.uint32(whole.t))
            whole.t += 1
        jax.block_until_ready((whole.state, whole.sums))
        return (time.perf_counter() - begun) / (iterations * whole.strategy.opt_steps_per_step) * 1e6


class GymnasiumThreads:
    """Vectors of a Gymnasium environment, each stepped by a thread of its own with random actions: nothing else."""

    def __init__(self, name: str, threads: int, num_envs: int) -> None:
        import gymnasium

        mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        make = lambda: gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=mode)
        self.vectors = [make() for _ in range(threads)]
        for seed, vector in enumerate(self.vectors):
            vector.reset(seed=seed)
            vector.action_space.seed(seed)

    def us(self, steps: int) -> float:
        """Take `steps` steps of each vector; return microseconds for one of them all."""
        actions = [[vector.action_space.sample() for _ in range(steps)] for vector in self.vectors]
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(self.vectors)) as pool:
            for done in [pool.submit(_walk, vector, own) for vector, own in zip(self.vectors, actions, strict=True)]:
                done.result()
        return (time.perf_counter() - begun) / steps * 1e6


def _walk(vector: Any, actions: list[np.ndarray]) -> None:
    for action in actions:
        vector.step(action)


def session_us(session: jaxrl.Session, steps: int, repeats: int) -> dict[str, list[float]]:
    """Time `steps` steps of a session of one environment, those left out at which it learnt or waited for that.

    Returns the median microseconds of a step for each repeat, as `subject`; as `ceiling` those of the two compiled
    programs in it alone.
    """
    obs = np.ones(session._outside.spec.observation_space.shape, np.float32)
    while not session.opt_steps:
        _session_step(session, obs)
    samples: dict[str, list[float]] = {"subject": [], "ceiling": []}
    for repeat in range(repeats + 1):
        told = [us for us, learnt in (_session_step(session, obs) for _ in range(steps)) if not learnt]
        alone = _session_programs(session, obs, steps // 4)
        if repeat:
            samples["subject"].append(statistics.median(told))
            samples["ceiling"].append(alone)
    return samples


def _session_step(session: jaxrl.Session, obs: np.ndarray) -> tuple[float, bool]:
    begun = time.perf_counter()
    session.act(obs)
    learnt = session.observe(1.0, obs, False, False) is not None
    us = (time.perf_counter() - begun) * 1e6
    if learnt:
        jax.block_until_ready(session._now.state)
    return us, learnt


def _session_programs(session: jaxrl.Session, obs: np.ndarray, times: int) -> float:
    """Return the median microseconds of choosing an action and taking a step in, on a copy of the iteration's steps."""
    now, act, place = session._now, session._stepper.act["train"], np.zeros(3, np.uint32)
    told, items, us = now.state.last.result, jax.tree.map(jnp.copy, now.state.items), []
    for _ in range(times):
        begun = time.perf_counter()
        action, extras = act(now.state.agent, now.state.window.shown, now.state.key, place)
        np.array(action)
        items, window = session._stepper.process_step[True](items, now.state.window, action, extras, told, np.uint32(0))
        jax.block_until_ready((items, window))
        us.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(us)


def population_us(strategy: jaxrl.Strategy, seeds: int, opts: int) -> float:
    """Train so many seeds side by side; return microseconds per optimisation step of all, from warm-up to result."""
    trainer = jaxrl.PopulationTrainer(
        jaxrl.population(strategy, seeds=seeds),
        max_opts=opts,
        eval_interval=0,
        eval_episodes=0,
        record_interval=0,
        save_interval=0,
        quiet=True,
    )
    begun = time.perf_counter()
    trainer.train()
    return (time.perf_counter() - begun) / (seeds * opts) * 1e6
