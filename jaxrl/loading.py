"""Load a trained policy without the code that trained it."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl import spaces
from jaxrl.agents.base import Agent
from jaxrl.agents.outside import made_by_hand
from jaxrl.cli.algos import ProcessorConfig, build_processor, general
from jaxrl.cli.config import from_plain
from jaxrl.envs.registry import check_plain_args, module_to_import
from jaxrl.errors import MissingError, NoCheckpointError, SettingsError
from jaxrl.nn import Network
from jaxrl.parsing import as_int
from jaxrl.paths import local
from jaxrl.processors import Processor
from jaxrl.registry import ALGORITHMS, algorithm_maker
from jaxrl.spaces import EnvSpec
from jaxrl.strategies import Policy, Strategy
from jaxrl.strategies.interaction import build_processor_and_agent
from jaxrl.strategies.policy import make_policy, policy_params_like
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.program import state_shapes
from jaxrl.training.stops import FINISHED
from jaxrl.training.storage.checkpoints import CheckpointError, MismatchError, Store
from jaxrl.training.storage.leaves import describe_leaf, flatten, mismatch, rebuild
from jaxrl.training.storage.members import resolve
from jaxrl.training.storage.opening import open_store, split_checkpoint, step_of
from jaxrl.training.storage.run import find_missing_best
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS, read_metadata
from jaxrl.trees import make_key

NAMED_STEPS = ("best", "latest", "final")
ACTS = ("make_network", "make_policy")
"""Arguments of agents that make the networks which choose actions; acting needs no other part."""


def load_policy(
    run_dir: str | Path,
    strategy: Strategy | None = None,
    *,
    member: int | None = None,
    step: int | str | None = None,
    critics: bool = False,
    **made: Callable[..., Network] | None,
) -> GreedyPolicy:
    """Load a policy of a run, by default the best; call it with an observation to get an action.

    Args:
      run_dir: the run's directory, which is only read.
      strategy: the strategy that trained the policy; needed only if the agent or processor was made by hand.
      member: number of the member of a population (default: the one with the best score).
      step: which of the run's policies: `best`, that of the `latest` valid checkpoint, the `final` one of a run that
        has come to its end, or that of the checkpoint after so many optimisation steps. Left out, the best, or of a run
        without evaluations the latest; `facts["kept_as"]` is the one loaded.
      critics: whether to load critics too (SAC, TD3, IQL, ...), for `policy.values`. Acting needs none, so checkpoints
        have them, and best policies do not.
      **made: `make_network` or `make_policy`, as given to the agent, if its network was made in Python. Optimizers and
        critics are not needed to act.

    Raises:
      SettingsError: this is no run directory, its policy cannot be rebuilt from these arguments, or there is no
        checkpoint of that step.
      NoCheckpointError: the run has no (valid) best policy or checkpoint.
    """
    for name in made:
        if name not in ACTS:
            raise SettingsError(
                f"load_policy has no argument {name!r}; expected strategy, {', '.join(ACTS)}, step or critics"
            )
    step = which_step(step)
    run_dir = resolve(run_dir, member)
    if step in (None, "best") and (found := _load_best(run_dir, strategy, made)) is not None:
        if critics and found.policy.params_with_critic is not None:
            raise SettingsError(
                f"the best policy of {run_dir} is kept without critics; name a checkpoint: step='latest'"
            )
        return found
    if step == "best" or (step is None and read_metadata(run_dir).get("best_score") is not None):
        raise NoCheckpointError(
            f"{run_dir} has no best policy; name a checkpoint, as in --step latest (step='latest' in Python)"
        )
    return _load_checkpoint(run_dir, step, strategy, made, critics)


def teacher_of(config: Any) -> GreedyPolicy | None:
    """Load the teacher in the settings of a run, if any: the best policy of a run, or that of a checkpoint.

    Raises:
      MissingError: the policy does not exist, or is not the one that the run began with.
    """
    teacher = getattr(config, "teacher", None)
    if teacher is None:
        return None
    run, step = split_checkpoint(Path(local(teacher)))
    try:
        found = load_policy(run, step=step)
    except (SettingsError, NoCheckpointError) as error:
        raise MissingError(f"teacher: {error}") from error
    if config.teacher_sha256 not in ("", found.sha256):
        raise MissingError(
            f"teacher: the policy of {teacher} is not the one that the run began with (sha256 {found.sha256[:12]}..., "
            f"expected {config.teacher_sha256[:12]}...); bring that one back, or begin another run"
        )
    return found


def which_step(step: int | str | None) -> int | str | None:
    """Return `step` as a name or a whole number; raise `SettingsError` if it is neither."""
    number = as_int(step)
    if number is None or number in NAMED_STEPS or (type(number) is int and number >= 0):
        return number
    raise SettingsError(f"step is {step!r}; expected {', '.join(NAMED_STEPS)} or a number of optimisation steps")


def _load_best(run_dir: Path, strategy: Strategy | None, made: Mapping[str, Any]) -> GreedyPolicy | None:
    """Return the best policy of a run, or `None` if there is none."""
    store = open_store(run_dir, BEST)
    while store.steps():
        metadata = read_metadata(run_dir)  # before the policy, which a running process may replace by a better one
        step = store.steps()[-1]
        with _explain_errors(run_dir, f"the best policy of {run_dir}, best/{step},", strategy, made) as failed:
            facts = store.manifest(step)["facts"]
            policy, like = _rebuild(facts, strategy, made, run_dir)
            params, _ = store.load(step, like)
            if missing := find_missing_best(metadata, [facts.get("score")]):
                warnings.warn(f"{run_dir}: {missing}", stacklevel=3)
            return GreedyPolicy(policy, params, {**facts, "kept_as": "best"})
        if step in store.steps():  # else a running process has just replaced it by a better one
            raise failed[0]
    return None


def _load_checkpoint(
    run_dir: Path, step: int | str | None, strategy: Strategy | None, made: Mapping[str, Any], critics: bool
) -> GreedyPolicy:
    """Return the policy of a checkpoint. All of its arrays are read to the host, and those of the policy stay."""
    store = open_store(run_dir, CHECKPOINTS)
    while True:
        number = _step_of(store, run_dir, step)
        with _explain_errors(run_dir, f"checkpoint {number} of {run_dir}", strategy, made) as failed:
            facts = store.manifest(number)["facts"]
            policy, params, spec = _policy_in(store, number, facts, strategy, made, run_dir, critics)
            own = {"settings": facts["settings"], "spec": spaces.spec_to_plain(spec), "env_steps": facts["env_steps"]}
            return GreedyPolicy(policy, params, {"score": None, "opt_steps": number, **own, "kept_as": "checkpoint"})
        if number in store.steps():  # else a running process has just removed it
            raise failed[0]


def _step_of(store: Store, run_dir: Path, step: int | str | None) -> int:
    """Return the optimisation step of the checkpoint to load; raise `SettingsError` if it is not kept."""
    kept = store.steps()
    metadata = read_metadata(run_dir)
    status = metadata.get("status")
    if step == "final" and status not in FINISHED:
        raise SettingsError(
            f"{run_dir} has not come to its end (its status is {str(status)[:40]}), so that nothing is final; "
            "'latest' is its newest checkpoint"
        )
    if isinstance(step, int):
        return step_of(run_dir, step, store)
    if not kept:
        raise NoCheckpointError(f"{run_dir} has no best policy yet, nor a checkpoint: nothing was evaluated or saved")
    newest = store.newest_facts()[0]
    if step == "final" and newest != metadata.get("opt_steps", newest):
        raise NoCheckpointError(f"{run_dir} ended after {metadata['opt_steps']} steps, but its last checkpoint is lost")
    return newest


@contextmanager
def _explain_errors(
    run_dir: Path, what: str, strategy: Strategy | None, made: Mapping[str, Any]
) -> Iterator[list[NoCheckpointError]]:
    """Collect the error for damaged files in the list yielded; the caller raises it if they still exist.

    Raises:
      SettingsError: the files are whole, but were not made by the strategy or the networks given.
    """
    failed: list[NoCheckpointError] = []
    try:
        yield failed
    except SettingsError:
        raise
    except MismatchError as error:
        if strategy is None and not made:
            failed.append(NoCheckpointError(f"{what} {error.verdict}: {error}"))
            return
        given = "the strategy" if strategy is not None else " and ".join(made)
        raise SettingsError(f"{given} is not what trained {run_dir}: {error}") from error
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        fault = "is damaged: what describes it is incomplete"
        if isinstance(error, CheckpointError):
            fault = f"{error.verdict}: {error}"
        failed.append(NoCheckpointError(f"{what} {fault}"))


# --- the policy of a checkpoint -----------------------------------------------------------------------------------


class _Learner(NamedTuple):
    """The parts of a training state that make up a policy."""

    agent: Any
    processor: Any


def _policy_in(
    store: Store,
    step: int,
    facts: dict[str, Any],
    strategy: Strategy | None,
    made: Mapping[str, Any],
    run_dir: Path,
    critics: bool,
) -> tuple[Policy, Any, EnvSpec]:
    """Return the policy of a checkpoint, its parameters, and the spaces it acts in."""
    if strategy is not None:
        policy = _policy_of(strategy)
        shapes = state_shapes(strategy)[0]
    else:
        policy, agent, processor = _parts(facts, made, run_dir)
        shapes = _learner_shapes(agent, processor, policy.spec)
        if "driven" in facts["settings"] and jax.tree.leaves(processor.get_stats(shapes.processor)):
            raise SettingsError(f"{run_dir} is a session whose processor learns; of such only the best can be loaded")
    taken = policy.params_with_critic if critics and policy.params_with_critic is not None else policy.params
    like, paths = _leaves_of(taken, shapes)
    leaves, _ = store.read(step)
    if strategy is not None:
        _require_same_processor(leaves, dict(flatten({"state": {"processor": shapes.processor}})))
    wanted = dict(flatten(like))
    for path, shape in zip(paths, wanted.values(), strict=True):
        if path not in leaves:
            raise MismatchError(f"it has no leaf {path}")
        if different := mismatch([describe_leaf(path, leaves[path])], {path: shape}):
            raise MismatchError(different)
    return policy, rebuild(like, [leaves[path] for path in paths]), policy.spec


def _require_same_processor(leaves: Collection[str], wanted: Collection[str]) -> None:
    """Raise `MismatchError` if observations are prepared otherwise than in the run, as without its normalisation.

    The sizes of arrays may differ, since there may be other numbers of environments.
    """
    found = {path for path in leaves if path.startswith("state/processor/")}
    for path in sorted(found ^ {*wanted}):
        raise MismatchError(
            f"{'it has' if path in found else 'it lacks'} {path}, part of how observations are prepared"
        )


def _leaves_of(taken: Callable[[Any], Any], state: Any) -> tuple[Any, list[str]]:
    """Return what `taken` takes from a `state` of shapes, and its paths in a checkpoint.

    Raises:
      SettingsError: it is computed from the state, instead of a part of it.
    """
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)  # each an object of its own
    named = flatten({"state": state})
    paths = {id(leaf): path for leaf, (path, _) in zip(jax.tree.leaves(state), named, strict=True)}
    try:
        params = taken(state)
        return params, [paths[id(leaf)] for leaf in jax.tree.leaves(params)]
    except (KeyError, TypeError) as error:
        raise SettingsError("the policy is computed from the training state, so that only the best is kept") from error


def _learner_shapes(agent: Agent, processor: Processor, spec: EnvSpec) -> _Learner:
    """Return the shapes of a training state, as far as a policy needs them."""
    init = lambda key: _Learner(agent.init(key), processor.init(spaces.space_zeros(spec.observation_space, 1)))
    return jax.eval_shape(init, make_key(0))


def env_in(settings: Mapping[str, Any], given: Collection[str] = ()) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the parameters of the environment that a run with these settings was trained in.

    Parameters whose names are `given` are left out: the user gives them anew.

    Raises:
      SettingsError: it was made by hand, there was none, or the parameters are not plain.
    """
    if "env" in settings.get("custom", []):
        raise SettingsError(
            f"the environment {settings['env']} was made in Python; use load_policy and Evaluator there, or name "
            "another by --env"
        )
    if "data" in settings and settings.get("env") is None:
        raise SettingsError("the policy was learnt from data, and no env was named then; name one by --env")
    name, params = settings.get("env"), settings.get("env_args", {})
    if not isinstance(name, str):
        raise SettingsError(f"the policy's environment is {name!r}; expected a name")
    if isinstance(params, Mapping):
        params = {param: value for param, value in params.items() if param not in given}
    return name, check_plain_args(params, "the policy")


