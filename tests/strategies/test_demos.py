"""Demonstrations beside replay: what is in a batch, what they teach, and runs that go on with them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_bits import same_bits

import jaxrl
from benchmarks import demos as locks
from jaxrl.buffers import mix
from jaxrl.errors import SettingsError
from jaxrl.strategies.population import with_values
from jaxrl.types import Transition

LENGTH = 12


def shown(episodes: int = 3, length: int = LENGTH) -> jaxrl.Dataset:
    return locks.shown(length, episodes)


def lock() -> jaxrl.Env:
    return locks.lock(LENGTH)


def opening(demos: jaxrl.Dataset | None, **settings: Any) -> jaxrl.Strategy:
    agent = settings.pop("agent", jaxrl.dqn(lr=0.05, features=(), target_interval=10, epsilon_decay=100))
    settings = {"num_envs": 4, "opt_interval": 4, "warmup": 64, "processor": jaxrl.n_step(1, 0.9), **settings}
    settings.setdefault("buffer", jaxrl.uniform(500, batch_size=16))
    return jaxrl.off_policy(lock(), agent, demos=demos, **settings)


def item(rewards: list[float]) -> Transition:
    reward = jnp.asarray(rewards)
    return Transition(
        reward[:, None], reward.astype(jnp.int32), reward, reward, reward[:, None], (), jnp.ones_like(reward)
    )


@pytest.mark.parametrize("make", [jaxrl.uniform, jaxrl.prioritised])
def test_a_batch_is_the_rings_and_then_so_many_demonstrations(make: Any) -> None:
    buffer = mix(make(8, batch_size=6), lambda: item([10.0, 11.0, 12.0]), rows=3, count=5)
    assert buffer.batch_size == 11
    state = jax.jit(buffer.push)(
        buffer.init(jax.tree.map(lambda x: x[0], item([0.0])), 4), item([0.0, 1.0, 2.0, 3.0]), jnp.uint32(0)
    )
    seen, sample = [], jax.jit(lambda key: buffer.sample(state, key, jnp.uint32(1), jnp.uint32(0)))
    for seed in range(20):
        batch = sample(jax.random.key(seed))
        assert np.all(np.asarray(batch.items.reward[:6]) < 4)
        assert batch.weight[6:].tolist() == [1.0] * 5
        seen += batch.items.reward[6:].tolist()
    assert {*seen} == {10.0, 11.0, 12.0}
    told = jax.jit(buffer.reprioritise)(state, batch.index, jnp.arange(11.0))
    alone = make(8, batch_size=6)
    wanted = jax.jit(alone.reprioritise)(state.ring, batch.index[:6], jnp.arange(6.0))
    assert same_bits(told.ring, wanted)
    assert same_bits(told.demos, state.demos)


def test_demonstrations_follow_a_discount_that_changes() -> None:
    strategy = opening(shown(episodes=1), processor=jaxrl.n_step(2, 0.9))
    change = with_values(strategy, {"processor.discount": 0.5}).state_fns.set_hyperparams
    state = jax.jit(strategy.init)(jax.random.key(0))
    after = jax.jit(change)(state)
    discounts = lambda state: np.unique(np.asarray(state.buffer.demos.items.discount)).tolist()
    # Two steps up to the end, where nothing follows.
    assert discounts(state) == pytest.approx([0, 0.9**2])
    assert discounts(after) == pytest.approx([0, 0.5**2])
    assert same_bits(after.buffer.ring, state.buffer.ring)


@pytest.mark.parametrize(("share", "batch"), [(0.5, 32), (0.2, 20), (0.75, 64), (1e-6, 17)])
def test_the_share_is_that_of_the_whole_batch(share: float, batch: int) -> None:
    strategy = opening(shown(9), demo_share=share)
    (note,) = [note for note in strategy.info.notes if "transitions in a batch" in note]
    assert note.startswith(f"{batch - 16} of {batch} transitions in a batch are from 108 transitions in 9 episodes")


def test_shards_do_not_change_the_share() -> None:
    with pytest.raises(SettingsError, match=r"5 demonstrations .* of 16: .* 4 shards; set it to 0\.2 or 0\.333333"):
        opening(shown(9), demo_share=0.25, shards=4)
    for share, count in ((0.2, 4), (0.333333, 8)):
        (note,) = [x for x in opening(shown(9), demo_share=share, shards=4).info.notes if "transitions in a batch" in x]
        assert note.startswith(f"{count} of {16 + count} transitions in a batch")


@pytest.mark.slow
def test_a_lock_that_chance_does_not_open_is_opened_by_those_who_were_shown() -> None:
    found = {}
    for name, demos in (("alone", None), ("shown", shown())):
        trainer = jaxrl.Trainer(opening(demos), max_opts=400, eval_interval=400, eval_episodes=2, quiet=True)
        found[name] = trainer.train().best_score
    assert found == {"alone": pytest.approx(0.1), "shown": 1.0}


@pytest.mark.slow
def test_a_run_goes_on_with_them_and_not_with_others(tmp_path: Path) -> None:
    file, other = tmp_path / "shown.npz", tmp_path / "other.npz"
    jaxrl.save_dataset(file, shown(3))
    jaxrl.save_dataset(other, shown(4))
    load = lambda path: opening(jaxrl.load_dataset(path, spec=lock().spec))
    settings: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "save_interval": 20, "quiet": True}
    whole = jaxrl.Trainer(load(file), max_opts=40, **settings).train().state
    run = str(tmp_path / "run")
    jaxrl.Trainer(load(file), max_opts=20, run_dir=run, **settings).train()
    with pytest.raises(SettingsError, match="demos_sha256: "):
        jaxrl.Trainer(load(other), max_opts=40, resume=run, **settings).train()
    less = opening(jaxrl.load_dataset(file, spec=lock().spec), demo_share=0.25)
    with pytest.raises(SettingsError, match=r"demo_share: 0\.5 -> 0\.25"):
        jaxrl.Trainer(less, max_opts=40, resume=run, **settings).train()
    moved = file.rename(tmp_path / "moved.npz")
    state = jaxrl.Trainer(load(moved), max_opts=40, resume=run, **settings).train().state
    assert same_bits(state, whole)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"demo_share": 0.0}, "demo_share is 0.0; expected a share above 0 and below 1"),
        ({"demo_share": 1}, "demo_share is 1; expected a share"),
        ({"demos": shown(3, 5)}, r"the data have observation space Box.*5.*, but Lock has"),
        (
            {"processor": jaxrl.chain(jaxrl.normalise_obs(), jaxrl.frame_stack(2), jaxrl.one_step())},
            "the processor learns what it scales by",
        ),
        (
            {"processor": jaxrl.chain(jaxrl.normalise_reward(), jaxrl.reward_clip(1.0), jaxrl.one_step())},
            "leave normalise_obs and normalise_reward",
        ),
    ],
    ids=["nothing of them", "nothing else", "another lock", "moments of observations", "moments of rewards"],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        opening(settings.pop("demos", shown()), **settings)


def test_demonstrations_made_by_hand_are_named_as_such() -> None:
    assert "demos" in opening(shown()).info.settings["custom"]
    assert "demos" not in opening(None).info.settings["custom"]
