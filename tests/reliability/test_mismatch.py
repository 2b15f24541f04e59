"""What differs on resume is named: a leaf that has changed is never cast, a setting or version never overlooked."""

import dataclasses
import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_run import LAST, NEWEST, SMALL, SmallRun, rewrite_manifest
from toys_goals import places
from toys_runs import contents

import jaxrl
from jaxrl import train
from jaxrl.cli.algos import OffPolicyRun, build
from jaxrl.errors import SettingsError
from jaxrl.training import program
from jaxrl.training.settings import CHANGEABLE
from jaxrl.training.storage import run as storage
from jaxrl.training.storage.checkpoints import MismatchError, Store
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.run import OTHER_VERSIONS, VERSIONS, versions

# --- leaves ------------------------------------------------------------------------------------------------------

Parts = dict[str, Any]
PARTS: Parts = {
    "bytes": jnp.arange(4, dtype=jnp.int8),
    "count": jnp.uint32(7),
    "empty": jnp.zeros((0, 4)),
    "flags": jnp.arange(5) % 2 == 0,
    "half": jnp.ones((2, 3), jnp.bfloat16),
    "keys": jax.random.split(jax.random.key(3), 2),
    "rbg": jax.random.key(3, impl="rbg"),
    "weights": jnp.linspace(-1, 1, 12).reshape(3, 4),
}
OTHER_DTYPES = {
    "bytes": jnp.uint8, "count": jnp.int32, "empty": jnp.int32, "flags": jnp.int8, "half": jnp.float16,
    "weights": jnp.float16,
}  # fmt: skip


def still(parts: Parts) -> jaxrl.Strategy:
    """Do nothing to a state of a key and of `parts`."""
    state = namedtuple("State", ["key", *parts])  # type: ignore[misc]
    return jaxrl.Strategy(lambda key: state(key, **parts), lambda state, key, t: (state, {"t": t}), 1, 1)


