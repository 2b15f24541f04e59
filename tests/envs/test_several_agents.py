"""Several agents in one environment: rows worked by hand, and the dead, who leave no trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_envs import rollout
from toys_several import LIVES, RETURNS, hidden_target, squad

import jaxrl
from jaxrl.envs import vectorise
from jaxrl.envs.wrappers import apply_wrappers, transform_obs, transform_reward
from jaxrl.errors import SettingsError
from jaxrl.nn import QNetwork
from jaxrl.strategies.base import iterate
from jaxrl.strategies.interaction import episode_metrics, step_info
from jaxrl.training.data.collect import gather
from jaxrl.training.evaluator import Evaluator
from jaxrl.training.film import player

TINY: dict[str, Any] = {"eval_interval": 0, "eval_episodes": 0, "record_interval": 4, "recorders": []}


def rows(env: jaxrl.Env, steps: int, games: int = 1) -> jaxrl.Step:
    """Return `steps` steps of `games` games, `[T, N]`."""
    num_envs = games * (env.agents or 1)
    return rollout(vectorise(env, num_envs), np.zeros((steps, num_envs), np.int32))[1]


def test_each_agent_is_a_row_whose_episode_ends_with_it() -> None:
    """The game takes four steps, as the longest life; the first agent dies in the second, the last in the third."""
    seen = rows(squad(poison=-7.0), steps=5)
    assert seen.reward.tolist() == [[1, 2, 3], [2, 4, 6], [0, 6, 9], [0, 8, 0], [1, 2, 3]]
    assert seen.terminated.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert seen.truncated.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert seen.present.tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 0], [1, 1, 1]]
    assert seen.valid.tolist() == seen.present.tolist()
    assert seen.info["episode_return"].tolist()[3] == list(RETURNS)
    assert seen.info["episode_length"].tolist()[3] == list(LIVES)
    assert seen.final_obs[3].tolist() == [[-7, -7], [4, 1], [-7, -7]]
    assert seen.obs[3].tolist() == [[0, 0], [0, 1], [0, 2]]  # the next game
    assert seen.obs_valid[1].tolist() == [0, 1, 1]  # what the dead are shown is no observation


def test_staggered_games_are_cut_off_for_all_their_agents() -> None:
    env = squad(time_limit=4)
    seen = rollout(vectorise(env, 6, stagger=True), np.zeros((6, 6), np.int32))[1]
    over = (seen.terminated | seen.truncated).T.tolist()
    assert over[:3] == [[0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1]]  # after two steps, then as always
    assert over[3:] == [[0, 1, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0]]


def test_a_reward_that_is_not_finite_is_found_whatever_the_score_makes_of_it() -> None:
    env = squad()

    def step(state: Any, action: Any, key: Any) -> Any:
        state, out = env.step(state, action, key)
        return state, out._replace(reward=out.reward.at[1].set(jnp.nan))

    seen = rows(env._replace(step=step, score=lambda reward, alive: reward[0]), steps=1)
    assert seen.valid.tolist() == [[0, 0, 0]]
    assert seen.truncated.tolist() == [[1, 1, 1]]
    assert seen.reward.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_game_goes_on_whatever_the_dead_are_shown(poison: float) -> None:
    seen = rows(squad(poison=poison), steps=4)
    assert seen.reward.tolist() == [[1, 2, 3], [2, 4, 6], [0, 6, 9], [0, 8, 0]]
    assert seen.valid.tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert seen.final_obs[3].tolist() == [[0, 0], [4, 1], [0, 0]]


def test_the_time_limit_truncates_the_living() -> None:
    seen = rows(squad(time_limit=3), steps=3)
    assert seen.terminated[2].tolist() == [0, 0, 1]
    assert seen.truncated[2].tolist() == [1, 1, 0]
    assert seen.present[2].tolist() == [0, 1, 1]


def test_games_lie_side_by_side_and_only_the_present_are_counted() -> None:
    seen = rows(squad(poison=-7.0), steps=4, games=2)
    assert seen.reward[1].tolist() == [2, 4, 6, 2, 4, 6]
    told = episode_metrics(jax.vmap(step_info)(seen))
    assert {name: int(told[name].count) for name in ("episodes", "terminated", "truncated", "invalid_steps")} == {
        "episodes": 6,
        "terminated": 6,
        "truncated": 0,
        "invalid_steps": 0,
    }
    mean = lambda name: float(told[name].sum / told[name].count)
    assert mean("episode_return") == pytest.approx(sum(RETURNS) / 3)
    assert mean("episode_length") == sum(LIVES) / 3
    assert int(told["info/number"].count) == 2 * sum(LIVES)
    assert mean("info/number") == pytest.approx((0 * 2 + 1 * 4 + 2 * 3) / 9)
    assert mean("info/t") == pytest.approx((3 + 10 + 6) / 9)  # 1 + ... + life, of each


def test_what_is_not_finite_is_counted_once_an_agent_that_lives() -> None:
    def step(t: Any, action: Any, key: Any) -> Any:
        t, out = squad().step(t, action, key)
        return t, out._replace(reward=jnp.where(t == 3, jnp.nan, out.reward))

    seen = rows(squad()._replace(step=step), steps=3)
    told = episode_metrics(jax.vmap(step_info)(seen))
    assert (seen.truncated[2].tolist(), seen.reward[2].tolist()) == ([1, 1, 1], [0, 0, 0])
    assert (int(told["invalid_steps"].count), int(told["truncated"].count)) == (2, 2)


def trained(strategy: jaxrl.Strategy, max_opts: int, **settings: Any) -> Any:
    return jaxrl.Trainer(strategy, max_opts=max_opts, **{**TINY, **settings}).train()


def by_ppo(env: jaxrl.Env, **agent: Any) -> jaxrl.Strategy:
    processor = jaxrl.chain(jaxrl.normalise_obs(), jaxrl.normalise_reward(), jaxrl.one_step())
    agent = jaxrl.ppo(features=(8,), **agent)
    return jaxrl.on_policy(env, agent, processor=processor, num_envs=6, rollout=8, epochs=1, minibatches=2)


def by_dqn(env: jaxrl.Env) -> jaxrl.Strategy:
    return jaxrl.off_policy(
        env,
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(96, batch_size=16),
        processor=jaxrl.chain(jaxrl.frame_stack(2), jaxrl.n_step(3)),
        num_envs=6,
        opt_interval=6,
        warmup=48,
    )


def by_recurrent_ppo(env: jaxrl.Env) -> jaxrl.Strategy:
    return by_ppo(env, core="gru", core_features=4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [by_ppo, by_dqn, by_recurrent_ppo])
def test_what_the_dead_are_shown_and_paid_changes_no_bit_of_what_is_learnt(strategy: Any) -> None:
    clean, spoilt = (trained(strategy(squad(poison=poison)), 8) for poison in (0.0, 1e6))
    for one, other in zip(jax.tree.leaves(clean.state.agent), jax.tree.leaves(spoilt.state.agent), strict=True):
        np.testing.assert_array_equal(one, other)
    processed = jax.tree.leaves(strategy(squad()).policy.params(clean.state).processor)
    other = jax.tree.leaves(strategy(squad()).policy.params(spoilt.state).processor)
    assert all(map(np.array_equal, processed, other))


@pytest.mark.slow
def test_a_game_is_scored_by_a_reduction_of_the_rewards_of_those_that_live() -> None:
    env = squad(poison=1e6)
    strategy = by_ppo(env)
    state = strategy.init(jax.random.key(0))
    score = lambda env: Evaluator(env, strategy.policy, 2)(strategy.policy.params(state), jax.random.key(1))
    assert score(env).returns.tolist() == pytest.approx([41 / 3, 41 / 3])  # (3 + 20 + 18) / 3
    assert score(env).lengths.tolist() == [4, 4]
    team = env._replace(score=lambda reward, alive: reward.sum() / jnp.maximum(alive.sum(), 1))
    # (1+2+3)/3 + (2+4+6)/3 + (6+9)/2 + 8
    assert score(team).returns.tolist() == pytest.approx([21.5, 21.5])
    assert score(squad(time_limit=1)).returns.tolist() == pytest.approx([2, 2])


def test_values_are_those_of_each_agents_own_life() -> None:
    """In each place the discounted rewards until one's own death. The dead stand where agent 0 begins."""
    place = lambda obs: (4 * obs[..., 1] + obs[..., 0]).astype(jnp.int32)
    env = transform_obs(squad(poison=0.0), place, jaxrl.Discrete(12))
    env = transform_reward(env, lambda state, action, out: jnp.asarray(out.reward) / 8)
    agent = jaxrl.dqn(lr=1e-2, lr_decay=2_000, features=(16,), target_interval=25, epsilon_start=1.0, epsilon_end=1.0)
    strategy = jaxrl.off_policy(
        env,
        agent,
        buffer=jaxrl.uniform(504, 32),
        processor=jaxrl.one_step(0.5),
        num_envs=12,
        opt_interval=12,
        warmup=504,
    )

    @jax.jit
    def train(key: Any) -> Any:
        state = strategy.init(key)
        body = lambda state, key, t: strategy.step(state, key, t)[0]
        return iterate(body, state.key, state, jnp.uint32(0), jnp.uint32(2_000)).agent

    params = train(jax.random.key(0)).params
    values = QNetwork(jaxrl.Discrete(12), 2, features=(16,)).apply(params, jnp.array([0, 1, 4, 7, 8, 10]))
    # Agent 0: 1 + 2 / 2, 2. Agent 1: 2 + 4 / 2 + 6 / 4 + 8 / 8, 8. Agent 2: 3 + 6 / 2 + 9 / 4, 9. All by 8.
    expected = np.array([2, 2, 6.5, 8, 8.25, 9]) / 8
    np.testing.assert_allclose(values, np.stack([expected, expected], axis=1), atol=1e-2)


