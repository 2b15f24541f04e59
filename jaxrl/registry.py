"""Tables of algorithms, environment suites and recorders, with one row each.

Rows hold only names, so that reading them imports nothing. A new algorithm needs a file and a row here; command line,
help, messages, public names and tests follow from the table.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

Kind = Literal["off_policy", "on_policy", "offline"]
Actions = Literal["discrete", "multidiscrete", "bounded", "unbounded", "composite"]
"""Kinds of action spaces; `composite` is a dict or tuple of the others."""

DISCRETE: tuple[Actions, ...] = ("discrete",)
BOUNDED: tuple[Actions, ...] = ("bounded",)
SINGLE: tuple[Actions, ...] = ("discrete", "multidiscrete", "bounded", "unbounded")
ANY: tuple[Actions, ...] = (*SINGLE, "composite")


class Algorithm(NamedTuple):
    """An algorithm. Its maker is the function of the same name in its module, unless it is registered by a user."""

    title: str
    """Name for text."""
    module: str
    config: str
    """Name of its settings dataclass in that module."""
    kind: Kind
    """Source of its data: replay, rollouts, or a data set."""
    actions: tuple[Actions, ...]
    """Supported action spaces."""
    env: str | None = "CartPole-v1"
    """Default environment."""
    settings: Mapping[str, Any] = {}
    """Defaults of a run that differ from those of its kind, nested by name."""
    make: Callable[..., Any] | None = None
    """Maker of an algorithm registered by a user, see `jaxrl.register_algorithm`."""
    config_type: type | None = None
    """Settings dataclass of an algorithm registered by a user."""


DEFAULT_SETTINGS: dict[Kind, Mapping[str, Any]] = {
    "off_policy": {
        "num_envs": 10,
        "opt_interval": 10,
        "updates": 1,
        "warmup": 1_000,
        "random_warmup": True,
        "stagger": False,
    },
    "on_policy": {"num_envs": 8, "rollout": 128, "epochs": 4, "minibatches": 4, "stagger": False},
    "offline": {},
}
"""Defaults of a run by kind, which `Algorithm.settings` may replace."""

_BOXES: Mapping[str, Any] = {
    "num_envs": 1,
    "opt_interval": 1,
    "buffer": {"capacity": 100_000, "batch_size": 256},
}
"""Settings of off-policy runs with continuous actions: one update per step, on large batches."""
_TWENTY: Mapping[str, Any] = {**_BOXES, "updates": 20}
"""Settings of REDQ and DroQ: many updates per step."""
_TWO_NORMALISED: Mapping[str, Any] = {**_BOXES, "updates": 2, "processor": {"normalise_obs": True}}
"""Settings of SimBa; its networks take normalised observations."""
_TWO_SCALED: Mapping[str, Any] = {**_BOXES, "updates": 2, "processor": {"normalise_reward": True}}
"""Settings of XQC; its support is that of normalised rewards."""
_FAST: Mapping[str, Any] = {"num_envs": 128, "opt_interval": 128, "processor": {"normalise_obs": True}}
_FAST_TD3: Mapping[str, Any] = {**_FAST, "updates": 2, "buffer": {"capacity": 1_310_720, "batch_size": 32_768}}
"""Settings of FastTD3: many environments, few updates on large batches, and normalised observations."""
_FAST_SAC: Mapping[str, Any] = {**_FAST, "updates": 8, "buffer": {"capacity": 1_310_720, "batch_size": 8_192}}
_SCALED: Mapping[str, Any] = {"processor": {"normalise_reward": True}}
"""Settings of policy gradients; normalised rewards make one learning rate suit rewards of any scale."""
_ONE_UPDATE: Mapping[str, Any] = {"epochs": 1, "minibatches": 1, **_SCALED}
_SHORT: Mapping[str, Any] = {"rollout": 16, **_ONE_UPDATE}
_MANY: Mapping[str, Any] = {"minibatches": 16, "stagger": True}
"""Settings of REPPO: its critic needs many updates, and forgets parts of an episode that no environment is in."""
_RAINBOW: Mapping[str, Any] = {"buffer": {"prioritised": True, "alpha": 0.5}, "processor": {"n_step": 3}}

ALGORITHMS: dict[str, Algorithm] = {
    "dqn": Algorithm("DQN", "jaxrl.agents.dqn", "DQNConfig", "off_policy", DISCRETE),
    "rainbow": Algorithm("Rainbow", "jaxrl.agents.dqn", "RainbowConfig", "off_policy", DISCRETE, settings=_RAINBOW),
    "sac": Algorithm(
        "SAC", "jaxrl.agents.sac", "SACConfig", "off_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _BOXES
    ),
    "crossq": Algorithm(
        "CrossQ", "jaxrl.agents.sac", "CrossQConfig", "off_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _BOXES
    ),
    "xqc": Algorithm("XQC", "jaxrl.agents.sac", "XQCConfig", "off_policy", BOUNDED, "Pendulum-v1", _TWO_SCALED),
    "tqc": Algorithm("TQC", "jaxrl.agents.sac", "TQCConfig", "off_policy", BOUNDED, "Pendulum-v1", _BOXES),
    "redq": Algorithm(
        "REDQ", "jaxrl.agents.sac", "REDQConfig", "off_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _TWENTY
    ),
    "droq": Algorithm(
        "DroQ", "jaxrl.agents.sac", "DroQConfig", "off_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _TWENTY
    ),
    "simba": Algorithm(
        "SimBa", "jaxrl.agents.sac", "SimBaConfig", "off_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _TWO_NORMALISED
    ),
    "fast_sac": Algorithm(
        "FastSAC", "jaxrl.agents.sac", "FastSACConfig", "off_policy", BOUNDED, "Pendulum-v1", _FAST_SAC
    ),
    "td3": Algorithm("TD3", "jaxrl.agents.td3", "TD3Config", "off_policy", BOUNDED, "Pendulum-v1", _BOXES),
    "ddpg": Algorithm("DDPG", "jaxrl.agents.td3", "DDPGConfig", "off_policy", BOUNDED, "Pendulum-v1", _BOXES),
    "fast_td3": Algorithm(
        "FastTD3", "jaxrl.agents.td3", "FastTD3Config", "off_policy", BOUNDED, "Pendulum-v1", _FAST_TD3
    ),
    "ppo": Algorithm("PPO", "jaxrl.agents.actor_critic", "PPOConfig", "on_policy", ANY, settings=_SCALED),
    "a2c": Algorithm("A2C", "jaxrl.agents.actor_critic", "A2CConfig", "on_policy", ANY, settings=_SHORT),
    "reinforce": Algorithm(
        "REINFORCE", "jaxrl.agents.actor_critic", "REINFORCEConfig", "on_policy", ANY, settings=_ONE_UPDATE
    ),
    "impala": Algorithm("IMPALA", "jaxrl.agents.actor_critic", "IMPALAConfig", "on_policy", ANY, settings=_SHORT),
    "pqn": Algorithm("PQN", "jaxrl.agents.pqn", "PQNConfig", "on_policy", DISCRETE),
    "reppo": Algorithm(
        "REPPO", "jaxrl.agents.reppo", "REPPOConfig", "on_policy", (*DISCRETE, *BOUNDED), "Pendulum-v1", _MANY
    ),
    "bc": Algorithm("BC", "jaxrl.agents.bc", "BCConfig", "offline", ("discrete", "multidiscrete", "bounded"), env=None),
    "td3_bc": Algorithm("TD3+BC", "jaxrl.agents.td3", "TD3BCConfig", "offline", BOUNDED, env=None),
    "rebrac": Algorithm(
        "ReBRAC", "jaxrl.agents.td3", "ReBRACConfig", "offline", BOUNDED, env=None, settings={"batch_size": 1024}
    ),
    "sac_n": Algorithm("SAC-N", "jaxrl.agents.sac", "SACNConfig", "offline", (*DISCRETE, *BOUNDED), env=None),
    "edac": Algorithm("EDAC", "jaxrl.agents.sac", "EDACConfig", "offline", BOUNDED, env=None),
    "cql": Algorithm("CQL", "jaxrl.agents.sac", "CQLConfig", "offline", (*DISCRETE, *BOUNDED), env=None),
    "cql_dqn": Algorithm("CQL on DQN", "jaxrl.agents.dqn", "CQLDQNConfig", "offline", DISCRETE, env=None),
    "awac": Algorithm("AWAC", "jaxrl.agents.advantage", "AWACConfig", "offline", (*DISCRETE, *BOUNDED), env=None),
    "iql": Algorithm("IQL", "jaxrl.agents.advantage", "IQLConfig", "offline", (*DISCRETE, *BOUNDED), env=None),
}


class Suite(NamedTuple):
    """Environments, mostly of another library, named `suite:NAME` and built by `make(NAME, **params)` of `module`."""

    module: str
    make: str
    actors: bool = False
    """Whether actors step the environments, where a run says nothing of actors."""


SUITES: dict[str, Suite] = {
    "gymnasium": Suite("jaxrl.envs.host", "gymnasium_env", actors=True),
    "envpool": Suite("jaxrl.envs.envpool", "envpool_env", actors=True),
    "ale": Suite("jaxrl.envs.ale", "ale_env"),
    "playground": Suite("jaxrl.envs.playground", "playground_env"),
    "craftax": Suite("jaxrl.envs.craftax", "craftax_env"),
    "brax": Suite("jaxrl.envs.brax", "brax_env"),
    "xminigrid": Suite("jaxrl.envs.xminigrid", "xminigrid_env"),
    "jumanji": Suite("jaxrl.envs.jumanji", "jumanji_env"),
    "pgx": Suite("jaxrl.envs.pgx", "pgx_env"),
    "navix": Suite("jaxrl.envs.navix", "navix_env"),
    "jaxmarl": Suite("jaxrl.envs.jaxmarl", "jaxmarl_env"),
    "memory": Suite("jaxrl.envs.memory", "memory_env"),
}


class RecorderRow(NamedTuple):
    """A recorder by name, built by `maker()` of `module`."""

    module: str
    maker: str
    about: str
    """Destination of the rows, for the help."""
    package: str | None = None
    """Required optional package; the extra has the same name."""
    anywhere: bool = False
    """Whether it works without a run directory."""


RECORDERS: dict[str, RecorderRow] = {
    "console": RecorderRow(
        "jaxrl.training.recorders.console", "ConsoleRecorder", "progress on the terminal", anywhere=True
    ),
    "jsonl": RecorderRow("jaxrl.training.recorders.jsonl", "JSONLRecorder", "metrics.jsonl, written in any case"),
    "tensorboard": RecorderRow("jaxrl.training.recorders.tensorboard", "TensorBoardRecorder", "TensorBoard's files"),
    "csv": RecorderRow("jaxrl.training.recorders.csv_file", "CSVRecorder", "metrics.csv"),
    "wandb": RecorderRow("jaxrl.training.recorders.wandb_run", "wandb_recorder", "Weights & Biases", "wandb"),
    "mlflow": RecorderRow("jaxrl.training.recorders.mlflow_run", "mlflow_recorder", "MLflow", "mlflow"),
}


def import_name(module: str, name: str) -> Callable[..., Any]:
    """Import `name` from `module`."""
    return getattr(importlib.import_module(module), name)


def algorithm_maker(algo: str) -> Callable[..., Any]:
    """Return the function that makes the agent of an algorithm, such as `jaxrl.dqn`."""
    row = ALGORITHMS[algo]
    return row.make or import_name(row.module, algo)


def config_class(algo: str) -> Any:
    """Return the settings dataclass of an algorithm, such as `jaxrl.DQNConfig`."""
    row = ALGORITHMS[algo]
    return row.config_type or import_name(row.module, row.config)


def algorithm_names(*kinds: Kind, actions: Actions | None = None) -> list[str]:
    """Return the names of the algorithms of `kinds` (default: all) that support `actions` (default: any)."""
    return [
        name
        for name, row in ALGORITHMS.items()
        if (not kinds or row.kind in kinds) and (actions is None or actions in row.actions)
    ]


def defaults_for(name: str, kind: Kind) -> Mapping[str, Any]:
    """Return the default settings of a run with algorithm `name`, which may be unknown."""
    row = ALGORITHMS.get(name)
    return {**DEFAULT_SETTINGS[kind], **(row.settings if row is not None and row.kind == kind else {})}


def join_names(names: Iterable[str], last: str = "and") -> str:
    """Join names for a sentence: `a, b and c`."""
    *most, end = names
    return f"{', '.join(most)} {last} {end}" if most else end


def split_suite(env: str) -> tuple[Suite | None, str]:
    """Split the name of an environment into its suite, if any, and the rest."""
    prefix, colon, rest = env.partition(":")
    return (SUITES[prefix], rest) if colon and prefix in SUITES else (None, env)


def matching_presets(presets: Mapping[str, Mapping[str, Any]], env: str | None) -> Sequence[Mapping[str, Any]]:
    """Return the presets whose name or pattern matches environment `env`, with or without its suite's prefix.

    So a preset named without a prefix applies to all suites, and one with a prefix to that suite alone.
    """
    if env is None:
        return []
    names = (env, split_suite(env)[1])
    return [preset for pattern, preset in presets.items() if any(fnmatchcase(name, pattern) for name in names)]
