"""Use a trained policy without the code that trained it."""

from pathlib import Path
from typing import Any

import jax

from jaxrl.algos import ProcessorConfig, build_processor, general, maker
from jaxrl.config import from_plain
from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.registry import ALGORITHMS
from jaxrl.spaces import spec_from_plain
from jaxrl.strategies import Policy, Strategy
from jaxrl.strategies.interaction import bind, make_policy, policy_params_like
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.checkpoints import CheckpointError, Store
from jaxrl.training.storage.run_dir import require_run


def load_policy(run_dir: str | Path, strategy: Strategy | None = None) -> GreedyPolicy:
    """Load the best policy of a run; call it with an observation to get an action.

    Args:
      run_dir: the run's directory; it is only read.
      strategy: what trained it; needed only where the agent or processor had parts made by hand.

    Raises:
      SettingsError: no run directory, or one whose policy cannot be rebuilt without its strategy.
      NoCheckpointError: the run has no (valid) best policy.
    """
    require_run(Path(run_dir))
    store = Store(Path(run_dir) / "best", 1)
    while store.steps():
        step = store.steps()[-1]
        try:
            facts = store.manifest(step)["facts"]
            policy, like = _rebuild(facts, strategy, run_dir)
            params, _ = store.load(step, like)
            return GreedyPolicy(policy, params, facts)
        except SettingsError:
            raise
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if step in store.steps():  # else a running process has just replaced it by a better one
                reason = error if isinstance(error, CheckpointError) else "what describes it is incomplete"
                raise NoCheckpointError(f"the best policy of {run_dir}, best/{step}, is damaged: {reason}") from error
    raise NoCheckpointError(f"{run_dir} has no best policy yet: nothing was evaluated")


def _rebuild(facts: dict[str, Any], strategy: Strategy | None, run_dir: str | Path) -> tuple[Policy, Any]:
    """Return the policy and the shapes of its parameters."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if strategy is not None:
        policy = strategy.policy
        if policy is None:
            raise SettingsError("the strategy given has no policy")
        return policy, jax.eval_shape(lambda key: policy.params(strategy.init(key)), key)
    settings = facts["settings"]
    by_hand = {"agent", "processor", "strategy"} & set(settings.get("custom", []))
    if by_hand or settings.get("algo") not in ALGORITHMS:
        raise SettingsError(
            f"the policy of {run_dir} has parts made in Python ({', '.join(sorted(by_hand)) or settings.get('algo')}); "
            "pass them: load_policy(run_dir, strategy=...)"
        )
    processor = build_processor(from_plain(ProcessorConfig(), settings["processor"]))
    spec = spec_from_plain(facts["spec"])
    algo = settings["algo"]
    agent = maker(algo)(from_plain(general(algo).agent, settings["agent"]))
    processor, bound = bind(agent, processor, spec)
    return make_policy(bound, processor, spec), policy_params_like(bound, processor, spec)
