"""IMPALA learns CartPole by its preset, on the device and from actors whose parameters are old."""

import pytest

import jaxrl
from jaxrl.cli.algos import build
from jaxrl.cli.config import parse

Rows = dict[str, list[float]]


def learn(algo: str, *flags: str) -> Rows:
    """Train as the command line would; return the columns of the log."""
    memory, config = jaxrl.MemoryRecorder(), parse([algo, "--quiet", *flags]).config
    jaxrl.Trainer(build(algo, config), config, recorders=[memory]).train()
    names = ("eval_reward", "approx_kl", "clip_fraction", "staleness")
    return {name: [row[name] for row in memory.rows if name in row] for name in names}


CROWD = ("--env", "gymnasium:CartPole-v1", "--actors", "2", "--num-envs", "8", "--max-lag", "4")


@pytest.mark.slow
def test_on_the_device_impala_learns_to_balance() -> None:
    told = learn("impala", "--env", "CartPole-v1")
    assert told["eval_reward"][-1] >= 475
    assert max(told["approx_kl"]) < 1e-5


@pytest.mark.slow
def test_impala_learns_to_balance_from_parameters_that_are_four_updates_old() -> None:
    told = learn("impala", *CROWD)
    assert told["staleness"][1:] == [4.0] * 19
    # These are no ratios of 1: while it learns fast, many actions are a fifth more or less likely by now.
    assert max(told["clip_fraction"]) > 0.1
    assert max(told["approx_kl"]) > 0.01
    assert told["eval_reward"][-1] >= 400


@pytest.mark.slow
def test_without_the_correction_the_policy_is_lost_at_that_age() -> None:
    told = learn("a2c", *CROWD, "--agent.gae-lambda", "1", "--max-opts", "300")
    assert told["eval_reward"][-1] < 50
