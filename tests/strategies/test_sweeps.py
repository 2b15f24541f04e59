"""What the members of a population are, before anything trains."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from toys_trainer import counting, small_dqn

import jaxrl
from jaxrl.strategies.population import combinations, parse_values, with_values
from jaxrl.tuning import Override, override, tunable


def test_settings_are_outermost_and_every_setting_has_every_seed() -> None:
    made = jaxrl.population(small_dqn(), seeds=2, sweep={"agent.lr": [1e-3, 1e-4], "processor.discount": [0.9]})
    told = [(m.number, m.seed, m.swept["agent.lr"], m.strategy.info.settings["agent"]["lr"]) for m in made.members]  # type: ignore[index]
    assert told == [(0, 0, 1e-3, 1e-3), (1, 1, 1e-3, 1e-3), (2, 0, 1e-4, 1e-4), (3, 1, 1e-4, 1e-4)]
    assert {m.strategy.info.settings["processor"]["discount"] for m in made.members} == {0.9}  # type: ignore[index]
    assert all(m.strategy.step is small_dqn().step for m in made.members)  # one program


def test_a_member_begins_with_its_values_and_is_retuned_to_them() -> None:
    strategy = small_dqn()
    changed = with_values(strategy, {"agent.lr": 0.5, "processor.discount": 0.25})
    values = lambda state: (state.agent.hyper.lr, state.processor.discount)
    with override(changed.info.overrides):
        assert jax.jit(lambda key: values(strategy.init(key)))(jax.random.key(0)) == (0.5, 0.25)
    retune = changed.state_fns.set_hyperparams
    assert retune is not None
    retuned = jax.jit(lambda key: values(retune(strategy.init(key))))(jax.random.key(0))  # traced anew
    assert retuned == (0.5, 0.25)


def test_of_two_discounts_the_setting_is_the_one_that_it_was() -> None:
    with override({"processor.discount": Override(0.99, 0.5)}):
        assert float(tunable("processor.discount", 0.99)) == 0.5
        assert float(tunable("processor.discount", 0.9)) == np.float32(0.9)


# Slow: every day it is the test above.
@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True])
def test_new_settings_give_each_part_of_a_chain_its_own_discount(memory: bool) -> None:
    """Rewards normalised with one discount, values learnt with another: neither takes that of the other."""

    def strategy(of_rewards: float, of_values: float, lr: float) -> jaxrl.Strategy:
        processor = jaxrl.chain(jaxrl.normalise_reward(of_rewards), jaxrl.one_step(of_values))
        agent = jaxrl.ppo(features=(4,), lr=lr, **({"core": "gru", "core_features": 4} if memory else {}))
        sizes = {"num_envs": 2, "rollout": 4, "minibatches": 1}
        return jaxrl.on_policy(jaxrl.make_env("Catch-bsuite"), agent, processor=processor, **sizes)

    old, new = strategy(0.9, 0.99, 1e-3), strategy(0.8, 0.95, 1e-2)
    state = jax.eval_shape(old.init, jax.random.key(0))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state._replace(key=()))
    retuned = jax.jit(new.state_fns.set_hyperparams)(state)
    leaves = jax.tree.leaves_with_path(retuned.processor)
    discounts = [float(leaf) for path, leaf in leaves if "discount" in jax.tree_util.keystr(path)]
    assert discounts == pytest.approx([0.8, 0.95])
    assert float(retuned.agent.hyper.lr) == pytest.approx(1e-2)


def test_draws_depend_on_their_seed_and_place_alone() -> None:
    sweep = {"agent.lr": jaxrl.log_uniform(1e-5, 1e-1), "agent.tau": [0.1, 0.2]}
    few, many = combinations(sweep, 2, 4, 0), combinations(sweep, 2, 400, 0)
    assert few == many[:2]
    assert combinations(sweep, 2, 4, 1) != few
    logs = np.log10([setting["agent.lr"] for setting in many])
    assert logs.min() > -5
    assert logs.max() < -1
    assert abs(logs.mean() + 3) < 0.3  # of 200 draws, uniform over 4 decades: deviation 0.08
    assert {setting["agent.tau"] for setting in many} == {0.1, 0.2}


def test_values_are_read_as_people_write_them() -> None:
    assert parse_values("1e-4, 3e-4") == ["1e-4", "3e-4"]
    assert parse_values("log_uniform(1e-5, 1e-2)") == jaxrl.log_uniform(1e-5, 1e-2)
    assert str(jaxrl.between(0.9, 0.999)) == "between(0.9,0.999)"
    assert parse_values(str(jaxrl.between(0.9, 0.999))) == jaxrl.between(0.9, 0.999)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sweep": {"agent.lrr": [1.0]}}, r"'agent.lrr' cannot be swept; did you mean agent.lr\?"),
        ({"sweep": {"agent.lr": []}}, r"sweep of agent.lr is \[\]; expected a list of values, or a range"),
        ({"sweep": {"agent.lr": "1e-3"}}, r"sweep of agent.lr is '1e-3'; expected a list"),
        ({"sweep": {"agent.lr": [0.1, 0.1]}}, r"agent.lr names a value twice; seeds gives several runs of one setting"),
        ({"sweep": {"processor.discount": [1, 0.9, 1.0]}}, r"processor.discount names a value twice"),
        ({"sweep": {"agent.lr": [-1.0]}}, r"agent.lr is -1.0; expected a number from 0 to 1000"),
        ({"sweep": {"agent.lr": [math.nan]}}, r"agent.lr is nan; expected a number from 0 to 1000"),
        ({"sweep": {"processor.discount": [1.5]}}, r"processor.discount is 1.5; expected a number from 0 to 1"),
        (
            {"sweep": {"agent.lr": jaxrl.log_uniform(0.1, 1.0)}},
            r"a range is drawn from, but not how often; set members",
        ),
        (
            {"sweep": {"agent.lr": jaxrl.log_uniform(0.1, 1.0)}, "members": 7, "seeds": 3},
            r"members 7 is not a multiple of seeds 3; the nearest that is: 6 or 9",
        ),
        ({"seeds": 0}, r"seeds is 0; expected a whole number of at least 1"),
        ({"seeds": 2, "members": 3}, r"members is 3, but no range is drawn from: there are 2 with a seed each; leave"),
        ({"seeds": 200_000}, r"the population has 200000 members; at most 100000"),
    ],
)
def test_what_cannot_be_a_population_is_refused_in_one_line(settings: dict, said: str) -> None:
    with pytest.raises(jaxrl.SettingsError, match=said):
        jaxrl.population(small_dqn(), **settings)


@pytest.mark.parametrize(
    ("discounts", "members"), [([0.9, 1.0], None), ([0.9, 1 - 1e-9], None), (jaxrl.between(0.9, 1.0), 2)]
)
def test_discounts_from_which_no_support_can_be_derived_are_refused(discounts: Any, members: int | None) -> None:
    agent = jaxrl.dqn(features=(8,), atoms=5, values="c51")
    strategy = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), agent, num_envs=2, opt_interval=2, warmup=8)
    with pytest.raises(jaxrl.SettingsError, match=r"processor.discount is 1, under which rewards do not tell"):
        jaxrl.population(strategy, sweep={"processor.discount": discounts}, members=members)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1e-3, math.inf), (math.nan, 1.0)])
def test_a_range_from_which_nothing_can_be_drawn_is_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(jaxrl.SettingsError, match=r"expected finite numbers, 0 < low < high"):
        jaxrl.log_uniform(*bounds)


def test_what_a_zero_turns_off_is_no_value_of_the_same_program() -> None:
    impala = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.impala(features=(8,)), num_envs=2)
    assert "agent.rho_clip" in jaxrl.sweepable(impala)
    with pytest.raises(jaxrl.SettingsError, match=r"agent.rho_clip is 0.0, which turns it off"):
        jaxrl.population(impala, sweep={"agent.rho_clip": [1.0, 0.0]})
    a2c = jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.a2c(features=(8,)), num_envs=2)
    assert "agent.rho_clip" not in jaxrl.sweepable(a2c)


def test_values_of_a_member_that_contradict_its_other_settings_are_refused() -> None:
    agent, buffer = jaxrl.fast_td3(features=(4,), critic_features=(4,), atoms=5), jaxrl.uniform(256, batch_size=8)
    fast = jaxrl.off_policy(jaxrl.make_env("Pendulum-v1"), agent, buffer=buffer, num_envs=4, opt_interval=4)
    swept = jaxrl.population(fast, sweep={"agent.noise": [0.2, 0.4]})
    assert [member.swept["agent.noise"] for member in swept.members] == [0.2, 0.4]
    with pytest.raises(
        jaxrl.SettingsError, match=r"noise_min is 0\.001 and agent\.noise 0\.0005; expected noise_min at"
    ):
        jaxrl.population(fast, sweep={"agent.noise": [0.0005, 0.4]})


def test_pbt_may_not_lead_members_into_values_that_contradict_each_other() -> None:
    """The two members begin with values that go together."""
    agent, buffer = jaxrl.fast_td3(features=(4,), critic_features=(4,), atoms=5), jaxrl.uniform(256, batch_size=8)
    fast = jaxrl.off_policy(jaxrl.make_env("Pendulum-v1"), agent, buffer=buffer, num_envs=4, opt_interval=4)

    def begun(most: float) -> jaxrl.Trainer:
        sweep = {"agent.noise": jaxrl.between(0.2, 0.5), "agent.noise_min": jaxrl.between(0.1, most)}
        made = jaxrl.population(fast, sweep=sweep, members=2, search=jaxrl.PBT(interval=10))
        return jaxrl.Trainer(made, max_opts=20, eval_interval=10, eval_episodes=2)

    begun(0.2)
    with pytest.raises(jaxrl.SettingsError, match=r"pbt may give a member agent.noise 0.2 with agent.noise_min 0.3: "):
        begun(0.3)
    low = jaxrl.population(fast, sweep={"agent.noise": jaxrl.between(5e-4, 0.5)}, members=2, search=jaxrl.PBT(10))
    with pytest.raises(
        jaxrl.SettingsError, match=r"pbt may give a member agent.noise 0.0005: agent.noise_min is 0.001"
    ):
        jaxrl.Trainer(low, max_opts=20, eval_interval=10, eval_episodes=2)


def test_a_strategy_made_by_hand_can_have_several_seeds() -> None:
    made = jaxrl.population(counting(), seeds=3)
    assert [member.seed for member in made.members] == [0, 1, 2]
    with pytest.raises(jaxrl.SettingsError, match=r"'agent.lr' cannot be swept; known: "):
        jaxrl.population(counting(), sweep={"agent.lr": [1.0]})
