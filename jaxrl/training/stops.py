"""Why runs stop: `stop` in the summary of a run, and `status` in its metadata."""

LIMITS = {"max_opts": "opt_steps", "max_env_steps": "env_steps"}
"""The counter in the summary for each limit of a run."""
EARLY = ("stop_reward", "patience", "stop")
"""Stop reasons of runs that ended before their limits."""
FINISHED = (*LIMITS, *EARLY)
"""Stop reasons of runs that are finished, rather than interrupted or failed."""
HALVED = "halved"
"""The status of a member that halving ended."""
EARLY_ENDS = (*EARLY, HALVED)
"""The status of a member that ended early and stays so, unless the limits that ended it change."""
BROKEN = ("failed", "diverged", "actor")
"""Prefixes of stop reasons after which a run goes on from its newest checkpoint; services mark such runs as failed."""


def can_go_on(status: str) -> bool:
    """Return whether a run with this status is neither finished nor broken: it runs, or was stopped from outside."""
    return status not in (*FINISHED, HALVED) and not status.startswith(BROKEN)
