"""Checkpoints without the replay buffer: small, usable like any other, and gone on from with a buffer filled anew."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_data import walk
from toys_envs import counting
from toys_runs import messages, rows_in
from toys_trainer import small_dqn

import jaxrl
from jaxrl import verify
from jaxrl.errors import SettingsError
from jaxrl.training.program import jit_refill, state_shapes
from jaxrl.training.report import Result
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.leaves import host_leaves, state_digest
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import CHECKPOINTS, member_dir

RUN: dict[str, Any] = {"save_interval": 10, "keep": 9, "eval_interval": 0, "eval_episodes": 0, "quiet": True}
CAPACITY, ROWS = 200, 4


def train(run: Path, max_opts: int, strategy: Any = None, **settings: Any) -> Result:
    settings = {**RUN, "save_replay": False, **settings}
    return jaxrl.Trainer(strategy or small_dqn(), max_opts=max_opts, run_dir=str(run), **settings).train()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run of 30 optimisation steps that saves no replay; do not write it."""
    run = tmp_path_factory.mktemp("bare") / "run"
    return run, train(run, 30)


def test_a_checkpoint_holds_all_but_the_buffer_and_training_is_the_same(bare: Any, tmp_path: Path) -> None:
    run, result = bare
    assert state_digest(train(tmp_path / "whole", 30, save_replay=True).state) == state_digest(result.state)
    leaves, facts = open_store(run, CHECKPOINTS).read(30)
    expected = {f"state/{path}": leaf for path, leaf in host_leaves(result.state).items() if "buffer/" not in path}
    assert facts["left_out"] == ["buffer"]
    assert not [path for path in leaves if "buffer" in path]
    for path, leaf in expected.items():
        np.testing.assert_array_equal(leaves[path], leaf)


def test_another_leaf_than_the_buffer_is_named_where_such_a_checkpoint_does_not_fit(bare: Any) -> None:
    like = state_shapes(small_dqn())
    other = like._replace(sums=like.sums._replace(count=jax.ShapeDtypeStruct((1,), np.uint32)))
    with pytest.raises(SettingsError, match=r"does not fit this program: sums/count has shape .*, expected \[1\]"):
        open_store(bare[0], CHECKPOINTS).check_newest(other)


def test_resuming_fills_the_buffer_with_what_the_agent_now_meets_and_says_so(bare: Any, tmp_path: Path) -> None:
    """Of 64 steps of warm-up the first 8 prime, so that 14 blocks of 4 and 30 of training were pushed."""
    runs = [tmp_path / name for name in ("a", "b")]
    results = []
    for run in runs:
        jaxrl.Trainer(small_dqn(), resume=bare[0], from_step=30, max_opts=40, run_dir=str(run), **RUN).train()
        results.append(jaxrl.load_policy(run, step=40).params)
    assert messages(runs[0], "resume")[0].startswith(
        "resumed at 30 optimisation steps with replay filled anew by 176 environment steps, which no counter counts"
    )
    jax.tree.map(np.testing.assert_array_equal, *results)
    whole = Store(runs[0] / "checkpoints", 1).read(40)[0]
    assert [path for path in whole if "buffer" in path], "these settings save it again"


@pytest.mark.every_day("compact")
@pytest.mark.parametrize("kind", ["compact", "plain", "prioritised"])
def test_a_buffer_filled_anew_holds_as_many_real_steps_as_the_old(kind: str) -> None:
    """A step of CartPole ends two steps of its physics later: positions follow from velocities, unless it fell."""
    made = jaxrl.prioritised if kind == "prioritised" else jaxrl.uniform
    strategy = jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(8,)),
        buffer=made(CAPACITY, batch_size=8, compact=kind == "compact"),
        processor=jaxrl.n_step(2),
        num_envs=ROWS,
        opt_interval=ROWS,
        warmup=64,
    )
    init, refill = jax.jit(strategy.init), strategy.state_fns.refill
    for t, held in ((10, 25 * ROWS), (90, CAPACITY)):
        blocks = refill.blocks(t)
        assert (len(blocks) * ROWS, blocks.stop) == (held, 15 + t)
        state = init(jax.random.key(0))._replace(buffer=())
        agent = state_digest(state.agent)
        filled = jit_refill(strategy)(state, np.uint32(blocks.start), np.uint32(blocks.stop))
        assert state_digest(filled.agent) == agent
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert shapes(filled) == shapes(state_shapes(strategy)[0])
        items = jax.device_get(filled.buffer.items)
        real = np.flatnonzero(np.abs(items.obs).sum(axis=1))
        assert len(real) == held
        going = [i for i in real if items.discount[i] > 0.9 and items.reward[i] > 1.5 and items.weight[i] > 0]
        moved = items.next_obs[going, 0] - items.obs[going, 0]
        assert len(going) > held // 2
        assert np.all(np.abs(moved - 0.04 * items.obs[going, 1]) < 0.02)


