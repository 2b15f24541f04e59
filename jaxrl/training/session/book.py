"""What a session tells of itself: its summary, its rows of metrics, and the state it is taken up from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.training.logbook import Logbook, unpacking
from jaxrl.training.policy import spec_facts
from jaxrl.training.program import summarise, zero_sums
from jaxrl.training.sanity import columns_to_write
from jaxrl.training.schedule import Schedule
from jaxrl.training.session.parts import SessionState
from jaxrl.training.session.rows import Interval
from jaxrl.training.session.saved import facts_of, for_another_try, restored, shapes_of, tree_of, with_changes
from jaxrl.training.session.stepper import Stepper
from jaxrl.training.stopping import rolled_back_ledger
from jaxrl.training.storage.run import Storage


def summary_of(now: SessionState, stepper: Stepper, counters: Mapping[str, int], status: str) -> dict[str, Any]:
    """Return counters, speeds, scores, statistics of the episodes, and means of what was learnt, all over `now`."""
    ledger, wall = now.ledger, now.ledger.wall
    return {
        **counters,
        **{f"{name}_per_sec": steps / wall for name, steps in counters.items()},
        "best_score": ledger.best_score,
        "best_opt_steps": ledger.best_opt_steps,
        "last_score": ledger.last_score,
        "rollbacks": ledger.rollbacks,
        "invalid_steps": now.invalid,
        **now.statistics.summary(),
        **columns_to_write(summarise(stepper.metrics, stepper.add_up(now.past, now.sums))),
        "wall_s": wall,
        "stop": status,
    }


def noted(now: SessionState, values: Mapping[str, float | None]) -> SessionState:
    """Return the session with these numbers among its statistics, and in its next row."""
    return now._replace(statistics=now.statistics.note(values), interval=now.interval.noted(values))


def recorded(now: SessionState, stepper: Stepper, log: Logbook, opt_steps: int, env_steps: int) -> SessionState:
    """Write the row of the interval that ends here, and return the session at the beginning of another."""
    wall, ledger = now.ledger.wall, dataclasses.replace(now.ledger)
    own = now.interval.columns(opt_steps, env_steps, now.invalid, wall, now.statistics.chosen)
    columns = {**own, **summarise(stepper.metrics, now.sums)}
    log.trained(columns, ledger, stepper.stepwise.agent.info.settings or {}, env_steps - now.interval.env_steps)
    begun = Interval(opt_steps=opt_steps, env_steps=env_steps, invalid=now.invalid, wall=wall)
    past, sums = stepper.add_up(now.past, now.sums), zero_sums(len(stepper.metrics))
    return now._replace(past=past, sums=sums, interval=begun, ledger=ledger)


def facts_to_save(now: SessionState, stepper: Stepper, log: Logbook, t: int) -> tuple[dict[str, Any], SessionState]:
    """Return what a checkpoint after `t` iterations holds beside its arrays, and the session that has got further."""
    ledger = dataclasses.replace(now.ledger, t=t)
    own = {"spec": spec_facts(stepper.policy), **facts_of(now)}
    facts = log.facts(ledger, stepper.health(now), **own)
    if ledger.tries != now.ledger.tries:
        now = now._replace(ledger=dataclasses.replace(now.ledger, tries=ledger.tries))
    return facts, now


def taken_up(first: SessionState, stepper: Stepper, log: Logbook, storage: Storage, schedule: Schedule) -> SessionState:
    """Return what the newest valid checkpoint holds, in the structure of `first`."""
    like = tree_of(first)
    storage.check_fits(like)
    step, tree, facts = storage.load(like)
    with unpacking(f"{step} of {storage.path}", "no session's"):
        now = restored(tree, facts, log.restored_ledger(facts, first.ledger), first.statistics)
    now = with_changes(now, stepper.stepwise, schedule, storage.decisive)
    storage.go_on()
    return now


def gone_back(now: SessionState, stepper: Stepper, storage: Storage, schedule: Schedule) -> SessionState:
    """Return the last good state, or the beginning, with another stream of randomness to go on with."""
    fresh, found = now.statistics.fresh(), storage.rollback(shapes_of(now))
    ledger = rolled_back_ledger(now.ledger, found)
    if found is None:
        back = stepper.first(fresh)._replace(ledger=ledger)
    else:
        with unpacking(f"of {storage.path}", "no session's"):
            back = restored(*found, ledger, fresh)
        back = with_changes(back, stepper.stepwise, schedule, storage.decisive)
    return for_another_try(back)._replace(best=now.best, resetting=now.resetting)
