"""The programs that are compiled: training as users have it, evaluation, and the plain loops beside them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from benchmarks import loops, plain_ppo
from benchmarks.cases import OTHERS, dqn_shape, ppo_shape
from benchmarks.cases.shapes import DQN, PPO, replaying
from benchmarks.pixels import catching
from jaxrl.buffers.dataset import Dataset
from jaxrl.cli.algos import build
from jaxrl.cli.config import preset
from jaxrl.nn import CORES
from jaxrl.registry import ALGORITHMS, algorithm_maker
from jaxrl.spaces import space_zeros
from jaxrl.strategies.base import Strategy
from jaxrl.training.evaluator import run_episodes
from jaxrl.training.program import longest_sum, run, run_together, state_shapes
from jaxrl.trees import PyTree
from jaxrl.xla.options import compiler_options, graph_options, product_options

COUNT = jax.ShapeDtypeStruct((), jnp.uint32)
STEPS = 10_000
"""Of the data that offline agents learn from."""


class Program(NamedTuple):
    """A function to compile."""

    function: Callable[..., Any]
    shapes: tuple[PyTree, ...]
    """Of its arguments."""
    donated: tuple[int, ...] = ()
    opt_steps: float = 1
    """Of an iteration."""
    env_steps: float = 1
    """Of an iteration."""
    options: Callable[[Any], dict[str, Any] | None] = lambda jaxpr: None
    """XLA's for what was traced, as it is compiled by who uses it."""
    depth: int = 2
    """Of the loop over iterations, see `hlo.kernels`."""


def training(strategy: Strategy) -> Program:
    """Return the training call of a strategy."""
    state, sums = state_shapes(strategy)
    return Program(
        partial(run, strategy),
        (state, sums, COUNT, COUNT),
        (0, 1),
        strategy.opt_steps_per_step,
        strategy.env_steps_per_step,
        lambda jaxpr: {**(compiler_options() or {}), **product_options(lambda: longest_sum(jaxpr))},
    )


def together(strategy: Strategy, width: int) -> Program:
    """Return the training call of `width` members in one program; an iteration is one of all of them."""
    one = training(strategy)
    wide = lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype)
    state, sums = jax.tree.map(wide, state_shapes(strategy))
    return one._replace(
        function=partial(run_together, strategy, False), shapes=(state, sums, COUNT, COUNT), donated=(0,)
    )


def evaluation(strategy: Strategy, episodes: int = 20) -> Program:
    """Return the evaluation of what a strategy trains; an iteration is a step of all episodes."""
    state, _ = state_shapes(strategy)
    env, policy = strategy.env, strategy.policy
    assert isinstance(env, jaxrl.Env)
    assert policy is not None
    params = jax.eval_shape(policy.params, state)
    function = partial(run_episodes, env, policy, episodes, env.spec.time_limit or 1_000)
    return Program(function, (params, state.key), env_steps=episodes, options=lambda jaxpr: graph_options(), depth=1)


def plain(loop: loops.Loop, opt_steps: float, env_steps: float) -> Program:
    """Return a loop of the usual style."""
    return Program(loop.body, (loop.carry, COUNT, COUNT), (0,), opt_steps, env_steps, depth=1)


def strategy_of(algo: str) -> Strategy:
    """Return the training of an agent by its presets, on its own environment, or on data."""
    return _offline(algo) if ALGORITHMS[algo].kind == "offline" else build(algo, preset(algo))


def of_agent(algo: str) -> Program:
    """Return the training call of `strategy_of`."""
    return training(strategy_of(algo))


def _offline(algo: str) -> Strategy:
    """Return the learning of `STEPS` steps that are all alike; only their number decides the program."""
    env = jaxrl.make_env("CartPole-v1" if "discrete" in ALGORITHMS[algo].actions else "Pendulum-v1")
    obs, action = (
        jax.tree.map(np.asarray, space_zeros(space, STEPS))
        for space in (env.spec.observation_space, env.spec.action_space)
    )
    ends = np.arange(1, STEPS + 1) % 100 == 0
    data = Dataset(env.spec, obs, action, np.zeros(STEPS, np.float32), obs, ends, np.zeros(STEPS, bool))
    return jaxrl.offline(data, algorithm_maker(algo)(), env=env)


