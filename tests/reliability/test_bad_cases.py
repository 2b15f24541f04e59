"""What cannot be trained is named before anything compiles or is written: what came, what would do, how to mend it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from toys_envs import counting

import jaxrl
from jaxrl import train
from jaxrl.envs import Env, TimeStep
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec
from jaxrl.training import loop, program

Refused = Callable[..., None]


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the names of all programs that are compiled."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="module")
def single_numbers() -> set[str]:
    """Programs of one operation by which JAX makes arrays of single numbers, as the description of a gymnax environment
    holds: they take a millisecond, and are no training. What was compiled before is heard again.
    """
    jax.clear_caches()
    with heard() as compiled:
        jaxrl.make_env("CartPole-v1")
    assert 0 < len(compiled) < 10
    return set(compiled)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_numbers: set[str]) -> Refused:
    """Check that an action is refused in one line that says all of `said`, before anything is compiled or written."""
    monkeypatch.chdir(tmp_path)
    for module in (loop, program):  # what was compiled before is not heard
        monkeypatch.setattr(module, "compile_all", lambda *args: pytest.fail("it began to compile"))

    def check(action: Callable[[], Any], *said: str) -> None:
        with heard() as compiled, pytest.raises(SettingsError) as error:
            action()
        line = str(error.value)
        assert "\n" not in line
        assert [part for part in said if part not in line] == [], line
        assert error.value.exit_code == 2
        assert set(compiled) - single_numbers == set()
        assert list(tmp_path.iterdir()) == []

    return check


def test_compiling_is_heard(single_numbers: set[str]) -> None:
    x = jnp.zeros(3)
    with heard() as compiled:
        jax.jit(jnp.sort)(x)
    assert set(compiled) - single_numbers == {"jit(sort)"}


# --- in a program ------------------------------------------------------------------------------------------------


def walker(step: Any = None, reset: Any = None, space: Any = None, actions: Any = None) -> Env:
    """A good environment, a walk over three numbers, to be spoilt in one part by each case."""
    spec = EnvSpec("walker", space or Box(-9.0, 9.0, (3,)), actions or Discrete(2), 20)
    return Env(spec, reset or (lambda key: _start()), step or (lambda state, action, key: _step(state)))


def _start() -> tuple[Any, Any]:
    return jnp.zeros(3), jnp.zeros(3)


def _step(state: Any, **other: Any) -> tuple[Any, TimeStep]:
    return state, TimeStep(**{"obs": state, "reward": 1.0, "terminated": False, **other})


def dqn_on(env: Env, **changes: Any) -> jaxrl.Strategy:
    """Build DQN with some of its parts replaced."""
    small = {"buffer": lambda: jaxrl.uniform(64, batch_size=8), "agent": jaxrl.dqn(features=(4,)), "warmup": 0}
    parts = {**small, **changes}
    buffer, agent = parts.pop("buffer"), parts.pop("agent")
    return jaxrl.off_policy(env, agent, buffer=buffer(), **parts)


def trained(strategy: jaxrl.Strategy, **settings: Any) -> None:
    jaxrl.Trainer(strategy, run_dir="run", quiet=True, **settings).train()


class Still(NamedTuple):
    key: Any
    count: Any


def still(**changes: Any) -> jaxrl.Strategy:
    """A strategy that does nothing, with some of its parts replaced."""
    parts = {
        "init": lambda key: Still(key, jnp.int32(0)), "step": lambda state, key, t: (state, {}),
        "env_steps_per_step": 1, "opt_steps_per_step": 1, **changes,
    }  # fmt: skip
    return jaxrl.Strategy(**parts)


SPACES: dict[str, tuple[Env, list[str]]] = {
    "continuous actions": (
        walker(actions=Box(-1.0, 1.0, (2,))), ["walker has Box actions", "takes discrete actions", "ppo"],
    ),
    "observation of another shape than its space": (
        walker(space=Box(-9.0, 9.0, (7,))), ["walker", "float32[3]", "float32[7]", "observation space"],
    ),
    "observation of another dtype than its space": (
        walker(space=Box(0, 255, (3,), "uint8")), ["walker", "float32[3]", "uint8[3]", "make them the same"],
    ),
    "observation of another shape after a step": (
        walker(lambda s, a, k: _step(s, obs=jnp.zeros(5))), ["observation after step", "float32[5]", "float32[3]"],
    ),
    "observation of another dtype after a step": (
        walker(lambda s, a, k: _step(s, obs=jnp.zeros(3, int))), ["observation after step", "int32[3]", "float32[3]"],
    ),
    "state of another structure after a step": (
        walker(lambda s, a, k: ((s, s), _step(s)[1])), ["state after step", "keep the structure the same"],
    ),
    "reward that is no scalar": (
        walker(lambda s, a, k: _step(s, reward=jnp.ones(2))), ["reward has shape (2,)", "expected a scalar"],
    ),
    "end that is no scalar": (
        walker(lambda s, a, k: _step(s, terminated=jnp.ones(3, bool))), ["terminated has shape (3,)", "a scalar"],
    ),
    "step without a time step": (
        walker(lambda s, a, k: (s, s, 1.0)), ["step returned tuple", "expected (state, jaxrl.TimeStep)"],
    ),
    "reset without an observation": (
        walker(reset=lambda key: jnp.zeros(3)), ["reset returned", "expected (state, observation)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPACES)
def test_an_environment_that_cannot_be_trained_in_is_named_before_anything_compiles(
    refused: Refused, case: str
) -> None:
    env, said = SPACES[case]
    refused(lambda: trained(dqn_on(env)), *said)


SETTINGS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "intervals that do not divide": (
        lambda: dqn_on(counting(), num_envs=8, opt_interval=12), ["opt_interval 12", "num_envs 8", "8 or 16"],
    ),
    "buffer below the batch": (
        lambda: dqn_on(counting(), buffer=lambda: jaxrl.uniform(10, batch_size=16)),
        ["buffer.capacity is 10", "buffer.batch_size 16", "at least 16"],
    ),
    "buffer of half an item": (
        lambda: dqn_on(counting(), buffer=lambda: jaxrl.uniform(64.5, batch_size=8)),  # type: ignore[arg-type]
        ["buffer.capacity is 64.5", "expected a whole number"],
    ),
    "buffer beyond the memory": (
        lambda: trained(dqn_on(walker(), buffer=lambda: jaxrl.uniform(2**31 - 64, batch_size=8), num_envs=64,
                               opt_interval=64, agent=jaxrl.dqn(features=(4,))), max_opts=10),
        ["GB", "the device has", "lower buffer.capacity to at most "],
    ),
    "learning rate that is none": (
        lambda: dqn_on(counting(), agent=jaxrl.dqn(lr=float("nan"))), ["agent.lr is nan", "expected"],
    ),
    "optimizer that is none": (
        lambda: dqn_on(counting(), agent=jaxrl.dqn(optimizer="adm")), ["'adm'", "did you mean adam"],
    ),
    "network without a width": (
        lambda: dqn_on(counting(), agent=jaxrl.dqn(features=(16, 0))), ["agent.features", "0", "at least 1"],
    ),
    "processor that makes no transitions": (
        lambda: dqn_on(counting(), processor=jaxrl.frame_stack(4)), ["makes no transitions", "chain(..., one_step())"],
    ),
    "trainer setting that is none": (
        lambda: trained(still(), max_optz=3), ["no setting 'max_optz'", "did you mean max_opts"],
    ),
    "run of no steps": (lambda: trained(still(), max_opts=0), ["max_opts is 0", "at least 1"]),
    "seed too large": (lambda: trained(still(), seed=2**32), [f"seed is {2**32}", "below 2^32"]),
    "evaluation without episodes": (
        lambda: trained(still(), eval_interval=5, eval_episodes=0), ["eval_interval is 5", "set eval_episodes to"],
    ),
    "evaluation without an environment": (
        lambda: trained(still(), eval_interval=5, eval_episodes=5), ["no env and policy to evaluate", "evaluator=..."],
    ),
    "state of another dtype after a step": (
        lambda: trained(still(step=lambda state, key, t: (state._replace(count=state.count + 0.5), {}))),
        ["state after step", ".count", "float32[]", "int32[]", "make them the same"],
    ),
    "metrics that are no dict": (
        lambda: trained(still(step=lambda state, key, t: (state, 3.0))), ["step returned float", "expected a dict"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_are_named_before_anything_compiles(refused: Refused, case: str) -> None:
    action, said = SETTINGS[case]
    refused(action, *said)


# --- on the command line -----------------------------------------------------------------------------------------

ARGUMENTS: dict[str, list[str]] = {
    "--env CartPol-v1": ["'CartPol-v1'", "CartPole-v1"],
    "--env Pendulum-v1": ["Pendulum-v1 has Box actions", "takes discrete actions", "ppo"],
    "--num-env 3": ["--num-env", "did you mean --num-envs"],
    "--num-envs ten": ["--num-envs", "ten"],
    "--num-envs 8 --opt-interval 3": ["opt_interval 3", "num_envs 8", "2 or 4"],
    "--agent.lr -1": ["agent.lr is -1", "expected"],
    "--agent.loss hubber": ["'hubber'", "huber"],
    "--agent.accumulate 3": ["accumulate", "3", "128"],
    "--agent.torso minatar": ["minatar", "[H, W, C]"],
    "--processor.discount 2": ["discount is 2", "from 0 to 1"],
    "--processor.n-step 0": ["n_step is 0", "at least 1"],
    "--buffer.capacity 100": ["buffer.capacity is 100", "at least 128"],
    "--buffer.capacity 2000000000": ["GB", "lower buffer.capacity"],
    "--eval-episodes 0": ["eval_interval is 600", "set eval_episodes to at least 1"],
    "--patience 2 --eval-interval 0": ["patience", "set eval_interval"],
    "--seed -1": ["seed is -1", "at least 0"],
    "--env-args max_steps_in_episode -5": ["time_limit is -5", "at least 1"],
    "--env-args max_step 5": ["'max_step'", "did you mean max_steps_in_episode"],
    "--resume nowhere": ["nowhere is no run directory"],
    "--config nowhere.yaml": ["cannot read nowhere.yaml", "No such file"],
    "--start-over": ["--start-over needs the run", "--resume DIR", "--run-dir DIR"],
    "--allow-changes": ["--allow-changes", "give --resume DIR as well"],
}


@pytest.mark.parametrize("args", ARGUMENTS)
def test_bad_arguments_are_named_before_anything_compiles(refused: Refused, args: str) -> None:
    refused(lambda: train.main([*args.split(), "--quiet"]), *ARGUMENTS[args])
