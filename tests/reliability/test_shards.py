"""A run in shards has the same bits on any number of devices, and goes on on any other; each test is a real process.

Processes compile as users have it: with the options of the other tests, XLA rounds a sum in two places in two ways.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from agents import COMBINATIONS, SPREAD
from shards_run import LARGE

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.xla import forms

HERE = Path(__file__).parent
TRAINED = [name for name in COMBINATIONS if "data" not in name]


def process(*args: object) -> list[list[str]]:
    """Run a script of these tests; return the words of each line that it prints."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1_800, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, LARGE])
def test_the_bits_do_not_depend_on_the_number_of_devices(name: str) -> None:
    devices = (1, 2, 4)
    told = process(HERE / "shards_run.py", "train", name, *devices)
    assert [int(number) for number, _ in told] == list(devices)
    assert len({digest for _, digest in told}) == 1


@pytest.mark.slow
def test_a_run_goes_on_on_any_number_of_devices(tmp_path: Path) -> None:
    """Saved on each of 1, 2 and 4 devices, and resumed on each: as one that was never stopped."""
    told = process(HERE / "shards_run.py", "resume", "rainbow, n-step, prioritised over all", tmp_path, 1, 2, 4)
    assert len(told) == 10
    assert len({digest for *_, digest in told}) == 1


@pytest.mark.slow
def test_a_member_on_any_mesh_is_that_member_alone(tmp_path: Path) -> None:
    """Also where it was saved on another mesh; members of a search are the same on any. Each is on its own devices."""
    (_, alone), *others = process(HERE / "shards_run.py", "mesh", tmp_path, "1x1", "2x1", "1x2", "2x2", "4x2")
    found = {(how, mesh): (digests, where) for how, mesh, digests, where in others}
    assert {digests for (how, _), (digests, _) in found.items() if how != "search"} == {alone}
    searched = [digests for (how, _), (digests, _) in found.items() if how == "search"]
    assert searched[0] == searched[1] != alone
    assert found["on", "1x1"][1] == "0,0,0,0"
    assert found["on", "2x1"][1] == found["resumed", "2x1"][1] == "0,1,0,1"
    assert found["on", "1x2"][1] == "0+1,0+1,0+1,0+1"
    assert found["on", "2x2"][1] == "0+1,2+3,0+1,2+3"
    assert found["on", "4x2"][1] == found["resumed", "4x2"][1] == found["search", "4x2"][1] == "0+1,2+3,4+5,6+7"


@pytest.mark.slow
def test_only_gradients_moments_and_metrics_are_gathered() -> None:
    """No ring, no rollout and no environment leaves its device; the program needs no room for another ring."""
    ((gathered, parameters, ring, room),) = process(HERE / "shards_run.py", "program")
    assert int(gathered) <= int(parameters) + 4_096  # bytes that one shard gives in one update
    assert int(room) < int(ring)