@pytest.mark.slow
def test_parameters_are_shared_and_learnt_and_a_run_goes_on_to_the_same_bits(tmp_path: Any) -> None:
    def run(max_opts: int, where: str, **more: Any) -> Any:
        strategy = jaxrl.on_policy(
            hidden_target(), jaxrl.ppo(lr=1e-2, features=(16,)), num_envs=24, rollout=16, epochs=2, minibatches=2
        )
        settings = {"max_opts": max_opts, "eval_interval": 80, "eval_episodes": 50, "recorders": []}
        return jaxrl.Trainer(strategy, run_dir=str(tmp_path / where), **settings, **more).train()

    whole = run(160, "whole")
    assert whole.best_score == 5.0
    assert whole.summary["env_steps"] == 40 * 24 * 16  # of agents
    run(80, "parts")
    parts = run(160, "parts", resume=True)
    assert all(map(np.array_equal, jax.tree.leaves(whole.state.agent), jax.tree.leaves(parts.state.agent)))


@pytest.mark.slow
def test_a_game_is_checked_and_filmed_as_one() -> None:
    env = hidden_target()
    assert jaxrl.check_env(env) == []
    assert jaxrl.check_env(squad()._replace(agents=2)) == ["squad: reward is [3]; expected [2], one per agent"]
    result = trained(by_ppo(squad()), 4)
    pictures, score = player(squad())(result.policy, 0, 10)
    assert (len(pictures), score) == (5, pytest.approx(41 / 3))


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda env: vectorise(env, 7), "num_envs is 7, but squad has 3 agents, each .*; set it to 6 or 9"),
        (lambda env: vectorise(env, 2), "num_envs is 2, .*; set it to 3$"),
        (lambda env: vectorise(env._replace(agents=0), 2), "squad: agents is 0; expected a whole number of at least 1"),
        (lambda env: apply_wrappers(env, "action_repeat:2"), "squad has 3 agents .* unsupported with action_repeat"),
        (lambda env: apply_wrappers(env, "previous"), "squad has 3 agents .* unsupported with previous"),
        (lambda env: gather(env, None, None, None, 10), "squad has 3 agents .* unsupported with gathering a data set"),  # type: ignore[arg-type]
        (
            lambda env: jaxrl.on_policy(env, jaxrl.ppo(), actors=jaxrl.ActorsConfig(actors=2)),
            "squad has 3 agents .* unsupported with actors",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(does: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        does(squad())
