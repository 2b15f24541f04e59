"""Scale the settings of a preset to a run of another length."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

INTERVALS = ("eval_interval", "record_interval")
DECAYS = ("agent.lr_decay", "agent.epsilon_decay", "buffer.beta_steps")
"""Settings that are a number of optimisation steps over which something decays or rises."""
MAX_STEPS = 2**31 - 1
"""Largest value of these settings, an int32."""


def flatten_names(settings: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the names of nested settings, such as `agent.lr`."""
    found: set[str] = set()
    for name, value in settings.items():
        found |= flatten_names(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}"}
    return found


def count_opt_steps(config: Any, env_steps: int) -> int | None:
    """Return the number of optimisation steps in `env_steps` environment steps; `None` for offline runs."""
    if _has_field(config, "rollout"):
        rows, made, warmup = config.num_envs * config.rollout, config.epochs * config.minibatches, 0
    elif _has_field(config, "opt_interval"):
        rows = max(config.num_envs, config.opt_interval)
        made, warmup = config.updates * rows // max(config.opt_interval, 1), config.warmup
    else:
        return None
    rows = max(rows, 1)
    left = env_steps - -(-warmup // rows) * rows
    return max(-(-left // rows), 1) * made


def _has_field(config: Any, name: str) -> bool:
    return name in type(config).__dataclass_fields__


def estimate_opt_steps(config: Any) -> int:
    """Return the approximate number of optimisation steps of a run with these settings."""
    within = count_opt_steps(config, config.max_env_steps) if config.max_env_steps > 0 else None
    return config.max_opts if within is None else min(within, config.max_opts)


def scale_to_length(
    config: Any, preset: Any, preset_names: Collection[str], chosen: Collection[str]
) -> tuple[Any, str | None]:
    """Scale decays and intervals of `config` to its length; return it and a note on the changes, if any.

    Args:
      config: the settings of a run.
      preset: the settings of the preset alone.
      preset_names: names of the settings in the preset; of the decays, only these were chosen for its length.
      chosen: names of the settings that the user has given, which stay.
    """
    length, preset_length = estimate_opt_steps(config), preset.max_opts
    if "max_opts" not in preset_names or length == preset_length or min(length, preset_length) < 1:
        return config, None
    changed: dict[str, int] = {}
    for name in (*INTERVALS, *(decay for decay in DECAYS if decay in preset_names)):
        before = _get_setting(preset, name)
        after = min(max(round(before * length / preset_length), 1), MAX_STEPS) if before else 0
        if name not in chosen and after != before:
            changed[name] = after
            config = _replace_setting(config, name, after)
    if not changed:
        return config, None
    changes = ", ".join(f"{name} {value}" for name, value in changed.items())
    return config, f"the preset is for max_opts {preset_length}; scaled to {length}: {changes}"


def _get_setting(config: Any, name: str) -> int:
    for part in name.split("."):
        config = getattr(config, part)
    return int(config)


def _replace_setting(config: Any, name: str, value: int) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: _replace_setting(getattr(config, head), rest, value) if rest else value})
