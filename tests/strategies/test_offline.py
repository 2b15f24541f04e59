"""Offline training: transitions made of data as worked by hand, closed-form answers, and what is refused."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_data import bandit, walk
from toys_steps import trained

import jaxrl
from jaxrl.agents import Agent, AgentInfo
from jaxrl.buffers.dataset import split_holdout, summarise
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete
from jaxrl.strategies.offline import action_distance, fit_processor, make_transitions

TABLE = {"features": (), "lr": 0.05}
"""One observation and linear networks: a table."""


# --- from steps to transitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_returns_and_discounts_never_cross_an_end_and_are_cut_only_where_an_episode_terminated(n: int) -> None:
    data, gamma = walk(), 0.5
    made = make_transitions(jaxrl.n_step(n, gamma), data)
    for row in range(data.rows):
        stop = next(i for i in range(row, data.rows) if data.terminated[i] or data.truncated[i])
        last = min(row + n - 1, stop)
        reward = sum(gamma**k * data.reward[row + k] for k in range(last - row + 1))
        discount = 0.0 if data.terminated[last] else gamma ** (last - row + 1)
        assert (made.reward[row], made.discount[row]) == (np.float32(reward), np.float32(discount))
        assert (made.obs[row], made.next_obs[row]) == (data.obs[row], data.next_obs[last])
        assert (made.action[row], made.weight[row]) == (data.action[row], 1)


@pytest.mark.parametrize("n", [1, 3])
def test_next_actions_are_what_the_data_did_after_each_transition_unless_the_episode_ends_with_it(n: int) -> None:
    data = walk()
    data = data._replace(action=np.arange(data.rows, dtype=np.int32))
    after = make_transitions(jaxrl.n_step(n), data, next_actions=True).extras
    for row in range(data.rows):
        stop = next(i for i in range(row, data.rows) if data.terminated[i] or data.truncated[i])
        assert after.known[row] == (row + n <= stop)
        assert not after.known[row] or after.action[row] == row + n


def test_observations_are_normalised_by_the_mean_and_deviation_of_all_of_them() -> None:
    data = walk()
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step())
    learnt = processor.get_stats(fit_processor(processor, data))
    made = make_transitions(processor.freeze(learnt), data)
    mean, deviation = data.obs.mean(), data.obs.std()
    np.testing.assert_allclose(made.obs, (data.obs - mean) / deviation, atol=1e-5)
    np.testing.assert_allclose(made.next_obs, (data.next_obs - mean) / deviation, atol=1e-5)


def test_stacked_frames_begin_anew_with_each_episode() -> None:
    made = make_transitions(jaxrl.chain(jaxrl.frame_stack(2), jaxrl.one_step()), walk())
    np.testing.assert_array_equal(made.obs[3:6], [[2, 3], [0, 0], [0, 1]])
    np.testing.assert_array_equal(made.next_obs[3:5], [[3, 4], [0, 1]])


# --- closed forms -------------------------------------------------------------------------------------------------
# Of those that are slow, one update is worked by hand every day: below, or in `tests/agents/test_offline_agents.py`.

ACTIONS = np.repeat([0, 1, 2], [60, 30, 10])
FREQUENCY = np.array([0.6, 0.3, 0.1])
REWARD = np.array([0.0, 1.0, 2.0])
PAID = bandit(ACTIONS, REWARD[ACTIONS])


def shares_of(state: Any, agent: Any) -> np.ndarray:
    """Return the shares of actions drawn by the policy."""
    many, act = np.ones((20_000, 1), np.float32), jax.jit(agent(PAID.spec).act, static_argnums=4)
    action, _ = act(state.agent, many, jax.random.key(1), jnp.uint32(0), "explore")
    return np.bincount(np.asarray(action), minlength=3) / 20_000


def test_cloning_of_continuous_actions_comes_to_their_mean_and_deviation() -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.4, 400).clip(-2, 4)
    space = Box(-2.0, 4.0, (1,))
    agent = jaxrl.bc(features=(), lr=0.02, lr_decay=1500)
    data = bandit(drawn, drawn, space)
    state = trained(jaxrl.offline(data, agent, batch_size=64), 1500)
    bound = agent(data.spec)
    act = jax.jit(bound.act, static_argnums=4)
    greedy, _ = act(state.agent, data.obs[:1], None, jnp.uint32(0), "exploit")
    many, _ = act(state.agent, np.ones((5_000, 1), np.float32), jax.random.key(1), jnp.uint32(0), "explore")
    np.testing.assert_allclose(np.asarray(greedy)[0, 0], drawn.mean(), atol=0.05)
    np.testing.assert_allclose(np.std(many), drawn.std(), atol=0.03)


def expectile_by_hand(values: np.ndarray, weights: np.ndarray, expectile: float) -> float:
    """Return where the weighted pull of what is above equals that of what is below."""
    low, high = values.min(), values.max()
    for _ in range(60):
        middle = (low + high) / 2
        pull = (weights * np.where(values > middle, expectile, 1 - expectile) * (values - middle)).sum()
        low, high = (middle, high) if pull > 0 else (low, middle)
    return low


def test_the_value_of_iql_is_the_expectile_of_what_was_done_and_its_policy_weighs_by_the_advantage() -> None:
    expectile = 0.9
    agent = jaxrl.iql(**TABLE, policy_lr=0.02, lr_decay=2000, tau=0.05, expectile=expectile, beta=1.0)
    state = trained(jaxrl.offline(PAID, agent, batch_size=64), 2000)
    layer = jax.tree.map(np.asarray, state.agent.value["params"]["Dense_0"])
    value = float((layer["kernel"] + layer["bias"][None])[0, 0])
    np.testing.assert_allclose(value, expectile_by_hand(REWARD, FREQUENCY, expectile), atol=0.05)
    # The weights are exp(q - v), of which v falls out.
    wanted = FREQUENCY * np.exp(REWARD)
    np.testing.assert_allclose(shares_of(state, agent), wanted / wanted.sum(), atol=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("make", [jaxrl.iql, jaxrl.awac], ids=["iql", "awac"])
def test_what_was_cut_is_worth_what_follows_and_what_terminated_is_not(make: Any) -> None:
    """Paid 1 for ever at a discount of 0.5: 2 where it was only cut, and 1 where it ends at once."""
    cut, ended = (bandit(np.zeros(20), np.ones(20), Discrete(1), terminated) for terminated in (False, True))
    where = [np.concatenate([x, y]) for x, y in zip(cut[1:-1], ended[1:-1], strict=True)]
    data = jaxrl.Dataset(cut.spec, *where)
    sign = np.where(data.terminated, -1, 1).astype(np.float32)[:, None]
    data = data._replace(obs=data.obs * sign, next_obs=data.next_obs * sign)
    agent = make(features=(), lr=0.05, lr_decay=800, tau=0.1)
    state = trained(jaxrl.offline(data, agent, batch_size=8, processor=jaxrl.one_step(0.5)), 800)
    (layer,) = state.agent.critic["params"].values()
    kernel, bias = np.asarray(layer["kernel"]), np.asarray(layer["bias"])
    q = bias[:, 0, None] + kernel[:, 0] * np.array([[1.0, -1.0]])
    np.testing.assert_allclose(q, [[2.0, 1.0]] * 2, atol=0.03)


class Table(nn.Module):
    """A critic that goes by the observation alone: a value for each of its entries."""

    @nn.compact
    def __call__(self, obs: Any, action: Any) -> Any:
        return nn.Dense(1, use_bias=False)(obs)[:, 0]


@pytest.mark.slow
def test_the_distance_from_the_next_action_is_taken_off_the_value_there_unless_an_episode_ends() -> None:
    """Paid 1 a step, at a discount of 0.5: 2 where it was cut, 1 where it ended, and before them less."""
    obs, next_obs = np.eye(4, dtype=np.float32)[[0, 1, 2, 3]], np.eye(4, dtype=np.float32)[[1, 1, 3, 3]]
    action = np.array([[0.0], [0.8], [0.0], [0.6]], np.float32)
    rows = np.arange(4)
    spec = jaxrl.EnvSpec("Pairs", Box(0.0, 1.0, (4,)), Box(-1.0, 1.0, (1,)))
    data = jaxrl.Dataset(spec, obs, action, np.ones(4, np.float32), next_obs, rows == 3, rows == 1)
    agent = jaxrl.rebrac(
        features=(), make_critic=lambda spec: Table(), lr=0.05, lr_decay=800, policy_lr=0.0, tau=0.1, policy_interval=1,
        target_noise=0.0, critic_bc_coef=0.75,
    )  # fmt: skip
    state = trained(jaxrl.offline(data, agent, batch_size=4, processor=jaxrl.one_step(0.5)), 800)
    greedy, _ = jax.jit(lambda state: agent(spec).act(state, next_obs, None, jnp.uint32(0), "exploit"))(state.agent)
    cut, ended = 0.75 * np.square(np.asarray(greedy)[[0, 2], 0] - [0.8, 0.6])
    wanted = [1 + 0.5 * (2 - cut), 2, 1 + 0.5 * (1 - ended), 1]
    (layer,) = state.agent.critic["params"].values()
    np.testing.assert_allclose(np.asarray(layer["kernel"])[:, :, 0], [wanted] * 2, atol=0.02)
    assert min(cut, ended) > 0.1


# --- judging, settings and refusals -------------------------------------------------------------------------------


def test_without_an_environment_the_policy_is_judged_by_its_distance_from_episodes_held_out() -> None:
    data = walk(lengths=(4, 3, 5, 2), terminated=(True,) * 4)
    strategy = jaxrl.offline(data, jaxrl.bc(features=()), batch_size=4, holdout=0.5, updates=3)
    result = jaxrl.Trainer(strategy, max_opts=6, eval_interval=3, quiet=True).train()
    assert -1 <= result.best_score <= 0
    assert (result.summary["opt_steps"], result.summary["env_steps"]) == (6, 0)
    params = strategy.policy.params(result.state)
    returns, lengths, finished = strategy.evaluation.evaluate(params, jax.random.key(0))
    held = data.where(np.isin(data.episode, [1, 3]))
    act = jax.jit(lambda params, obs: strategy.policy.act(params, strategy.policy.begin(params, obs))[1])
    action = np.concatenate([act(params, obs[None]) for obs in held.obs])
    wrong = (action != held.action).astype(float)
    np.testing.assert_allclose(returns, [-wrong[:3].mean(), -wrong[3:].mean()], atol=1e-6)
    assert (list(lengths), list(finished)) == ([3, 2], [True, True])
    np.testing.assert_array_equal(result.state.buffer.items.reward, data.reward[np.isin(data.episode, [0, 2])])


def test_distances_are_of_actions_brought_to_their_bounds() -> None:
    box = Box(-2.0, 2.0, (2,))
    a, b = jnp.array([[2.0, 0.0], [0.0, 0.0]]), jnp.array([[-2.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(action_distance(box, a, b), [(4 + 0.25) / 2, 0.0])
    np.testing.assert_allclose(action_distance(Discrete(3), jnp.array([0, 2]), jnp.array([0, 1])), [0, 1])


def test_held_out_episodes_are_spread_over_the_set() -> None:
    train, held = split_holdout(walk(lengths=(2,) * 10, terminated=(True,) * 10), 0.2)
    assert held is not None
    np.testing.assert_array_equal(np.unique(held.reward // 10), [4, 9])
    assert (train.rows, held.rows) == (16, 4)
    assert split_holdout(walk(), 0.0)[1] is None


def test_a_summary_tells_returns_lengths_and_ends() -> None:
    summary = summarise(walk())
    np.testing.assert_array_equal(summary.returns, [0 + 1 + 2 + 3, 30 + 3, 100 + 10])
    assert "12 transitions in 3 episodes (2 terminated), return 49.6667 (min 6" in str(summary)
    assert "length 4 (3 to 5)" in str(summary)


CARTPOLE = jaxrl.make_env("CartPole-v1")
SWINGS = bandit([0.0, 0.5], [0, 0], Box(-1.0, 1.0, (1,)))
RUNNING = jaxrl.chain(jaxrl.normalise_reward(), jaxrl.one_step())
learning = partial(jaxrl.offline, batch_size=2)
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "another environment": (lambda: learning(walk(), jaxrl.bc(), env=CARTPOLE), ["Walk", "CartPole-v1"]),
    "other spaces": (
        lambda: learning(bandit([0, 1], [0, 0], name="CartPole-v1"), jaxrl.bc(), env=CARTPOLE),
        ["observation space", "env_args"],
    ),
    "less than a batch": (lambda: jaxrl.offline(walk(), jaxrl.bc()), ["batch_size is 256", "12 transitions"]),
    "nothing to spare": (lambda: learning(walk(), jaxrl.bc(), holdout=0.1), ["holdout", "3 episodes"]),
    "all held out": (lambda: learning(walk(), jaxrl.bc(), holdout=1.0), ["holdout", "from 0 to 0.9"]),
    "on-policy": (lambda: learning(walk(), jaxrl.ppo()), ["ppo", "iql"]),
    "running rewards": (
        lambda: learning(walk(), jaxrl.bc(), processor=RUNNING),
        ["normalise_reward", "reward_scale", "scale_rewards_by"],
    ),
    "an unknown scale": (
        lambda: learning(walk(), jaxrl.bc(), scale_rewards_by="max"),
        ["'max'", "none, range or std"],
    ),
    "no transitions": (lambda: learning(walk(), jaxrl.bc(), processor=jaxrl.frame_stack(2)), ["one_step"]),
    "remembered noise": (lambda: learning(SWINGS, jaxrl.td3_bc(noise_memory=0.5)), ["noise_memory to 0"]),
    "a scale of noise that is remembered": (
        lambda: learning(SWINGS, jaxrl.td3_bc(noise_min=0.05)),
        ["set agent.noise_min to 0"],
    ),
    "discrete actions": (lambda: learning(walk(), jaxrl.td3_bc()), ["td3_bc takes continuous"]),
    "environment steps": (
        lambda: jaxrl.Trainer(learning(walk(), jaxrl.bc()), max_env_steps=5),
        ["max_env_steps is 5", "max_opts"],
    ),
    "nothing to judge by": (
        lambda: jaxrl.Trainer(learning(walk(), jaxrl.bc()), eval_interval=1, eval_episodes=1),
        ["no env"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_learnt_from_is_refused_in_one_line(case: str) -> None:
    make, parts = REFUSED[case]
    with pytest.raises(SettingsError) as refused:
        make()
    assert [part for part in parts if part not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


BY_HAND: dict[str, tuple[dict[str, Any], str]] = {
    "an action that is none": ({"action": np.full(walk().rows, 2, np.int32)}, "action of step 0 is outside Discrete"),
    "one number too few": ({"reward": walk().reward[1:]}, "obs has shape"),
    "no number": ({"reward": walk().reward * np.nan}, "reward of step 0 is not finite"),
    "other observations": ({"obs": walk().obs[::-1]}, "obs of step 1 is not next_obs of step 0"),
    "no end": (
        dict.fromkeys(("terminated", "truncated"), np.zeros(walk().rows, bool)),
        "has no end of an episode",
    ),
    "no spec": ({"spec": "Walk"}, "spec is str; expected an EnvSpec"),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_data_made_by_hand_are_checked_like_those_of_a_file(case: str) -> None:
    change, said = BY_HAND[case]
    with pytest.raises(SettingsError, match=f"^data.*{said}"):
        jaxrl.offline(walk()._replace(**change), jaxrl.bc(), batch_size=4)


def test_any_agent_that_learns_from_replay_learns_from_data() -> None:
    strategy = jaxrl.offline(walk(), jaxrl.dqn(features=(4,), cql=1.0), batch_size=4)
    assert strategy.info.settings["custom"] == ["training", "data"]


# --- what an update sees --------------------------------------------------------------------------------------------


def counting(data: jaxrl.Dataset) -> Any:
    """Return an agent whose state is how often it learnt from each of the data, told apart by their rewards."""
    kinds = jnp.asarray(np.unique(data.reward))

    def update(state: Any, batch: Any, key: Any, opt_step: Any) -> Any:
        seen = batch.items.reward[:, None] == kinds[None]
        return state + seen.sum(axis=0), {"rows": jaxrl.total(jnp.ones(len(seen), bool))}, batch.weight

    return lambda spec: Agent(
        name="counting",
        init=lambda key: jnp.zeros(len(kinds), jnp.int32),
        act=lambda state, obs, key, opt_step, mode: (jnp.zeros(obs.shape[0], jnp.int32), ()),
        update=update,
        strip=lambda state: state,
        info=AgentInfo(offline=True),
    )


DATA = walk((4, 3, 5, 2, 6), (True, False) * 2 + (True,))  # 20 steps


@pytest.mark.every_day("6-5-4")
@pytest.mark.parametrize(("batch", "updates", "opts"), [(6, 5, 4), (20, 1, 3)])
def test_without_replacement_each_step_is_learnt_from_once_in_each_epoch(batch: int, updates: int, opts: int) -> None:
    strategy = jaxrl.offline(DATA, counting(DATA), batch_size=batch, updates=updates, replacement=False)
    epochs, rest = divmod(opts * updates * batch, DATA.rows)
    assert rest == 0
    state = trained(strategy, opts)
    assert state.agent.tolist() == [epochs] * DATA.rows
    # The buffer holds each once, and nothing changes it.
    np.testing.assert_array_equal(state.buffer.items.reward, DATA.reward)
    assert (strategy.env_steps_per_step, strategy.opt_steps_per_step, strategy.warmup_env_steps) == (0, updates, 0)


@pytest.mark.slow
def test_the_order_of_an_epoch_is_of_the_seed_and_the_epoch() -> None:
    strategy = jaxrl.offline(DATA, counting(DATA), batch_size=5, replacement=False)

    def order(seed: int, epoch: int) -> list[float]:
        """Return how often each of the data was learnt from after each of the four updates of an epoch."""
        state = strategy.init(jax.random.key(seed))
        for i in range(4):
            t = jnp.uint32(4 * epoch + i)
            state, _ = strategy.step(state, jax.random.fold_in(state.key, t), t)
        return state.agent.tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_rows_tell_the_epochs_passed_and_a_note_how_long_one_is() -> None:
    strategy = jaxrl.offline(DATA, counting(DATA), batch_size=8, updates=5, replacement=False)
    step = jax.jit(lambda key: strategy.step(strategy.init(key), key, jnp.uint32(2)))
    _, metrics = step(jax.random.key(0))
    assert float(metrics["epochs"]) == 15 * 8 / 20
    assert "each of 20 transitions is learnt from once, is 2.5 updates" in strategy.info.notes[-1]


def test_a_batch_of_all_data_has_each_step_once_in_every_update() -> None:
    strategy = jaxrl.offline(DATA, counting(DATA), batch_size=0, updates=2)
    assert trained(strategy, 3).agent.tolist() == [6] * DATA.rows
    assert strategy.info.settings["batch_size"] == 0


def test_one_update_from_all_data_is_the_gradient_of_their_mean() -> None:
    """A table of one observation: the slope of the mean log-likelihood is the shares less the probabilities."""
    data = bandit([0, 0, 0, 1, 1, 2], [0.0] * 6)
    strategy = jaxrl.offline(data, jaxrl.bc(features=(), optimizer="sgd", lr=0.5), batch_size=0)
    states = (trained(strategy, steps).agent.policy["params"] for steps in (0, 1))
    before, after = (jax.tree.map(np.asarray, params) for params in states)
    (bias,) = [leaf for leaf in jax.tree.leaves(jax.tree.map(lambda a, b: a - b, after, before)) if leaf.ndim == 1]
    logits = [x.sum(axis=0) if x.ndim == 2 else x for x in jax.tree.leaves(before)]
    odds = np.asarray(jax.nn.softmax(sum(logits)))
    np.testing.assert_allclose(bias, 0.5 * (np.array([3, 2, 1]) / 6 - odds), rtol=1e-4)


@pytest.mark.parametrize("by", ["range", "std"])
def test_rewards_are_scaled_by_the_returns_of_the_episodes(by: str) -> None:
    """Returns: 0+1+2+3, 10+11+12, 20+..+24, 30+31 and 40+41+42."""
    data = walk((4, 3, 5, 2, 3), (True,) * 5)
    returns = [6, 33, 110, 61, 123]
    spread = (max(returns) - min(returns)) / 1000 if by == "range" else float(np.std(returns))
    strategy = jaxrl.offline(data, counting(data), batch_size=4, scale_rewards_by=by)
    state = jax.jit(strategy.init)(jax.random.key(0))
    np.testing.assert_allclose(state.buffer.items.reward, data.reward / spread, rtol=1e-6)
    np.testing.assert_allclose(state.reward_factor, 1 / spread, rtol=1e-6)
    assert f"multiplied by {1 / spread:.6g}, by the {by} of the returns" in strategy.info.notes[-1]
    alike = bandit([0, 1], [2.0, 2.0])
    with pytest.raises(SettingsError, match="all episodes of the data have the return 2; set it to none"):
        jaxrl.offline(alike, jaxrl.bc(), batch_size=2, scale_rewards_by=by)


def test_only_what_is_learnt_from_decides_how_rewards_are_scaled() -> None:
    data = walk((4, 3, 5, 2), (True,) * 4)
    strategy = jaxrl.offline(data, counting(data), batch_size=4, scale_rewards_by="range", holdout=0.25)
    state = jax.jit(strategy.init)(jax.random.key(0))
    np.testing.assert_allclose(state.reward_factor, 1000 / (110 - 6), rtol=1e-6)
    assert f"multiplied by {1000 / (110 - 6):.6g}, by the range of the returns" in strategy.info.notes[-1]