def _policy_of(strategy: Strategy) -> Policy:
    if strategy.policy is None:
        raise SettingsError("the strategy given has no policy")
    return strategy.policy


def _rebuild(
    facts: dict[str, Any], strategy: Strategy | None, made: Mapping[str, Any], run_dir: str | Path
) -> tuple[Policy, Any]:
    """Return the policy and the shapes of its parameters."""
    key = jax.eval_shape(lambda: make_key(0))
    if strategy is not None:
        policy = _policy_of(strategy)
        return policy, jax.eval_shape(lambda key: policy.params(strategy.init(key)), key)
    policy, agent, processor = _parts(facts, made, run_dir)
    return policy, policy_params_like(agent, processor, policy.spec)


def _parts(facts: Mapping[str, Any], made: Mapping[str, Any], run_dir: str | Path) -> tuple[Policy, Agent, Processor]:
    """Return the policy, agent and processor that settings describe."""
    settings = facts["settings"]
    algo = settings.get("algo")
    custom = set(made_by_hand(algo, settings.get("custom", [])))
    if by_hand := {"agent", "processor", "strategy"} & custom:
        raise SettingsError(
            f"the policy of {run_dir} has parts made in Python ({', '.join(sorted(by_hand))}), which no command "
            "rebuilds; in Python, pass them: load_policy(run_dir, strategy=...)"
        )
    if algo not in ALGORITHMS:
        module = module_to_import(str(algo))
        named = algo if module else "my_package.algos:make, the function registered as such"
        imported = f"import {module} and call register_algorithm" if module else "import the module that registers it"
        raise SettingsError(
            f"{run_dir} was trained by {algo}; code of your own is imported only where you name it, by --algo {named} "
            f"(in Python, {imported})"
        )
    wanted = sorted(custom & set(ACTS))
    if wanted != sorted(made):
        pass_it = (
            f"was made in Python; pass what made it: load_policy(run_dir, {', '.join(f'{x}=...' for x in wanted)})"
        )
        leave_it = f"was not made by {' and '.join(made)}; leave that out"
        raise SettingsError(f"the network of the policy of {run_dir} {pass_it if wanted else leave_it}")
    processor = build_processor(from_plain(ProcessorConfig(), settings["processor"]))
    spec = spaces.spec_from_plain(facts["spec"])
    agent = algorithm_maker(algo)(from_plain(general(algo).agent, settings["agent"]), **made)
    processor, bound = build_processor_and_agent(agent, processor, spec)
    return make_policy(bound, processor, spec), bound, processor
