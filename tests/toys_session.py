"""Sessions small enough for a test, and loops that drive them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from toys_agents import decided

import jaxrl
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import PolicyParams, make_policy
from jaxrl.strategies.stepwise import locate_step, steps_per_iteration, stream_keys
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.session.inputs import describe_envs
from jaxrl.training.session.session import schedule_of
from jaxrl.training.settings import with_recorders
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run import Resume
from jaxrl.types import Step

SPEC = jaxrl.EnvSpec("scripted", jaxrl.Box(-10.0, 10.0, (2,)), jaxrl.Discrete(3))
BOX = SPEC._replace(name="scripted-box", action_space=jaxrl.Box(-2.0, 2.0, (1,)))

PARTS: dict[str, Any] = {
    "agent": jaxrl.dqn(lr=1e-2, features=(8,), epsilon_decay=20, target_interval=5),
    "buffer": jaxrl.uniform(40, batch_size=8),
    "processor": jaxrl.n_step(3),
}
SETTINGS: dict[str, Any] = {"num_envs": 2, "opt_interval": 4, "warmup": 20, "max_opts": 1_000, "save_interval": 0}
HOST_ALONE = (
    *("max_opts", "max_env_steps", "stop_reward", "patience", "record_interval", "save_interval", "keep"),
    *("max_skips", "max_rollbacks", "run_dir", "name", "tags", "notes"),
)
NO_PROGRAM = (*HOST_ALONE, "resume", "allow_changes", "hooks", "statistics", "recorders", "about")
_COMPILED: dict[str, tuple[jaxrl.Session, Any]] = {}


def small(spec: Any = SPEC, **changes: Any) -> jaxrl.Session:
    """A session of DQN over three steps, with two environments unless asked for otherwise.

    Sessions that compile the same programs share them here: compiling is nearly all that these tests would do.
    """
    settings = {"spec": spec, **PARTS, **SETTINGS, **changes}
    outside = describe_envs(spec, settings["num_envs"])
    known = {name: (value, id(value)) for name, value in settings.items() if name not in (*NO_PROGRAM, "spec")}
    key = str((outside.spec, known))
    if key not in _COMPILED:
        alone = {name: value for name, value in settings.items() if name not in NO_PROGRAM}
        _COMPILED[key] = jaxrl.Session(**alone), settings
    session = copy.copy(_COMPILED[key][0])
    session._outside = outside
    session.config = session.config.changed(**{name: settings[name] for name in HOST_ALONE if name in settings})
    session.config, session._given_recorders = with_recorders(session.config, settings.get("recorders"))
    session.config.check()
    session.hooks, session.interrupt = settings.get("hooks") or jaxrl.SessionHooks(), jaxrl.Interrupt()
    session._schedule = schedule_of(session.config, session._stepwise)
    session._saves, session._saved, session._closed = [], None, False
    session._termination = type(session._termination)()
    resume = Resume(settings.get("resume", False), settings.get("allow_changes", False))
    session._open(resume, settings.get("statistics") or jaxrl.Statistics())
    session.describe(**settings.get("about", {}))
    return session


def single(**changes: Any) -> jaxrl.Session:
    """The same with one environment, and an optimisation step after each of its steps."""
    return small(**{"num_envs": 1, "opt_interval": 1, "warmup": 8, **changes})


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
        self.step, self.actions = self.step + 1, np.asarray(actions).reshape(self.num_envs)
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


def drive_as_trainer(session: jaxrl.Session, env: jaxrl.Env, seed: int, steps: int) -> Any:
    """Drive a session through `env` with the randomness that a trainer's run of `seed` would give it.

    Return what it told when it learnt last.
    """
    stepwise, config = session._stepwise, session.config
    envs = jaxrl.vectorise(env, config.num_envs)
    parts = 5 if stepwise.passes is None else 3
    keys, env_key = stream_keys(jax.random.key(seed), stepwise.passes), jax.random.split(jax.random.key(seed), parts)[2]
    state, obs = jax.jit(envs.reset)(env_key)
    step = jax.jit(envs.step)

    @partial(jax.jit, static_argnums=0)
    def key_of(phase: Any, t: int, at: int) -> Any:
        key = jax.random.fold_in(keys[phase], t)
        key = jax.random.split(key)[0] if phase == "train" else key
        return jax.random.split(jax.random.split(key, steps_per_iteration(stepwise.schedule, phase))[at])[1]

    told: Any = {}
    for v in range(steps):
        actions = session.act(obs)
        state, out = step(state, actions, key_of(*locate_step(stepwise.schedule, v)))
        assert isinstance(out, Step)
        told = session.observe(out.reward, out.final_obs, out.terminated, out.truncated) or told
        obs = out.obs
    return told


def beside_trainer(
    env: jaxrl.Env, agent: Any, iterations: int, **parts: Any
) -> tuple[jaxrl.Session, Any, dict[str, Any], dict[str, Any]]:
    """Train a strategy and a session of the same parts with the same randomness, and require the same counters.

    Return the session, the strategy's state, and what each told when it learnt last.
    """
    compose: Any = jaxrl.on_policy if "rollout" in parts else jaxrl.off_policy
    strategy = compose(env, agent, **parts)
    step = jax.jit(lambda state, t: strategy.step(state, jax.random.fold_in(state.key, t), t))
    state, metrics = jax.jit(strategy.init)(jax.random.key(7)), {}
    before = state_digest(state.agent)
    for t in range(iterations):
        state, metrics = step(state, np.uint32(t))
    assert state_digest(state.agent) != before
    env_steps = strategy.warmup_env_steps + iterations * strategy.env_steps_per_step
    session = jaxrl.Session(env, agent, seed=7, max_opts=1_000, **parts)
    told = drive_as_trainer(session, env, 7, env_steps // parts["num_envs"])
    assert (session.opt_steps, session.env_steps) == (iterations * strategy.opt_steps_per_step, env_steps)
    return session, state, told, metrics


def fresh_policy(spec: Any, maker: Any) -> GreedyPolicy:
    """Return the policy of a fresh agent, further from uniform than such are."""
    processor, agent = build_processor_and_agent(maker, jaxrl.one_step(), spec)
    state = jax.jit(agent.init)(jax.random.key(3))
    state = state._replace(params=decided(state.params))
    return GreedyPolicy(make_policy(agent, processor, spec), PolicyParams(agent.strip(state), ()), {})


def reached(session: jaxrl.Session) -> Any:
    """Return what a session has come to: its state, what it counts, and what it knows of its environments."""
    return session._now


def digest(session: jaxrl.Session) -> str:
    """Return the sha256 of all that a session would save."""
    now = reached(session)
    return state_digest((now.state, now.sums, now.past, now.host, np.array([now.steps, now.invalid])))
