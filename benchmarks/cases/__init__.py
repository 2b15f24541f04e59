"""The cases: what is timed, against which limit."""

from collections.abc import Callable
from functools import partial

from benchmarks.cases.parts import environment, replay, session
from benchmarks.cases.runs import actors, host, start
from benchmarks.cases.shapes import DQN, PPO, SAC
from benchmarks.cases.training import capacity, off_policy, ppo, seeds
from benchmarks.harness import Effort, Row

Case = Callable[[Effort], list[Row]]


def dqn_shape(num_envs: int) -> DQN:
    """One optimisation per 10 environment steps where that divides, per vector step otherwise."""
    opt_interval = num_envs if 10 % num_envs else 10
    warmup = max(1_000, 2 * num_envs)
    return DQN(num_envs=num_envs, opt_interval=opt_interval, warmup=warmup - warmup % -num_envs)


def ppo_shape(num_envs: int) -> PPO:
    """Rollouts of 128 steps, and 4 epochs of 4 minibatches on each."""
    return PPO(num_envs=num_envs, slowness=max(1, num_envs // 16))


def _dqn(case: str, num_envs: int, effort: Effort) -> list[Row]:
    return off_policy(case, dqn_shape(num_envs), effort)


def _ppo(case: str, num_envs: int, effort: Effort) -> list[Row]:
    return ppo(case, ppo_shape(num_envs), effort)


SIZES: dict[str, Callable[[str, int, Effort], list[Row]]] = {
    "dqn": _dqn,
    "ppo": _ppo,
    "seeds": seeds,
    "env": environment,
}
"""Cases that there are of every size: environments, or seeds."""


def sized(name: str) -> Case:
    """Return the case `KIND-SIZE`; raise `KeyError` if there is none."""
    kind, _, size = name.partition("-")
    if not (size.isdecimal() and int(size)):
        raise KeyError(name)
    return partial(SIZES[kind], name, int(size))


def case_named(name: str) -> Case:
    """Return the case `name`; raise `KeyError` if there is none."""
    return CASES.get(name) or sized(name)


OTHERS: dict[str, DQN | SAC] = {
    "dqn-small": DQN(features=(64, 64), batch_size=32),
    "dqn-conv": DQN("Breakout-MinAtar", 16, 16, batch_size=32, warmup=1_008, slowness=10),
    "sac": SAC(),
}
CASES: dict[str, Case] = {
    **{name: sized(name) for name in ("dqn-1", "dqn-10", "dqn-128", "dqn-1024")},
    **{name: partial(off_policy, name, shape) for name, shape in OTHERS.items()},
    **{name: sized(name) for name in ("ppo-4", "ppo-64", "ppo-1024", "seeds-8", "seeds-32")},
    "session": partial(session, "session"),
    "capacity": partial(capacity, "capacity"),
    "replay": partial(replay, "replay"),
    "host": partial(host, "host"),
    "actors": partial(actors, "actors"),
    "start": partial(start, "start"),
    **{name: sized(name) for name in ("env-10", "env-1024")},
}
