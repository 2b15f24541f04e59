"""How a run is taken up again: what has to fit, how it is prolonged, and what is said where nothing is left to do."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.errors import SettingsError
from jaxrl.paths import require_free
from jaxrl.strategies.base import Strategy
from jaxrl.training.devices import altered
from jaxrl.training.ledger import Ledger
from jaxrl.training.memory import Plan
from jaxrl.training.program import Compiled, forms_of, jit_refill, state_shapes
from jaxrl.training.schedule import Schedule
from jaxrl.training.settings import TrainerConfig, rounding
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.fork import origin
from jaxrl.training.storage.members import require_no_member
from jaxrl.training.storage.run import Resume, Storage
from jaxrl.training.storage.weights import Weights, weights_of
from jaxrl.trees import PyTree
from jaxrl.xla import attempts

BROKEN = ("failed", "diverged", "actor")
"""How the reasons begin for which a run ended whose state in memory cannot be gone on from."""


def resumption(
    resume: bool | str | os.PathLike[str],
    from_step: int | str | None,
    run_dir: str | None,
    allow_changes: bool,
    start_over: bool,
) -> tuple[str | None, Resume]:
    """Return the directory of a run, and whether and how it is taken up; see `origin`.

    Raises:
      SettingsError: these do not go together.
    """
    run_dir, fork = origin(resume, from_step, run_dir)
    if resume and run_dir is None:
        raise SettingsError("resume needs the run_dir to go on with")
    if allow_changes and not resume:
        raise SettingsError("allow_changes says how to resume; set resume as well")
    if start_over and run_dir is None:
        raise SettingsError("start_over needs the run_dir in which to begin again")
    if start_over and fork is not None:
        raise SettingsError("start_over begins a run again, from_step one from a checkpoint; leave one of them out")
    return run_dir, Resume(bool(resume), allow_changes, start_over, fork)


def check_run(strategy: Strategy, config: TrainerConfig, fresh: bool, is_member: bool) -> Weights:
    """Return what a `fresh` run is to begin with; nothing has been written yet.

    Raises:
      SettingsError: what `weights_of` raises; or it is no member of a population, and would be in the place of one.
      RunDirInUseError: another process holds the directory.
    """
    if config.run_dir is not None:
        if not is_member:
            require_no_member(config.run_dir)
        require_free(config.run_dir)
    return weights_of(config.init_from if fresh else None, lambda: state_shapes(strategy))


def compiled_for(
    compile_all: Callable[[], Compiled],
    strategy: Strategy,
    config: TrainerConfig,
    storage: Storage,
    weights: Weights,
    goes_on: bool,
) -> tuple[Compiled, Weights]:
    """Return the programs of a run that begins with `weights`, once it is known that what it goes on from fits them.

    Raises:
      SettingsError: the checkpoint does not fit, or what `weights_of` raises.
    """
    if not goes_on and not weights.leaves:  # it was to be resumed, and has never been saved
        weights = weights_of(config.init_from, lambda: state_shapes(strategy))
    storage.expect(forms_of(strategy))
    if storage.resumes:
        storage.check_fits(state_shapes(strategy))
    compiled = compile_all()
    return compiled._replace(init=weights.after(compiled.init)), weights


def fits(strategy: Strategy, schedule: Schedule, ledger: Ledger, checkpoints: Store, facts: Mapping[str, Any]) -> bool:
    """Say whether the newest of `checkpoints`, of which these are the facts, could be gone on from."""
    try:
        like = state_shapes(strategy)
        checkpoints.forms = forms_of(strategy)
        checkpoints.check_newest(like)
        restored = ledger.restored(facts["ledger"])
    except (SettingsError, KeyError, TypeError, ValueError):
        return False
    return restored.counters(schedule)["env_steps"] == facts.get("env_steps")


def replenished(strategy: Strategy, state: PyTree, t: int, changed: bool) -> tuple[PyTree, range]:
    """Return a state that was saved after `t` iterations, with a buffer if it was saved without, and how it got it.

    Where settings have `changed`, it has the present ones.

    The range has the numbers of the blocks that were pushed anew; none if the buffer was saved. Actors push them later.
    """
    refill = strategy.state_fns.refill
    if changed and strategy.state_fns.set_hyperparams is not None:
        state = altered(strategy, "set_hyperparams", state)
    if refill is None or jax.tree.leaves(state.buffer):
        return state, range(0)
    blocks = refill.blocks(t)
    first, stop = np.uint32(blocks.start), np.uint32(blocks.stop)
    return jit_refill(strategy)(state, first, stop), blocks


def anew(refilled: range, strategy: Strategy) -> str:
    """Say what a run that goes on from a checkpoint has to begin anew; `refilled` is what `replenished` says."""
    steps = len(refilled) * strategy.env_steps_per_step
    parts = ["environments that start anew"] if strategy.actor_fns is not None else []
    parts += [f"replay filled anew by {steps} environment steps, which no counter counts"] if steps else []
    return f" with {', and '.join(parts)}" if parts else ""


def require_counters(checkpoint: str, counted: Mapping[str, int], saved: Mapping[str, Any]) -> None:
    """Raise `SettingsError` unless the counters under these settings are those that were saved."""
    if counted != saved:
        raise SettingsError(
            f"checkpoint {checkpoint} was made after {saved}, which under these settings would be {counted}; "
            "keep num_envs, opt_interval and warmup"
        )


def planned(strategy: Strategy, config: TrainerConfig) -> tuple[TrainerConfig, Schedule, list[str]]:
    """Return checked settings whose length is possible, the schedule of the run, and what to say of the length.

    Raises:
      SettingsError: the settings cannot be.
    """
    config.check()
    if not config.save_replay and strategy.state_fns.refill is None:
        name = (strategy.info.settings or {}).get("algo", "this strategy")
        raise SettingsError(f"save_replay is no, but {name} has no replay that could be filled again; leave it out")
    asked, config = config.max_opts, config.rounded(strategy)
    return config, config.schedule(strategy), rounding(asked, config.max_opts, strategy.opt_steps_per_step)


def notes_of(plan: Plan, strategy: Strategy, storage: Storage) -> list[str]:
    """Return what is said as a run begins; the whole `plan` of its memory is written into `metadata.json`."""
    without = attempts.failures()
    storage.note(memory=plan.facts(), **({"without": without} if without else {}))
    return [*plan.notes(), *strategy.info.notes, *attempts.notes()]


def prolonged(
    strategy: Strategy, config: TrainerConfig, max_opts: int, done: int
) -> tuple[TrainerConfig, Schedule, list[str]]:
    """Return the settings, the schedule and the notes of a run that is to make `max_opts` optimisation steps in all.

    Raises:
      SettingsError: that is no length, or fewer than the `done` that it has made.
    """
    plan = planned(strategy, config.changed(max_opts=max_opts))
    if plan[0].max_opts < done:
        raise SettingsError(f"max_opts is {max_opts}, but the run has made {done} optimisation steps; expected more")
    return plan
