"""What is left out means the same in Python and on the command line, name by name; and presets fit."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import pytest
from toys_suites import presets_fit

import jaxrl
from jaxrl.cli.algos import BufferConfig, OfflineRun, OffPolicyRun, OnPolicyRun, ProcessorConfig, build, general
from jaxrl.cli.config import preset
from jaxrl.cli.presets import PRESETS
from jaxrl.registry import ALGORITHMS, algorithm_names
from jaxrl.training.session.session import ROLLOUT_SETTINGS
from jaxrl.training.settings import SessionConfig


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def of_dataclass(kind: Any) -> dict[str, Any]:
    made = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    return {name: value for name, value in made.items() if value is not MISSING}


PAIRS: dict[str, tuple[Callable[..., Any], Any, set[str]]] = {
    "off_policy": (
        jaxrl.off_policy,
        OffPolicyRun,
        {"resets", "demo_share", "shards"},
    ),
    "on_policy": (jaxrl.on_policy, OnPolicyRun, {"resets", "shards"}),
    "offline": (jaxrl.offline, OfflineRun, {"updates", "replacement", "scale_rewards_by"}),
    "uniform": (jaxrl.uniform, BufferConfig, {"capacity", "batch_size", "compact", "ends", "frames", "memory"}),
    "prioritised": (jaxrl.prioritised, BufferConfig, set(of_dataclass(BufferConfig)) - {"prioritised", "hindsight"}),
    "one_step": (jaxrl.one_step, ProcessorConfig, {"discount"}),
    "n_step": (jaxrl.n_step, ProcessorConfig, {"discount"}),
    "normalise_reward": (jaxrl.normalise_reward, ProcessorConfig, {"discount"}),
}
"""A function, what stands for it on the command line, and the names that both have a default of."""

ELSEWHERE = {"processor", "env", "holdout", "actors", "demos", "teacher"}
"""Names that both have, but that are parts on the one side and text or rules on the other."""
BY_AGENT = {
    "off_policy": {"buffer", "num_envs", "opt_interval", "updates", "warmup", "random_warmup", "stagger"},
    "on_policy": {"num_envs", "rollout", "epochs", "minibatches", "stagger"},
    "offline": {"batch_size"},
}
"""Names of which the agent decides what suits, on both sides."""


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_of_the_library_has_the_defaults_of_the_command_line(name: str) -> None:
    function, config, names = PAIRS[name]
    library, command = of_function(function), of_dataclass(config)
    assert (
        library.keys() & command.keys() - ELSEWHERE - BY_AGENT.get(name, set()) == names
    )  # none has come or gone unseen
    assert {n: library[n] for n in names} == {n: command[n] for n in names}


def test_a_session_has_the_defaults_of_off_policy_training_but_for_one_environment_and_no_console() -> None:
    session, command = of_dataclass(SessionConfig), of_dataclass(OffPolicyRun)
    assert {session.pop(name) for name in ROLLOUT_SETTINGS} == {None}  # of on-policy agents, what suits each
    assert session.keys() <= command.keys()
    assert {n for n in session if session[n] != command[n]} == {"num_envs", "recorders"}
    assert session["num_envs"] == 1  # a loop of one's own is usually around one
    assert {*command["recorders"]} - {*session["recorders"]} == {"console"}  # and prints what it likes


def test_the_settings_of_an_agent_are_the_same_object_on_both_sides() -> None:
    """`jaxrl.dqn()` and `--agent.*` read one dataclass, so that its defaults cannot differ."""
    spec = jaxrl.EnvSpec("x", jaxrl.Box(-1.0, 1.0, (3,)), jaxrl.Discrete(2))
    for name in algorithm_names(actions="discrete"):
        maker = getattr(jaxrl, name)
        assert maker()(spec).info.settings == maker(general(name).agent)(spec).info.settings


@pytest.mark.parametrize(("kind", "lag"), [("off", 2), ("on", 1)])
@pytest.mark.parametrize("given", [None, 0, 3])
def test_actors_are_two_rounds_behind_and_of_rollouts_one_unless_told(kind: str, lag: int, given: int | None) -> None:
    actors = jaxrl.ActorsConfig(actors=2) if given is None else jaxrl.ActorsConfig(actors=2, max_lag=given)
    env = jaxrl.make_env("CartPole-v1")
    if kind == "off":
        strategy = jaxrl.off_policy(env, jaxrl.dqn(features=(4,)), buffer=jaxrl.uniform(), actors=actors)
    else:
        strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(4,)), actors=actors)
    assert strategy.info.settings is not None
    assert strategy.actor_fns is not None
    expected = lag if given is None else given
    assert (strategy.info.settings["max_lag"], strategy.actor_fns.config.max_lag) == (expected, expected)


@pytest.mark.every_day("ppo", "dqn", "rainbow", "sac")
@pytest.mark.parametrize("name", algorithm_names("on_policy", "off_policy"))
def test_what_is_left_out_in_python_is_what_the_command_line_leaves_out(name: str) -> None:
    config = general(name)
    compose = jaxrl.on_policy if name in algorithm_names("on_policy") else jaxrl.off_policy
    ours = compose(jaxrl.make_env(config.env), getattr(jaxrl, name)())
    assert ours.info.settings == build(name, config).info.settings


REGISTERED: list[tuple[Any, Any, Any, dict[str, Any]]] = [
    (
        "on_policy",
        jaxrl.ppo,
        jaxrl.PPOConfig,
        {"num_envs": 6, "rollout": 12, "minibatches": 2, "processor": {"normalise_reward": True, "discount": 0.9}},
    ),
    (
        "off_policy",
        jaxrl.dqn,
        jaxrl.DQNConfig,
        {
            "num_envs": 3,
            "opt_interval": 6,
            "updates": 2,
            "warmup": 60,
            "random_warmup": False,
            "buffer": {"capacity": 600, "batch_size": 12},
            "processor": {"n_step": 3, "discount": 0.9, "reward_scale": 0.5, "reward_clip": 2.0},
        },
    ),
]
"""A kind, an algorithm of it with its settings, and defaults of a run that differ from those of the kind."""


@pytest.mark.parametrize(("kind", "make", "config", "defaults"), REGISTERED)
def test_registered_defaults_hold_in_python_as_on_the_command_line(
    kind: Any, make: Any, config: Any, defaults: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: ALGORITHMS.pop("mine"))
    mine = jaxrl.register_algorithm("mine", make, kind=kind, config=config, settings=defaults)
    ours = getattr(jaxrl, kind)(jaxrl.make_env("CartPole-v1"), mine())
    assert ours.info.settings == build("mine", general("mine")).info.settings
    assert ours.info.settings is not None
    assert {name: ours.info.settings[name] for name in defaults if name not in ("buffer", "processor")} == {
        name: value for name, value in defaults.items() if name not in ("buffer", "processor")
    }
    for part in ("buffer", "processor"):
        assert defaults.get(part, {}).items() <= ours.info.settings.get(part, {}).items()


def test_what_is_given_in_python_wins_over_what_suits_the_agent() -> None:
    env = jaxrl.make_env("CartPole-v1")
    step = jaxrl.one_step()
    on = jaxrl.on_policy(env, jaxrl.a2c(), processor=step, rollout=32, epochs=2, minibatches=4).info.settings
    assert on is not None
    assert (on["rollout"], on["epochs"], on["minibatches"]) == (32, 2, 4)
    assert not on["processor"]["normalise_reward"]
    buffer = jaxrl.uniform(500, 8)
    off = jaxrl.off_policy(env, jaxrl.rainbow(), buffer=buffer, processor=step, num_envs=5).info.settings
    assert off is not None
    assert (off["num_envs"], off["opt_interval"]) == (5, 10)
    assert (off["buffer"]["prioritised"], off["processor"]["n_step"]) == (False, 1)


def test_an_agent_is_told_once_and_only_what_it_will_see() -> None:
    told = []

    def maker(spec: jaxrl.EnvSpec) -> Any:
        told.append(spec.observation_space.shape)
        return jaxrl.dqn(features=(4,))(spec)

    stacked = jaxrl.chain(jaxrl.frame_stack(3), jaxrl.one_step())
    jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), maker, processor=stacked)
    assert told == [(12,)]


@pytest.mark.every_day("ppo", "dqn", "sac")
@pytest.mark.parametrize("algo", algorithm_names("off_policy", "on_policy"))
def test_every_preset_fits_its_environment(algo: str) -> None:
    for name in (name for name in PRESETS[algo] if ":" not in name):  # those of suites are tried with the suites
        presets_fit(algo, name.replace("*", "Breakout"))


@pytest.mark.parametrize("env", ["gymnasium:ALE/Pong-v5", "ale:Pong"])
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_frames_of_atari_are_stacked_and_rewards_clipped_and_not_scaled_as_well(algo: str, env: str) -> None:
    config = preset(algo, env)
    processor = config.processor
    assert (processor.reward_clip, processor.normalise_reward, processor.frame_stack) == (1.0, False, 4)
    # Adam's constant in the code of PPO.
    assert config.agent.optimizer_eps == {"dqn": None, "ppo": 1e-5}[algo]


@pytest.mark.parametrize("env", ["gymnasium:HalfCheetah-v4", "gymnasium:Walker2d-v5"])
def test_mujoco_has_presets_in_any_version(env: str) -> None:
    ppo = preset("ppo", env)
    updates = ppo.epochs * ppo.minibatches
    assert ppo.max_opts % updates == 0
    assert ppo.max_opts // updates * ppo.rollout * ppo.num_envs == pytest.approx(1e6, rel=1e-3)
    assert ppo.agent.lr_decay == ppo.max_opts
    sac = preset("sac", env)
    assert sac.warmup + sac.max_opts == sac.buffer.capacity == 1_000_000


def test_ppo_clips_values_in_craftax_as_its_baselines_do() -> None:
    agent = preset("ppo", "craftax:Craftax-Symbolic-v1").agent
    assert (agent.vf_clip_eps, agent.optimizer_eps) == (0.2, 1e-5)
