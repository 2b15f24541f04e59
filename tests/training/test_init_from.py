"""Runs that begin with the networks of another: what is taken, what is not, and what is refused."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl
from jaxrl import train
from jaxrl.errors import JaxrlError

SETTINGS: dict[str, Any] = {"max_opts": 20, "eval_interval": 0, "eval_episodes": 0, "save_interval": 10, "quiet": True}


@cache
def strategy(maker: Any = jaxrl.dqn, normalise: bool = False, shards: int = 1, **settings: Any) -> jaxrl.Strategy:
    last = jaxrl.one_step()
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        maker(features=(8,), **settings),
        buffer=jaxrl.uniform(200, batch_size=8),
        processor=jaxrl.chain(jaxrl.normalise_obs(), last) if normalise else last,
        num_envs=2,
        opt_interval=2,
        warmup=20,
        shards=shards,
    )


def begun(made: jaxrl.Strategy, **settings: Any) -> Any:
    """Return the state that a run begins with."""
    found: list[Any] = []
    copy = lambda trainer: found.append(jax.tree.map(np.array, trainer.state._replace(key=())))
    jaxrl.Trainer(made, hooks=jaxrl.Hooks(start=copy), **{**SETTINGS, **settings}).train()
    return found[0]


def saved(run: Path, **settings: Any) -> Any:
    """Train in `run`; return the state at the end."""
    # The same settings give the same strategy, which is compiled once.
    return jaxrl.Trainer(strategy(**settings), run_dir=str(run), **SETTINGS).train().state


def equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a run, and its state at the end."""
    run = tmp_path_factory.mktemp("runs") / "old"
    return run, saved(run)


def test_networks_are_taken_and_nothing_else(old_run: tuple[Path, Any]) -> None:
    (run, old), plain = old_run, begun(strategy(lr=0.5))
    new = begun(strategy(lr=0.5), init_from=str(run))
    assert equal((new.agent.params, new.agent.target), (old.agent.params, old.agent.target))
    assert not equal(new.agent.params, plain.agent.params)
    rest = lambda state: state._replace(agent=state.agent._replace(params=(), target=()))
    assert equal(rest(new), rest(plain))
    assert float(new.agent.hyper.lr) == 0.5
    earlier = begun(strategy(), init_from=str(run / "checkpoints" / "10"))
    assert not equal(earlier.agent.params, new.agent.params)


@pytest.mark.slow
def test_statistics_of_observations_go_with_the_networks(tmp_path: Path) -> None:
    old = saved(tmp_path / "old", normalise=True)
    new = begun(strategy(normalise=True), init_from=str(tmp_path / "old"))
    moments = lambda state: jax.tree.leaves(state.processor[0].moments)
    assert equal(moments(new), moments(old))
    two = moments(begun(strategy(normalise=True, shards=2), init_from=str(tmp_path / "old")))
    assert all(equal(moment[i], x) for moment, x in zip(two, moments(old), strict=True) for i in range(2))
    wanted = moments(saved(tmp_path / "two", normalise=True, shards=2))
    one = moments(begun(strategy(normalise=True), init_from=str(tmp_path / "two")))
    assert equal(one, [x[0] for x in wanted])


@pytest.mark.slow
def test_what_was_learnt_from_data_goes_on_online(tmp_path: Path) -> None:
    env = jaxrl.make_env("CartPole-v1")
    online = strategy()
    data = jaxrl.gather(env, online.policy, online.policy.params(online.init(jax.random.key(0))), jax.random.key(1), 60)
    offline = jaxrl.offline(data, jaxrl.cql_dqn(features=(8,)), batch_size=8, env=env)
    old = jaxrl.Trainer(offline, run_dir=str(tmp_path / "old"), **SETTINGS).train().state
    assert equal(begun(online, init_from=str(tmp_path / "old")).agent.params, old.agent.params)


def test_a_run_that_goes_on_needs_the_other_no_more(tmp_path: Path) -> None:
    saved(tmp_path / "old")
    settings = {**SETTINGS, "init_from": str(tmp_path / "old")}
    whole = jaxrl.Trainer(strategy(), **settings).train().state
    jaxrl.Trainer(strategy(), run_dir=str(tmp_path / "new"), **{**settings, "max_opts": 10}).train()
    shutil.rmtree(tmp_path / "old")
    resumed = jaxrl.Trainer(strategy(), resume=str(tmp_path / "new"), **settings).train().state
    assert equal(resumed._replace(key=()), whole._replace(key=()))
    events = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert events.count(f"begins with the networks of {tmp_path / 'old'} after 20 optimisation steps") == 1


@pytest.mark.parametrize(
    ("settings", "place", "told"),
    [
        ({}, "nowhere", "nowhere is no run directory"),
        ({}, "old/checkpoints/15", "keeps no checkpoint of step 15; kept are 10, 20"),
        (
            {"dueling": True},
            "old",
            r"init_from: this run has agent/params/params/Dense_1/bias, but .*old has not; begin",
        ),
        ({"normalise": True}, "old", r"init_from: this run has processor.*moments.*, but .*old has not"),
        ({"maker": jaxrl.rainbow}, "old", "init_from: .*; begin with a run of the same agent"),
    ],
    ids=["no run", "no checkpoint", "another network", "normalised", "another agent"],
)
def test_what_cannot_be_is_refused(
    old_run: tuple[Path, Any], tmp_path: Path, settings: dict[str, Any], place: str, told: str
) -> None:
    trainer = jaxrl.Trainer(
        strategy(**settings), init_from=str(old_run[0].parent / place), run_dir=str(tmp_path / "new"), **SETTINGS
    )
    with pytest.raises(JaxrlError, match=told):
        trainer.train()
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_command_line_takes_it(tmp_path: Path) -> None:
    small = ["--max-opts", "20", "--eval-interval", "0", "--eval-episodes", "0", "--quiet", "--agent.features", "8"]
    small += ["--warmup", "64", "--agent.lr-decay", "0", "--agent.epsilon-decay", "0"]
    train.main(["dqn", "--run-dir", str(tmp_path / "old"), *small])
    train.main(["dqn", "--run-dir", str(tmp_path / "new"), "--init-from", str(tmp_path / "old"), *small])
    assert "begins with the networks of" in (tmp_path / "new" / "metrics.jsonl").read_text()
    with pytest.raises(JaxrlError, match="nowhere is no run directory"):
        train.main(["dqn", "--run-dir", str(tmp_path / "other"), "--init-from", "nowhere", *small])
