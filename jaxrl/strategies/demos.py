"""Demonstrations: recorded transitions as a fixed share of each batch from replay."""

from functools import partial
from typing import Any

import jax

from jaxrl.buffers.base import Buffer
from jaxrl.buffers.dataset import Dataset, summarise
from jaxrl.buffers.mixed import mix
from jaxrl.envs.base import Env
from jaxrl.envs.host import HostEnv
from jaxrl.errors import SettingsError
from jaxrl.strategies.interaction import Acting
from jaxrl.strategies.offline import check_env, check_memoryless, make_transitions


def with_demos(buffer: Buffer, demos: Dataset | None, share: float, acting: Acting, env: Env | HostEnv) -> Buffer:
    """Return `buffer` mixed with `demos`, which make up `share` of each batch; without `demos`, `buffer` itself.

    The processor turns demonstrations into transitions, as it does steps of the environment.

    Raises:
      SettingsError: the demonstrations are of another environment, the agent or the processor does not support them,
        or `share` is out of range.
    """
    if demos is None:
        return buffer
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise SettingsError(f"demo_share is {share}; expected a share above 0 and below 1, as 0.5")
    check_env(demos, env)
    check_memoryless(acting.agent, "demos")
    scales = has_stats(acting, demos) or (acting.processor.settings or {}).get("normalise_reward")
    if acting.processor.apply is None and scales:
        raise SettingsError(
            "the processor learns what it scales by as it goes, so demos and experience would be scaled otherwise; "
            "leave normalise_obs and normalise_reward off, or demos out"
        )
    # The batch of the buffer keeps its size, and demonstrations are added to it.
    count = max(1, round(buffer.batch_size * share / (1 - share)))
    return mix(buffer, partial(make_transitions, acting.processor, demos), demos.rows, count)


def has_stats(acting: Acting, demos: Dataset) -> bool:
    """Return whether the processor keeps statistics of observations."""
    obs = jax.tree.map(lambda x: x[:1], demos.obs)
    seen = jax.eval_shape(lambda: acting.processor.get_stats(acting.processor.init(obs)))
    return bool(jax.tree.leaves(seen))


def settings_of_demos(demos: Dataset | None, share: float) -> dict[str, Any]:
    """Return the settings of a run that reload the demonstrations, and `by_hand` if they have no file.

    Without demonstrations the share is its default, since nothing uses it.
    """
    if demos is None:
        return {"demos": [], "demos_sha256": "", "demo_share": 0.5}
    found = demos.settings or {}
    return {
        "demos": found.get("data", []),
        "demos_sha256": found.get("data_sha256", ""),
        "demo_share": share,
        "by_hand": () if found else ("demos",),
    }


def notes_of_demos(demos: Dataset | None, batch: int, ring: int) -> tuple[str, ...]:
    """Return a note on the demonstrations in a `batch`, of which `ring` items are from the buffer."""
    return () if demos is None else (f"{batch - ring} of {batch} transitions in a batch are from {summarise(demos)}",)
