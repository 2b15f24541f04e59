"""What is left out means the same in Python and on the command line, name by name."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import jax
import pytest

import jaxrl
from jaxrl.algos import BufferConfig, OfflineRun, OffPolicyRun, OnPolicyRun, ProcessorConfig, build, general
from jaxrl.registry import names_of
from jaxrl.training.settings import SessionConfig


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def of_dataclass(kind: Any) -> dict[str, Any]:
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    return {name: value for name, value in made.items() if value is not MISSING}


PAIRS: dict[str, tuple[Callable[..., Any], Any, set[str]]] = {
    "off_policy": (
        jaxrl.off_policy,
        OffPolicyRun,
        {"num_envs", "opt_interval", "updates", "warmup", "random_warmup"},
    ),
    "on_policy": (jaxrl.on_policy, OnPolicyRun, {"num_envs", "rollout", "epochs", "minibatches"}),
    "offline": (jaxrl.offline, OfflineRun, {"batch_size", "updates"}),
    "uniform": (jaxrl.uniform, BufferConfig, {"capacity", "batch_size", "compact", "ends", "frames"}),
    "prioritised": (jaxrl.prioritised, BufferConfig, set(of_dataclass(BufferConfig)) - {"prioritised"}),
    "one_step": (jaxrl.one_step, ProcessorConfig, {"discount"}),
    "n_step": (jaxrl.n_step, ProcessorConfig, {"discount"}),
    "normalise_reward": (jaxrl.normalise_reward, ProcessorConfig, {"discount"}),
}
"""A function, what stands for it on the command line, and the names that both have a default of."""

ELSEWHERE = {"processor", "env", "holdout", "actors"}
"""Names that both have, but that are parts on the one side and text or rules on the other."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_of_the_library_has_the_defaults_of_the_command_line(name: str) -> None:
    function, config, names = PAIRS[name]
    library, command = of_function(function), of_dataclass(config)
    assert library.keys() & command.keys() - ELSEWHERE == names  # none has come or gone unseen
    assert {n: library[n] for n in names} == {n: command[n] for n in names}


def test_a_session_has_the_defaults_of_off_policy_training_but_for_one_environment() -> None:
    session, command = of_dataclass(SessionConfig), of_dataclass(OffPolicyRun)
    assert session.keys() <= command.keys()
    assert {n for n in session if session[n] != command[n]} == {"num_envs"}
    assert session["num_envs"] == 1  # a loop of one's own is usually around one


def test_the_settings_of_an_agent_are_the_same_object_on_both_sides() -> None:
    """`jaxrl.dqn()` and `--agent.*` read one dataclass, so that its defaults cannot differ."""
    spec = jaxrl.EnvSpec("x", jaxrl.Box(-1.0, 1.0, (3,)), jaxrl.Discrete(2))
    for name in names_of(actions="discrete"):
        maker = getattr(jaxrl, name)
        assert maker()(spec).settings == maker(general(name).agent)(spec).settings


@pytest.mark.parametrize(("kind", "lag"), [("off", 2), ("on", 1)])
@pytest.mark.parametrize("given", [None, 0, 3])
def test_actors_are_two_rounds_behind_and_of_rollouts_one_unless_told(kind: str, lag: int, given: int | None) -> None:
    actors = jaxrl.ActorsConfig(actors=2) if given is None else jaxrl.ActorsConfig(actors=2, max_lag=given)
    env = jaxrl.make_env("CartPole-v1")
    if kind == "off":
        strategy = jaxrl.off_policy(env, jaxrl.dqn(features=(4,)), buffer=jaxrl.uniform(), actors=actors)
    else:
        strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), actors=actors)
    assert strategy.settings is not None
    assert strategy.remote is not None
    expected = lag if given is None else given
    assert (strategy.settings["max_lag"], strategy.remote.config.max_lag) == (expected, expected)


def test_the_library_alone_trains_as_the_command_line_without_a_preset() -> None:
    """`off_policy`, `dqn` and `uniform` with nothing said start from the very state of the command line."""
    whole = build("dqn", general("dqn"))
    ours = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(), buffer=jaxrl.uniform())
    assert ours.settings == whole.settings
    assert ours.warmup_env_steps == whole.warmup_env_steps == 1_000
    assert jax.eval_shape(ours.init, jax.random.key(0)) == jax.eval_shape(whole.init, jax.random.key(0))


@pytest.mark.parametrize("name", names_of("on_policy"))
def test_what_the_library_makes_of_rollouts_is_what_the_command_line_makes(name: str) -> None:
    """All of these but PQN learn from rewards of one scale, unless told another processor."""
    env, agent, config = jaxrl.make_env("CartPole-v1"), getattr(jaxrl, name)(), general(name)
    shape = {"rollout": config.rollout, "epochs": config.epochs, "minibatches": config.minibatches}
    ours = jaxrl.on_policy(env, agent, **shape)
    assert ours.settings == build(name, config).settings
    assert ours.settings is not None
    assert ours.settings["processor"]["normalise_reward"] == (name != "pqn")
    told = jaxrl.on_policy(env, agent, processor=jaxrl.one_step(), **shape)
    assert told.settings is not None
    assert not told.settings["processor"]["normalise_reward"]