@pytest.fixture(scope="module")
def still_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose state has all kinds of leaves."""
    run = tmp_path_factory.mktemp("still") / "run"
    state = jaxrl.Trainer(still(PARTS), max_opts=2, run_dir=str(run), recorders=[]).train().state
    again = jaxrl.Trainer(still(PARTS), max_opts=2, run_dir=str(run), resume=True, recorders=[]).train().state
    assert state_digest(again) == state_digest(state)
    return run


def other_dtype(name: str) -> tuple[Parts, str]:
    """Give a leaf another dtype of the same shape, such as a cast would go over in silence."""
    part = PARTS[name]
    if name not in OTHER_DTYPES:  # the path of a random key also tells of which kind it is
        return {**PARTS, name: jax.random.key_data(part).astype(jnp.int32)}, f"state/{name}"
    return {**PARTS, name: part.astype(OTHER_DTYPES[name])}, f"state/{name} has dtype"


def other_shape(name: str) -> tuple[Parts, str]:
    part = PARTS[name]
    return {**PARTS, name: part[None] if part.ndim < 2 else part.T}, f"state/{name}"


def renamed(name: str) -> tuple[Parts, str]:
    return {f"{old}_new" if old == name else old: part for old, part in PARTS.items()}, f"no leaf state/{name}_new"


def left_out(name: str) -> tuple[Parts, str]:
    return {old: part for old, part in PARTS.items() if old != name}, f"it also has a leaf state/{name}"


def added(name: str) -> tuple[Parts, str]:
    return {**PARTS, f"{name}_more": PARTS[name]}, f"it has no leaf state/{name}_more"


def moved(name: str) -> tuple[Parts, str]:
    rest, _ = left_out(name)
    return {**rest, "target": {name: PARTS[name]}}, f"it has no leaf state/target/{name}"


def put_first(name: str) -> tuple[Parts, str]:
    """Change the order of leaves; those of a dict have none."""
    return {name: PARTS[name], **PARTS}, "another order"


def other_key(name: str) -> tuple[Parts, str]:
    """Have a key of another kind: of the same numbers, but not the same random bits."""
    return {**PARTS, name: jax.random.key(3, impl="unsafe_rbg")}, f"state/{name}<unsafe_rbg>"


EACH, ONE, RBG = [*PARTS], ["weights"], ["rbg"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        *((change, EACH) for change in (other_dtype, other_shape, renamed, left_out, added)),
        *((moved, ONE), (put_first, ONE), (other_key, RBG)),
    ],
)
def test_a_leaf_that_is_another_is_an_error_with_its_path_even_if_changes_are_allowed(
    still_run: Path, change: Callable[[str], tuple[Parts, str]], names: list[str]
) -> None:
    before, store = contents(still_run / "checkpoints"), Store(still_run / "checkpoints", 1)
    allowed = {"resume": True, "allow_changes": True, "recorders": []}
    for name in names:
        parts, said = change(name)
        with pytest.raises(SettingsError) as refused:
            jaxrl.Trainer(still(parts), max_opts=4, run_dir=str(still_run), **allowed).train()
        with pytest.raises(MismatchError) as not_loaded:
            store.load(2, program.state_shapes(still(parts)))
        assert said in str(refused.value)
        assert said in str(not_loaded.value)
    assert contents(still_run / "checkpoints") == before


# --- settings ----------------------------------------------------------------------------------------------------


GROUPS: list[dict[str, Any]] = [
    {"seed": 1},
    {
        "actors": 1, "env": "Acrobot-v1", "env_args": {"max_steps_in_episode": 100.0}, "num_envs": 4,
        "opt_interval": 4, "updates": 2, "warmup": 18, "random_warmup": False, "agent.lr": 0.5, "agent.lr_decay": 100,
        "agent.freeze": ("params/params/MLP_0",), "agent.schedules": ("tau=linear(0.5,1.0,100)",),
        "agent.optimizer": "sgd",
    },
    {
        "resets": "pool:20", "stagger": True, "shards": 2, "agent.optimizer_eps": 1e-5, "agent.optimizer_b1": 0.5,
        "agent.optimizer_b2": 0.75, "agent.max_grad_norm": 1.0, "agent.accumulate": 2, "agent.loss": "huber",
        "agent.double": False, "agent.dueling": True, "agent.epsilon_start": 0.5, "agent.epsilon_end": 0.25,
        "agent.epsilon_decay": 21, "agent.boltzmann": 0.1,
    },
    {
        "agent.target_interval": 6, "agent.tau": 0.5, "agent.dtype": "bfloat16", "agent.features": (4, 4),
        "agent.activation": "tanh", "agent.values": "qr", "agent.atoms": 50, "agent.noisy": 0.5,
        "agent.munchausen": 0.9, "agent.munchausen_temperature": 0.1, "agent.cql": 1.0, "buffer.capacity": 66,
        "buffer.batch_size": 9, "buffer.compact": True, "buffer.ends": 0.5,
    },
    {
        "agent.value_rescaling": True, "buffer.prioritised": True, "processor.frame_stack": 2,
        "processor.reward_scale": 2.0, "processor.normalise_obs": True, "processor.normalise_reward": True,
        "processor.reward_clip": 1.0, "processor.n_step": 2, "processor.discount": 0.5,
    },
]  # fmt: skip
"""Another value of every setting that decides the training; those of a group go together."""
DECISIVE = {name: value for group in GROUPS for name, value in group.items()}

FREE: dict[str, Any] = {
    "max_opts": 45, "max_env_steps": 10_000, "stop_reward": 1e9, "patience": 99, "max_skips": 7, "max_rollbacks": 1,
    "eval_interval": 7, "eval_episodes": 3, "eval_env": "CartPole-v1", "eval_env_args": {"max_steps_in_episode": 50},
    "eval_starts": "fixed", "eval_actions": "sampled", "eval_at_start": True, "eval_at_return": 5.0,
    "confirm_best": False, "record_interval": 3, "recorders": ("csv",), "train_episodes": True,
    "video_interval": 7, "video_format": "mp4", "save_interval": 4, "save_replay": False, "keep": 1,
    "name": "second", "tags": ("wide",), "notes": "once more", "quiet": False,
    "buffer.memory": "host",
    "processes": True, "open_in_turn": True, "actor_timeout": 5.0, "actor_engine": "ray", "actor_restarts": 1,
}  # fmt: skip
"""Another value of every setting that does not, but for the run's own directory, which may be moved."""
START: dict[str, Any] = {"init_from": "nowhere", "init_parts": ("policy",)}
"""Other networks to begin with, for a run that has begun; they may be left out."""


