"""Why a run ends before its limits, and how it goes back where updates are no longer finite: for trainer and session.

A run is stopped by a good evaluation, by none better for long, or because nothing can be learnt. Each reason is the
name of a setting, or `diverged`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.errors import DivergedError
from jaxrl.training.divergence import Validity
from jaxrl.training.ledger import Ledger
from jaxrl.training.logbook import Logbook


class Limits(Protocol):
    """The settings of a run that are asked after an evaluation."""

    @property
    def stop_reward(self) -> float | None: ...
    @property
    def patience(self) -> int: ...


def after_evaluation(limits: Limits, ledger: Ledger, mean_return: float) -> str | None:
    """Return which limit an evaluation has reached, the `ledger` having taken note of it; `None` if none."""
    if limits.stop_reward is not None and mean_return >= limits.stop_reward:
        return "stop_reward"
    if limits.patience and ledger.evals_without_best >= limits.patience:
        return "patience"
    return None


def require_try(log: Logbook, ledger: Ledger, max_rollbacks: int, what: str) -> None:
    """Write that training diverged, and raise `DivergedError`, if going back has been tried often enough.

    `what` is what `divergence.explain` says.
    """
    if ledger.tries < max_rollbacks:
        return
    log.event("diverged", what)
    tried = f"{ledger.tries} new tries from the last good checkpoint ended no better; " if ledger.tries else ""
    raise DivergedError(f"training diverged: {what}; {tried}try a lower agent.lr, or a smaller agent.max_grad_norm")


def rolled_back_ledger(ledger: Ledger, found: tuple[Any, Mapping[str, Any]] | None) -> Ledger:
    """Return the ledger of a run that goes back to what `Storage.rollback` has found; if nothing, to its beginning."""
    return ledger.rolled_back(Ledger().facts() if found is None else found[1]["ledger"])


def log_rollback(log: Logbook, opt_steps: int, what: str, aside: str = "") -> None:
    """Take back the rows after `opt_steps`, and write why; `aside` says what begins anew."""
    log.rewind(opt_steps)
    log.event("rollback", f"{what}; went back to here{aside}, to go on with other random numbers")


def require_valid(log: Logbook, validity: Validity) -> None:
    """Write that nothing was learnt, and raise `DivergedError`, if none of the environment steps was valid."""
    if verdict := validity.verdict:
        log.event("diverged", verdict)
        raise DivergedError(verdict)
