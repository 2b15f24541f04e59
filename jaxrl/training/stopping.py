"""Early stopping and rollbacks, for trainer and session.

A run stops early at a target return, after evaluations without improvement, or if nothing can be learnt. The reason is
the name of a setting, or `diverged`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.errors import DivergedError
from jaxrl.training.divergence import Validity
from jaxrl.training.ledger import Ledger
from jaxrl.training.logbook import Logbook


class Limits(Protocol):
    """The settings for early stopping after an evaluation."""

    @property
    def stop_reward(self) -> float | None: ...
    @property
    def patience(self) -> int: ...


def after_evaluation(limits: Limits, ledger: Ledger, mean_return: float) -> str | None:
    """Return the limit reached by an evaluation that is already recorded in `ledger`, or `None`."""
    if limits.stop_reward is not None and mean_return >= limits.stop_reward:
        return "stop_reward"
    if limits.patience and ledger.evals_without_best >= limits.patience:
        return "patience"
    return None


def require_rollback_left(log: Logbook, ledger: Ledger, max_rollbacks: int, what: str) -> None:
    """Log the divergence and raise `DivergedError` if no rollback is left; `what` is from `divergence.explain`."""
    if ledger.tries < max_rollbacks:
        return
    log.event("diverged", what)
    tried = f"{ledger.tries} new tries from the last good checkpoint ended no better; " if ledger.tries else ""
    raise DivergedError(f"training diverged: {what}; {tried}try a lower agent.lr, or a smaller agent.max_grad_norm")


def rolled_back_ledger(ledger: Ledger, found: tuple[Any, Mapping[str, Any]] | None) -> Ledger:
    """Return the ledger after a rollback to the checkpoint `found` by `Storage.rollback`, or to the start if `None`."""
    return ledger.roll_back(Ledger().facts() if found is None else found[1]["ledger"])


def log_rollback(log: Logbook, opt_steps: int, what: str, aside: str = "") -> None:
    """Truncate the logs after `opt_steps`, and log the reason; `aside` is the text on what starts anew."""
    log.rewind(opt_steps)
    log.event("rollback", f"{what}; went back to here{aside}, to go on with other random numbers")


def require_valid(log: Logbook, validity: Validity) -> None:
    """Log and raise `DivergedError` if none of the environment steps was valid."""
    if verdict := validity.verdict:
        log.event("diverged", verdict)
        raise DivergedError(verdict)