@pytest.mark.slow
def test_such_checkpoints_are_used_like_others_and_what_was_resumed_is_not_said_to_differ(
    bare: Any, tmp_path: Path, capsys: Any
) -> None:
    run, result = bare
    policy = jaxrl.load_policy(run, step=30)
    jax.tree.map(np.testing.assert_array_equal, policy.params, small_dqn().policy.params(result.state))
    assert verify.main([str(run), "--replay"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[:3]] == [["10", "ok"], ["20", "ok"], ["30", "ok"]]
    assert shown[5:] == ["0 -> 10 bit-equal", "10 -> 20 bit-equal", "20 -> 30 bit-equal"]
    assert train(tmp_path / "new", 10, init_from=str(run), save_replay=True).summary["opt_steps"] == 10
    train(tmp_path / "parts", 20)
    train(tmp_path / "parts", 30, resume=True)
    assert verify.main([str(tmp_path / "parts"), "--replay"]) == 0
    assert capsys.readouterr().out.splitlines()[5:] == ["0 -> 10 bit-equal", "10 -> 20 bit-equal"]


def test_steps_of_a_refill_are_in_no_statistics() -> None:
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step())
    agent, ring = jaxrl.dqn(features=(8,)), jaxrl.uniform(80, 8)
    strategy = jaxrl.off_policy(counting(), agent, buffer=ring, processor=processor, num_envs=4, opt_interval=4)
    state = jax.jit(strategy.init)(jax.random.key(0))
    before = jax.device_get(processor.get_stats(state.processor))
    filled = jit_refill(strategy)(state._replace(buffer=()), np.uint32(0), np.uint32(10))
    jax.tree.map(np.testing.assert_array_equal, processor.get_stats(filled.processor), before)


def test_a_run_that_diverges_goes_back_and_fills_its_buffer(tmp_path: Path) -> None:
    settings = {**RUN, "save_replay": False, "max_skips": 2, "record_interval": 10}
    trainer, spoilt = jaxrl.Trainer(small_dqn(), max_opts=40, run_dir=str(tmp_path / "run"), **settings), False
    for report in trainer:
        if report.opt_steps == 20 and not spoilt:
            agent, spoilt = trainer.state.agent, True
            nan = jax.tree.map(lambda x: x * np.float32("nan"), agent.params)
            trainer.state = trainer.state._replace(agent=agent._replace(params=nan))
    (said,) = messages(tmp_path / "run", "rollback")
    assert "went back to here with replay filled anew by" in said
    assert trainer.result().summary["opt_steps"] == 40


def test_members_of_a_population_are_gone_on_with(tmp_path: Path) -> None:
    members, run = jaxrl.population(small_dqn(), seeds=2), tmp_path / "all"
    train(run, 20, members)
    train(run, 30, members, resume=True)
    for number in range(2):
        (resumed,) = (row for row in rows_in(run, number) if row.get("event") == "resume")
        assert "replay filled anew by 136 environment steps" in resumed["message"]
        saved = open_store(member_dir(run, number), CHECKPOINTS).read(30)[0]
        assert not [path for path in saved if "buffer" in path]


@pytest.mark.slow
def test_actors_fill_the_buffer_by_the_policy_of_the_checkpoint(tmp_path: Path) -> None:
    """128 transitions in blocks of 16 are 8 rounds; a learner that goes on has pushed them before its next update."""
    strategy = jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(8,), epsilon_start=0.0),
        buffer=jaxrl.uniform(128, batch_size=8),
        num_envs=2,
        opt_interval=4,
        warmup=32,
        actors=jaxrl.ActorsConfig(actors=2, send=2, max_lag=0),
    )
    train(tmp_path / "run", 40, strategy, save_interval=20)
    result = train(tmp_path / "run", 44, strategy, resume=True)
    said = messages(tmp_path / "run", "resume")[0]
    assert "environments that start anew, and replay filled anew by 128 environment steps" in said
    held = jax.device_get(result.state.buffer.items)
    assert np.all(np.abs(held.obs).sum(axis=1) > 0)
    assert sum(actor["env_steps"] for actor in result.summary["actors"]) >= 128 + 16


def test_a_checkpoint_without_the_data_is_resumed_with_that_of_the_file(tmp_path: Path) -> None:
    jaxrl.save_dataset(tmp_path / "walk.npz", walk())
    data = jaxrl.load_dataset(tmp_path / "walk.npz")
    made = lambda data: jaxrl.offline(
        data, jaxrl.dqn(features=(8,)), batch_size=4, processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.n_step(2, 0.5))
    )
    whole = train(tmp_path / "whole", 20, made(data), save_replay=True)
    train(tmp_path / "run", 10, made(data))
    result = train(tmp_path / "run", 20, made(data), resume=True)
    assert state_digest(result.state) == state_digest(whole.state)
    assert not [path for path in open_store(tmp_path / "run", CHECKPOINTS).read(20)[0] if "buffer" in path]
    assert "environment" not in messages(tmp_path / "run", "resume")[0]
    # Arrays of one's own are not known by a checksum.
    with pytest.raises(SettingsError, match="save_replay is no, but dqn has no replay"):
        jaxrl.Trainer(made(walk()), save_replay=False)


def test_who_has_no_replay_is_refused() -> None:
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,)))
    with pytest.raises(SettingsError, match="save_replay is no, but ppo has no replay"):
        jaxrl.Trainer(strategy, save_replay=False)
    with pytest.raises(SettingsError, match="Session has no setting 'save_replay'"):
        jaxrl.Session(strategy.env.spec, jaxrl.dqn(), buffer=jaxrl.uniform(64, batch_size=8), save_replay=False)