@pytest.mark.every_day("ppo-cuda", "td3 whose noise remembers-tpu")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", TRAINED)
def test_the_program_of_any_platform_can_be_made(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forms that programs have there, shards meet where they can, and have the same in common."""
    monkeypatch.setitem(SPREAD, "num_envs", 4)
    monkeypatch.setitem(SPREAD, "shards", 2)
    with forms(platform):
        strategy = COMBINATIONS[name].__wrapped__()  # that of other tests is in one piece
        state, key = _shapes(strategy)
        new, _ = jax.eval_shape(strategy.step, state, key, np.uint32(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def dqn(agent: dict[str, object] | None = None, **settings: object) -> jaxrl.Strategy:
    buffer = jaxrl.uniform(64, batch_size=8)
    how = {"num_envs": 8, "opt_interval": 8, "warmup": 16, **settings}
    made = jaxrl.dqn(features=(4,), **(agent or {}))  # type: ignore[arg-type]
    return jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), made, buffer=buffer, **how)  # type: ignore[arg-type]


def ppo(minibatches: int, core: str = "none") -> jaxrl.Strategy:
    """Make rollouts of 128 steps in 4 environments, in two shards."""
    agent, sizes = jaxrl.ppo(core=core), {"num_envs": 4, "rollout": 32, "minibatches": minibatches, "shards": 2}
    return jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), agent, **sizes)


def members(mesh: object = None, layout: str = "spread", **settings: object) -> jaxrl.PopulationTrainer:
    return jaxrl.Trainer(jaxrl.population(dqn(**settings), seeds=2, layout=layout), mesh=mesh)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dqn(shards=3), "num_envs 8 does not divide into 3 shards; set it to 6 or 9"),
        (lambda: dqn(shards=16, num_envs=16, opt_interval=16), "batch_size 8 does not divide into 16 shards; set it"),
        (lambda: dqn(shards=0), "shards"),
        (
            lambda: ppo(minibatches=3),
            "minibatches 3 does not divide the 128 steps of a rollout among 2 shards; the nearest that does is 2 or 4",
        ),
        (
            lambda: ppo(minibatches=4, core="gru"),
            "minibatches 4 does not divide the 4 environments of a rollout among 2",
        ),
        (
            lambda: dqn({"core": "gru"}, shards=2),
            "buffer.capacity is 64, too few for a sequence of .* steps of each of 8 environments",
        ),
        (
            lambda: jaxrl.Trainer(dqn({"accumulate": 3}, shards=2), max_opts=1, quiet=True).train(),
            "agent.accumulate is 3 and does not divide the batch size 8 among 2 shards",
        ),
        (lambda: dqn(shards=2, actors=jaxrl.ActorsConfig(actors=1)), "shards divide environments written in JAX"),
        (lambda: jaxrl.Trainer(dqn(shards=8), devices=8), "devices is 8, but JAX has 1 here; set devices to 1"),
        (lambda: jaxrl.Trainer(dqn(), devices=0), "devices"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="env=2"), "mesh has no axis 'env'; .*envs"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="2x2"), "is '2x2'; expected lengths of its axes, as in members=4"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="envs=1,envs=2"), "which names envs twice"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh={"envs": 0}), "mesh envs is 0; expected a whole number of at least"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="members=2"), "a single run has no members to divide devices among"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="envs=2"), "has 2 devices, but JAX has 1 .*; set mesh to members=1"),
        (lambda: jaxrl.Trainer(dqn(shards=2), mesh="envs=2", devices=4), "devices is 4; set mesh to members=1,envs=4"),
        (lambda: jaxrl.Trainer(dqn(shards=4), mesh="envs=3"), "set shards to a multiple of 3, or mesh envs to 2 or 4"),
        (lambda: members(shards=4, mesh="envs=3"), "mesh envs is 3, but the 4 shards"),
        (lambda: members(shards=4, mesh="members=2,envs=2"), "JAX has 1 here; set mesh to members=1,envs=1, or before"),
        (lambda: members(shards=4, layout="together"), "layout together trains members in one program on one device"),
        (
            lambda: members(layout="together", mesh="envs=2"),
            "members that train together have one for all",
        ),
    ],
)
def test_what_does_not_divide_or_is_not_there_is_refused(make: object, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make()  # type: ignore[operator]


def test_what_an_agent_forgets_to_add_is_named() -> None:
    """An update of one's own that each shard makes for itself would train as many agents as there are shards."""

    def alone(spec: jaxrl.EnvSpec) -> jaxrl.agents.Agent:
        agent = jaxrl.dqn(features=(4,))(spec)

        def update(state, batch, key, opt_step):  # type: ignore[no-untyped-def]
            new, metrics, priorities = agent.update(state, batch, key, opt_step)
            lr = new.hyper.lr + batch.items.reward.mean()
            return new._replace(hyper=new.hyper._replace(lr=lr)), metrics, priorities

        return agent._replace(update=update)

    env, buffer = jaxrl.make_env("CartPole-v1"), jaxrl.uniform(64, batch_size=8)
    strategy = jaxrl.off_policy(env, alone, buffer=buffer, num_envs=8, opt_interval=8, shards=2)
    with pytest.raises(SettingsError, match=r"state agent.* would differ between shards"):
        jax.eval_shape(strategy.step, *_shapes(strategy), np.uint32(0))


def _shapes(strategy: jaxrl.Strategy) -> tuple[object, object]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(strategy.init, key), key


def test_shards_see_the_moments_of_all_environments() -> None:
    """Eight environments in two shards are normalised as eight in one: the first steps of CartPole, by NumPy."""
    strategy = jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.ppo(features=(4,)),
        processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
        num_envs=8,
        rollout=1,
        epochs=1,
        minibatches=1,
        shards=2,
    )
    first = jax.jit(strategy.init)(jax.random.key(0))
    state, metrics = jax.jit(strategy.step)(first, jax.random.fold_in(first.key, 0), np.uint32(0))
    (moments,) = (x for x in jax.tree.leaves(state.processor, is_leaf=_is_moments) if _is_moments(x))
    carts = [(x.env.env.x, x.env.env.x_dot, x.env.env.theta, x.env.env.theta_dot) for x in (first, state)]
    seen = np.asarray(carts).swapaxes(0, 1).reshape(4, 16).T
    assert moments.count.tolist() == [16.0, 16.0]
    np.testing.assert_allclose(moments.mean[0], seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.squares[1], np.square(seen - seen.mean(0)).sum(0), rtol=1e-4)
    assert np.unique(seen, axis=0).shape == (16, 4)  # no two shards see the same
    assert float(metrics["largest_reward"]) == 1


def _is_moments(x: object) -> bool:
    return isinstance(x, jaxrl.processors.normalise.Moments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_in_shards(seed: int) -> None:
    """PPO on CartPole-v1 in four shards, with everything else as it is by default."""
    strategy = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), num_envs=8, shards=4)
    result = jaxrl.Trainer(strategy, max_opts=1_600, seed=seed, eval_interval=400, quiet=True).train()
    assert result.best_score > 475