IDLE: dict[str, Any] = {
    "agent.v_min": -1.0, "agent.v_max": 10.0, "agent.core_features": 4, "agent.core_layers": 2, "agent.core_window": 4,
    "agent.sequence": 3, "agent.burn_in": 2, "agent.sequence_interval": 2, "agent.n_step": 2,
    "agent.priority_max": 0.5, "buffer.alpha": 0.5, "buffer.beta": 0.5, "buffer.beta_steps": 10,
    "buffer.normalise": "all", "buffer.epsilon": 0.1, "send": 2, "max_lag": 1, "sync_interval": 2,
    "exploration": (0.5,), "exploration_schedule": "linear(1.0,0.5,100)",
}  # fmt: skip
"""Another value of every setting that does with prioritised replay, with c51 or a core, or where there are actors."""
SHAPED = {"agent.torso": "mlp", "agent.channels": (16,)}
"""Another way to say which network it is; observations of CartPole have no images."""
REFUSED = ["buffer.frames", "processor.one_hot", "agent.weight_decay"]
"""What is refused unless `buffer.compact` is set, where observations have no whole numbers, and with `adam`."""
SINGLE = ["agent.core", "buffer.hindsight"]
"""What is refused unless `processor.n_step` is 1."""


def names(config: Any, prefix: str = "") -> list[str]:
    """Return the name of every setting."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found += names(value, f"{prefix}{field.name}.") if nested else [f"{prefix}{field.name}"]
    return found


def changed(config: OffPolicyRun, name: str, value: Any) -> OffPolicyRun:
    """Return `config` with one setting replaced."""
    part, _, rest = name.partition(".")
    new = dataclasses.replace(getattr(config, part), **{rest: value}) if rest else value
    return dataclasses.replace(config, **{part: new})


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_every_setting_is_either_harmless_or_decides_the_training() -> None:
    # Data, teachers, and where they lie, are for runs that learn from them, and tested there; devices with shards.
    demos = ["demos", "demos_sha256", "demo_share"]
    others = ["run_dir", "devices", "mesh", *demos]
    assert sorted(names(SMALL)) == sorted([*DECISIVE, *FREE, *START, *IDLE, *SHAPED, *REFUSED, *SINGLE, *others])
    assert sorted([*FREE, *START, "run_dir", "data", "demos", "teacher", "devices", "mesh"]) == sorted(CHANGEABLE)


def refusal(name: str, config: OffPolicyRun) -> str:
    """Return how the change of a setting to that of `config` is told."""
    old, new = "fresh" if name == "resets" else value_of(SMALL, name), value_of(config, name)
    if name == "env_args":
        name, old, new = "env_args.max_steps_in_episode", None, 100.0
    return f"{name}: {list(old) if isinstance(old, tuple) else old} -> {list(new) if isinstance(new, tuple) else new}"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
def test_every_setting_that_decides_the_training_is_compared_with_that_of_the_run(
    run: Path, group: dict[str, Any]
) -> None:
    before, config = contents(run), SMALL
    for name, value in group.items():
        config = changed(config, name, value)
    settings = jaxrl.Trainer(build("dqn", config), train.trainer_config(config)).settings()
    with pytest.raises(SettingsError) as refused:
        storage.Storage(str(run), 4, settings, storage.Resume(enabled=True)).close()
    assert [name for name in group if refusal(name, config) not in str(refused.value)] == []
    assert ("--start-over" if "seed" in group else "--allow-changes") in str(refused.value)
    assert contents(run) == before


CHANGEABLE_ONES = ["eval_episodes", "save_interval", "record_interval", "train_episodes", "tags", "recorders"]
TOGETHER = {"harmless": CHANGEABLE_ONES, "idle": [*IDLE], "all": [*CHANGEABLE_ONES, *IDLE, *SHAPED]}


def flags_of(name: str) -> list[str]:
    """Return the flags that give a setting its other value."""
    value = {**FREE, **START, **IDLE, **SHAPED}[name]
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", *(str(word) for pair in value.items() for word in pair)]
    return [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]


ALONE = [name for name in FREE if name != "save_replay"]
"""Settings that may be changed alone: what is left out is compared below."""


@pytest.mark.every_day("all")
@pytest.mark.parametrize("changed", [*TOGETHER, *ALONE, *SHAPED])
def test_what_is_harmless_or_idle_or_says_the_same_otherwise_may_change_and_no_bit_with_it(
    small: SmallRun, run: Path, changed: str
) -> None:
    train.main(["--resume", str(run), *(word for name in TOGETHER.get(changed, [changed]) for word in flags_of(name))])
    assert small.digest(run, LAST) == small.digests[LAST]


def test_leaving_replay_out_of_checkpoints_changes_nothing_else(run: Path, small: SmallRun) -> None:
    train.main(["--resume", str(run), "--no-save-replay"])
    bare, whole = (Store(path / "checkpoints", 1).read(LAST)[0] for path in (run, small.whole))
    assert bare.keys() == {path for path in whole if "/buffer/" not in path} != whole.keys()
    assert state_digest(bare) == state_digest({path: whole[path] for path in bare})


def sampled(core: str = "none", share: float = 0.0) -> jaxrl.Strategy:
    """Learn to reach places, from single steps or from sequences, or in hindsight."""
    ring = jaxrl.uniform(64, batch_size=4)
    return jaxrl.off_policy(
        places(),
        jaxrl.dqn(features=(4,), core=core, core_features=4, sequence=2, burn_in=0),
        buffer=jaxrl.hindsight(ring, share) if share else ring,
        num_envs=2,
        opt_interval=2,
        warmup=16,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said", "fits"),
    [
        ({}, {"core": "gru"}, "agent.core: none -> gru", False),
        ({"core": "gru"}, {"core": "lstm"}, "agent.core: gru -> lstm", False),
        ({}, {"share": 0.5}, "buffer.hindsight: None -> 0.5", False),
        ({"share": 0.5}, {"share": 0.8}, "buffer.hindsight: 0.5 -> 0.8", True),
    ],
)
def test_what_is_sampled_from_replay_is_refused_by_name_and_changes_only_where_what_was_saved_fits(
    old: dict[str, Any], new: dict[str, Any], said: str, fits: bool, tmp_path: Path
) -> None:
    settings = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "recorders": [], "run_dir": str(tmp_path)}
    jaxrl.Trainer(sampled(**old), max_opts=2, **settings).train()
    with pytest.raises(SettingsError) as refused:
        jaxrl.Trainer(sampled(**new), max_opts=4, resume=True, **settings).train()
    assert said in str(refused.value)
    assert ("--allow-changes" if fits else "cannot change, for what was saved would not fit") in str(refused.value)
    allowed = jaxrl.Trainer(sampled(**new), max_opts=4, resume=True, allow_changes=True, **settings)
    if fits:
        assert allowed.train().summary["opt_steps"] == 4
        return
    with pytest.raises(SettingsError, match="cannot change, for what was saved would not fit"):
        allowed.train()


def test_another_network_is_refused_where_changes_are_allowed(run: Path) -> None:
    """`auto` may be another name for what is given now; here it is none."""
    with pytest.raises(SettingsError, match=r"agent\.torso cannot change, for what was saved would not fit"):
        train.main(["--resume", str(run), "--agent.torso", "simba", "--allow-changes"])


@pytest.mark.parametrize("name", IDLE)
def test_idle_settings_decide_where_there_is_what_they_are_of(name: str) -> None:
    part, _, rest = name.rpartition(".")
    awake = changed(
        SMALL, *{"buffer": ("buffer.prioritised", True), "agent": ("agent.values", "c51")}.get(part, ("actors", 1))
    )
    awake = changed(awake, "exploration", (0.9,)) if name == "exploration_schedule" else awake
    strategies = [build("dqn", config) for config in (awake, changed(awake, name, IDLE[name]))]
    settings = [strategy.info.settings[part] if part else strategy.info.settings for strategy in strategies]
    usual = 2 if name == "max_lag" else value_of(SMALL, name)  # unset, it is that of replay
    assert [s[rest] for s in settings] == [usual, IDLE[name]]


@pytest.mark.parametrize("more", [[], ["--allow-changes"], ["--from-step", "latest"]], ids=" ".join)
def test_a_run_that_has_begun_takes_no_other_networks_to_begin_with(run: Path, more: list[str]) -> None:
    before = contents(run)
    more = [*more, "--run-dir", f"{run}-new"] if "--from-step" in more else more
    with pytest.raises(SettingsError) as refused:
        train.main(["--resume", str(run), *(word for name in START for word in flags_of(name)), *more])
    assert str(refused.value) == (
        f"{run} began with other networks (init_from: None -> nowhere; init_parts: [] -> ['policy']), which cannot "
        "change: leave --init-from and --init-parts out, or use --start-over"
    )
    assert contents(run) == before
    assert not Path(f"{run}-new").exists()


def test_an_allowed_change_that_cannot_be_made_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def train_width(width: int, **resume: bool) -> None:
        strategy = still({**PARTS, "weights": jnp.zeros(width)})
        info = jaxrl.StrategyInfo(settings={"algo": "still", "custom": ["strategy"], "width": width})
        strategy = strategy._replace(info=info)
        jaxrl.Trainer(strategy, max_opts=2, run_dir=str(run), recorders=[], **resume).train()

    train_width(4)
    before = (run / "config.yaml").read_text()
    with pytest.raises(SettingsError, match=r"width: 4 -> 8.*width cannot change"):
        train_width(8, resume=True, allow_changes=True)
    train_width(4, resume=True)
    assert (run / "config.yaml").read_text() == before
    with pytest.raises(SettingsError, match=r"width: 4 -> 8.*width cannot change"):
        train_width(8, resume=True, allow_changes=True)
    assert (run / "config.yaml").read_text() == before


# --- versions ----------------------------------------------------------------------------------------------------


def take_for_older(run: Path, *packages: str) -> None:
    """Let the run have been trained with other versions of `packages`, and of all that decide no bit."""
    older = dict.fromkeys(packages, "0.0.1")
    rewrite_manifest(run / "checkpoints" / str(NEWEST), lambda manifest: manifest["facts"]["versions"].update(older))
    metadata = json.loads((run / "metadata.json").read_text())
    assert {*OTHER_VERSIONS} <= metadata["versions"].keys()
    metadata["versions"].update(older, **dict.fromkeys(OTHER_VERSIONS, "0.0.1"))
    (run / "metadata.json").write_text(json.dumps(metadata))


def test_other_versions_are_refused_with_both(run: Path) -> None:
    take_for_older(run, *VERSIONS)
    before = contents(run)
    with pytest.raises(SettingsError, match="--allow-changes") as refused:
        train.main(["--resume", str(run)])
    for package, here in versions(VERSIONS).items():
        assert f"versions.{package}: 0.0.1 -> {here}" in str(refused.value)
    assert contents(run) == before


def test_another_version_that_is_allowed_is_told_in_the_log(small: SmallRun, run: Path) -> None:
    take_for_older(run, "jaxlib")
    train.main(["--resume", str(run), "--allow-changes"])
    assert small.digest(run, LAST) == small.digests[LAST]
    assert f"jaxlib: 0.0.1 -> {versions(VERSIONS)['jaxlib']}" in (run / "metrics.jsonl").read_text()
