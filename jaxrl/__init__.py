"""jaxrl: a reinforcement learning training loop in JAX, compiled whole.

Every name below is imported when it is first used, so that `import jaxrl` costs little more than `import jax`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.agents import (
        A2CConfig,
        AWACConfig,
        BCConfig,
        CQLConfig,
        CQLDQNConfig,
        DDPGConfig,
        DQNConfig,
        IMPALAConfig,
        IQLConfig,
        PPOConfig,
        PQNConfig,
        RainbowConfig,
        REINFORCEConfig,
        SACConfig,
        TD3BCConfig,
        TD3Config,
        a2c,
        awac,
        bc,
        cql,
        cql_dqn,
        ddpg,
        dqn,
        impala,
        iql,
        ppo,
        pqn,
        rainbow,
        reinforce,
        sac,
        td3,
        td3_bc,
    )
    from jaxrl.buffers import Dataset, prioritised, uniform
    from jaxrl.envs import (
        Env,
        HostEnv,
        TimeStep,
        check_env,
        draw_key,
        draw_nothing,
        env_names,
        gymnasium_env,
        gymnasium_envs,
        make_env,
        on_host,
        register_env,
        vectorise,
    )
    from jaxrl.errors import JaxrlError, SettingsError
    from jaxrl.loading import load_policy
    from jaxrl.metrics import stat, total
    from jaxrl.processors import (
        chain,
        frame_stack,
        map_reward,
        n_step,
        normalise_obs,
        normalise_reward,
        one_step,
        reward_clip,
        reward_scale,
    )
    from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
    from jaxrl.strategies import ActorsConfig, Policy, Strategy, fold, off_policy, offline, on_policy
    from jaxrl.training import (
        ConsoleRecorder,
        Evaluation,
        Evaluator,
        Hooks,
        Interrupt,
        JSONLRecorder,
        MemoryRecorder,
        Session,
        SessionConfig,
        SessionHooks,
        Statistics,
        TensorBoardRecorder,
        Trainer,
        TrainerConfig,
        find_runs,
    )
    from jaxrl.training.data.collect import gather
    from jaxrl.training.data.files import load_dataset, save_dataset
    from jaxrl.types import Step, Transition

_HOMES = {
    "jaxrl.agents": "A2CConfig AWACConfig BCConfig CQLConfig CQLDQNConfig DDPGConfig DQNConfig IMPALAConfig IQLConfig "
    "PPOConfig PQNConfig REINFORCEConfig RainbowConfig SACConfig TD3BCConfig TD3Config a2c awac bc cql cql_dqn ddpg "
    "dqn impala iql ppo pqn rainbow reinforce sac td3 td3_bc",
    "jaxrl.buffers": "Dataset prioritised uniform",
    "jaxrl.envs": "Env HostEnv TimeStep check_env draw_key draw_nothing env_names gymnasium_env gymnasium_envs "
    "make_env on_host register_env vectorise",
    "jaxrl.errors": "JaxrlError SettingsError",
    "jaxrl.loading": "load_policy",
    "jaxrl.processors": "chain frame_stack map_reward n_step normalise_obs normalise_reward one_step "
    "reward_clip reward_scale",
    "jaxrl.strategies": "ActorsConfig Policy Strategy fold off_policy offline on_policy",
    "jaxrl.training": "ConsoleRecorder Evaluation Evaluator Hooks Interrupt JSONLRecorder MemoryRecorder "
    "Session SessionConfig SessionHooks Statistics TensorBoardRecorder Trainer TrainerConfig "
    "find_runs",
    "jaxrl.training.data.files": "load_dataset save_dataset",
    "jaxrl.training.data.collect": "gather",
    "jaxrl.metrics": "stat total",
    "jaxrl.spaces": "Box Discrete EnvSpec MultiDiscrete",
    "jaxrl.types": "Step Transition",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxrl' has no attribute {name!r}{_hint(name)}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return what a name that is none may have meant."""
    if name == "train":
        return "; train by jaxrl.Trainer(...).train(), or by `python -m jaxrl.train` in a shell"
    import difflib

    plain = {known.lower(): known for known in reversed(__all__)}
    close = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=0.75)
    return "" if name.startswith("_") or not close else f"; did you mean jaxrl.{plain[close[0]]}?"


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
