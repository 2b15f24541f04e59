"""Load a trained policy without the code that trained it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl.algos import ProcessorConfig, build_processor, general, maker
from jaxrl.config import from_plain
from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.nn import Network
from jaxrl.registry import ALGORITHMS
from jaxrl.spaces import spec_from_plain
from jaxrl.strategies import Policy, Strategy
from jaxrl.strategies.interaction import bind, make_policy, policy_params_like
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.settings import renewed
from jaxrl.training.storage.checkpoints import CheckpointError, MismatchError, Store
from jaxrl.training.storage.members import resolve

ACTS = ("make_network", "make_policy")
"""Arguments of agents that make the networks which choose actions; acting needs no other part."""


def load_policy(
    run_dir: str | Path,
    strategy: Strategy | None = None,
    *,
    member: int | None = None,
    **made: Callable[..., Network] | None,
) -> GreedyPolicy:
    """Load the best policy of a run; call it with an observation to get an action.

    Args:
      run_dir: the run's directory, which is only read.
      strategy: the strategy that trained the policy; needed only if the agent or processor was made by hand.
      member: which of a population, by default that with the best score.
      **made: `make_network` or `make_policy`, as given to the agent, if its network was made in Python. Optimizers and
        critics are not needed to act.

    Raises:
      SettingsError: this is no run directory, or its policy cannot be rebuilt from these arguments.
      NoCheckpointError: the run has no (valid) best policy.
    """
    for name in made:
        if name not in ACTS:
            raise SettingsError(f"load_policy has no argument {name!r}; expected strategy, {' or '.join(ACTS)}")
    run_dir = resolve(run_dir, member)
    store = Store(Path(run_dir) / "best", 1)
    while store.steps():
        step = store.steps()[-1]
        try:
            facts = store.manifest(step)["facts"]
            policy, like = _rebuild(facts, strategy, made, run_dir)
            params, _ = store.load(step, like)
            return GreedyPolicy(policy, params, facts)
        except SettingsError:
            raise
        except MismatchError as error:
            if strategy is None and not made:
                raise NoCheckpointError(f"the best policy of {run_dir}, best/{step}, is damaged: {error}") from error
            given = "the strategy" if strategy is not None else " and ".join(made)
            raise SettingsError(f"{given} is not what trained {run_dir}: {error}") from error
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if step in store.steps():  # else a running process has just replaced it by a better one
                reason = error if isinstance(error, CheckpointError) else "what describes it is incomplete"
                raise NoCheckpointError(f"the best policy of {run_dir}, best/{step}, is damaged: {reason}") from error
    raise NoCheckpointError(f"{run_dir} has no best policy yet: nothing was evaluated")


def _rebuild(
    facts: dict[str, Any], strategy: Strategy | None, made: Mapping[str, Any], run_dir: str | Path
) -> tuple[Policy, Any]:
    """Return the policy and the shapes of its parameters."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if strategy is not None:
        policy = strategy.policy
        if policy is None:
            raise SettingsError("the strategy given has no policy")
        return policy, jax.eval_shape(lambda key: policy.params(strategy.init(key)), key)
    settings = renewed(facts["settings"])
    custom = set(settings.get("custom", []))
    by_hand = {"agent", "processor", "strategy"} & custom
    if by_hand or settings.get("algo") not in ALGORITHMS:
        raise SettingsError(
            f"the policy of {run_dir} has parts made in Python ({', '.join(sorted(by_hand)) or settings.get('algo')}); "
            "pass them: load_policy(run_dir, strategy=...)"
        )
    wanted = sorted(custom & set(ACTS))
    if wanted != sorted(made):
        pass_it = (
            f"was made in Python; pass what made it: load_policy(run_dir, {', '.join(f'{x}=...' for x in wanted)})"
        )
        leave_it = f"was not made by {' and '.join(made)}; leave that out"
        raise SettingsError(f"the network of the policy of {run_dir} {pass_it if wanted else leave_it}")
    algo = settings["algo"]
    processor = build_processor(from_plain(ProcessorConfig(), settings["processor"]))
    spec = spec_from_plain(facts["spec"])
    agent = maker(algo)(from_plain(general(algo).agent, settings["agent"]), **made)
    processor, bound = bind(agent, processor, spec)
    return make_policy(bound, processor, spec), policy_params_like(bound, processor, spec)