def _dqn(num_envs: int) -> Program:
    return training(replaying(dqn_shape(num_envs)))


def _ppo(num_envs: int) -> Program:
    return training(ppo_shape(num_envs).strategy())


def _plain_dqn(num_envs: int) -> Program:
    shape = dqn_shape(num_envs)
    return plain(shape.plain(), 1, max(shape.num_envs, shape.opt_interval))


def _plain_ppo(num_envs: int) -> Program:
    shape = ppo_shape(num_envs)
    return plain(plain_ppo.plain_ppo(shape.plain()), shape.epochs * shape.minibatches, shape.rollout * shape.num_envs)


STACK = 4
"""Frames of an observation of 84 x 84."""
TORSOS = {"nature": (512,), "impala": (256,)}
"""Dense layers behind the convolutions, as published."""


def _dqn_of_frames(torso: str) -> Program:
    """Return DQN on frames of 84 x 84, each kept once in a replay of 100 000."""
    strategy = jaxrl.off_policy(
        catching(),
        jaxrl.dqn(torso=torso, features=TORSOS[torso]),
        buffer=jaxrl.uniform(100_000, batch_size=32, compact=True, frames=STACK),
        processor=jaxrl.chain(jaxrl.frame_stack(STACK), jaxrl.one_step()),
        num_envs=16,
        opt_interval=16,
    )
    return training(strategy)


def _ppo_of_frames(torso: str) -> Program:
    """Return PPO on frames of 84 x 84, with rollouts and minibatches as on Atari."""
    strategy = jaxrl.on_policy(
        catching(),
        jaxrl.ppo(torso=torso, features=TORSOS[torso], activation="relu", shared=True),
        processor=jaxrl.chain(jaxrl.frame_stack(STACK), jaxrl.one_step()),
        num_envs=8,
        rollout=128,
        epochs=4,
        minibatches=4,
    )
    return training(strategy)


SIZED: dict[str, Callable[[int], Program]] = {
    "dqn": _dqn,
    "ppo": _ppo,
    "dqn-width": lambda width: training(replaying(DQN(features=(width, width)))),
    "ppo-width": lambda width: training(PPO(features=(width, width)).strategy()),
    "seeds": lambda width: together(replaying(dqn_shape(10)), width),
    "plain-dqn": _plain_dqn,
    "plain-ppo": _plain_ppo,
}


def _ppo_with_memory(core: str) -> Program:
    settings = preset("ppo")
    return training(build("ppo", replace(settings, agent=replace(settings.agent, core=core))))


CASES: dict[str, Callable[[], Program]] = {
    **{f"dqn-{size}": partial(_dqn, size) for size in (1, 10, 128, 1024)},
    **{f"plain-dqn-{size}": partial(_plain_dqn, size) for size in (10, 128)},
    **{f"ppo-{size}": partial(_ppo, size) for size in (4, 64, 1024)},
    **{f"plain-ppo-{size}": partial(_plain_ppo, size) for size in (4, 1024)},
    **{f"seeds-{width}": partial(SIZED["seeds"], width) for width in (32, 256)},
    "dqn-conv": lambda: training(replaying(OTHERS["dqn-conv"])),
    "ppo-conv": lambda: training(PPO("Breakout-MinAtar", num_envs=64, features=(128,)).strategy()),
    **{f"dqn-{torso}": partial(_dqn_of_frames, torso) for torso in TORSOS},
    **{f"ppo-{torso}": partial(_ppo_of_frames, torso) for torso in TORSOS},
    **{f"ppo-{core}": partial(_ppo_with_memory, core) for core in CORES},
    "evaluate": lambda: evaluation(replaying(dqn_shape(10))),
    **{algo: partial(of_agent, algo) for algo in ALGORITHMS},
}


def case_named(name: str) -> Callable[[], Program]:
    """Return what makes the program of a case; the name may be one of `SIZED` with any number behind it.

    Raises:
      KeyError: there is none of the name.
    """
    if name in CASES:
        return CASES[name]
    kind, _, size = name.rpartition("-")
    if kind not in SIZED or not (size.isdecimal() and int(size)):
        raise KeyError(name)
    return partial(SIZED[kind], int(size))
