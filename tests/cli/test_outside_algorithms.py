"""An algorithm in a package of the user's own has what a built-in one has, from the command line and in Python."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import Cli
from toys_runs import member_facts

import jaxrl
from jaxrl import evaluate, play, train, verify
from jaxrl.cli.config import parse
from jaxrl.errors import SettingsError
from jaxrl.registry import ALGORITHMS, algorithm_names

CODE = """
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxrl


@dataclass(frozen=True)
class TableConfig:
    lr: float = 0.1
    epsilon: float = 0.3
    n_step: int = 1


class Hyper(NamedTuple):
    lr: jax.Array


class TableState(NamedTuple):
    table: jax.Array
    hyper: Hyper


def make(config: TableConfig) -> jaxrl.AgentMaker:
    def bind(spec):
        actions, size = spec.action_space.n, spec.observation_space.shape[0]

        def init(key):
            return TableState(jnp.zeros((size, actions)), Hyper(jaxrl.tunable("agent.lr", config.lr)))

        def act(state, obs, key, opt_step, mode):
            greedy = (obs @ state.table).argmax(axis=-1).astype(jnp.int32)
            if mode == "exploit":
                return greedy, ()
            coin_key, action_key = jax.random.split(key)
            other = jax.random.randint(action_key, greedy.shape, 0, actions)
            return jnp.where(jax.random.uniform(coin_key, greedy.shape) < config.epsilon, other, greedy), ()

        def update(state, batch, key, opt_step):
            items = batch.items

            def loss(table):
                value = jnp.take_along_axis(items.obs @ table, items.action[:, None], axis=1)[:, 0]
                error = items.reward + items.discount * (items.next_obs @ state.table).max(axis=-1) - value
                return jnp.mean(jnp.square(error)), error

            (value, error), grad = jax.value_and_grad(loss, has_aux=True)(state.table)
            return state._replace(table=state.table - state.hyper.lr * grad), {"loss": value}, jnp.abs(error)

        return jaxrl.Agent("any", init, act, update, strip=lambda state: state)

    return bind


def no_settings(config):
    return None


def broken(config: TableConfig) -> jaxrl.AgentMaker:
    return lambda spec: 1 / 0
"""
BUILT_ON = """
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxrl


@dataclass(frozen=True)
class MellowConfig(jaxrl.DQNConfig):
    omega: float = 5.0


class Values(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dense(2)(obs)


def mellow(config: MellowConfig):
    def target(items, values):
        soft = jax.nn.logsumexp(config.omega * values.target_t, axis=1) / config.omega
        return items.reward + items.discount * soft

    return jaxrl.dqn(config, target=target, make_network=lambda spec: Values())


def gentle(config: jaxrl.PPOConfig):
    return jaxrl.ppo(config, extra_loss=lambda params, sample, outputs: 1e-3 * jnp.square(outputs.value))


def closed(config: jaxrl.PPOConfig):
    return lambda spec: gentle(config)(spec)


def cloned(config: jaxrl.BCConfig):
    return jaxrl.bc(config, extra_loss=lambda params, items, outputs: -1e-3 * outputs.entropy())
"""
MAKE = "algos_of_mine.tables:make"
MELLOW = "algos_of_mine.built_on:mellow"
SMALL = (
    *("--num-envs", "2", "--opt-interval", "2", "--warmup", "16", "--buffer.capacity", "64"),
    *("--buffer.batch-size", "8", "--eval-interval", "8", "--eval-episodes", "2", "--save-interval", "8"),
)
ROLLOUTS = (
    *("--num-envs", "2", "--rollout", "8", "--epochs", "1", "--minibatches", "1"),
    *("--eval-interval", "2", "--eval-episodes", "2", "--save-interval", "2"),
)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's package in the working directory; nothing of it stays known after a test."""
    (tmp_path / "algos_of_mine").mkdir()
    (tmp_path / "algos_of_mine" / "__init__.py").touch()
    (tmp_path / "algos_of_mine" / "tables.py").write_text(CODE)
    (tmp_path / "algos_of_mine" / "built_on.py").write_text(BUILT_ON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(ALGORITHMS)
    yield
    forget(before)


def forget(before: dict) -> None:
    """Do as a new process would that has imported nothing of the user's."""
    for name in [name for name in sys.modules if name.startswith("algos_of_mine")]:
        del sys.modules[name]
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def test_an_algorithm_named_on_the_command_line_has_all_commands(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(ALGORITHMS)
    assert train.main(["--algo", MAKE, *SMALL, "--max-opts", "16", "--agent.lr", "0.05", "--run-dir", "run"]) == 0
    shown = capsys.readouterr().out
    assert f"jaxrl.train --resume run --algo {MAKE} --max-opts 32" in shown
    assert f"jaxrl.evaluate run --algo {MAKE}" in shown
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (config["algo"], config["agent"], config["custom"]) == (MAKE, {"lr": 0.05, "epsilon": 0.3, "n_step": 1}, [])
    forget(before)

    # A run directory alone runs no code.
    for command in (
        lambda: train.main(["--resume", "run"]),
        lambda: evaluate.main(["run"]),
        lambda: play.main(["run"]),
    ):
        with pytest.raises(SettingsError, match="imported only where you name it"):
            command()
    assert verify.main(["run"]) == 0
    assert f"name it by --algo {MAKE}" in capsys.readouterr().err
    replay = cli.here("verify", "run", "--replay")
    assert (replay.returncode, "8 ok" in replay.stdout) == (2, True)
    (line,) = replay.stderr.splitlines()
    assert line.startswith(f"error: --replay: run was trained by {MAKE}, ")
    assert line.endswith(f"name it by --algo {MAKE}")
    assert "algos_of_mine.tables" not in sys.modules

    assert verify.main(["run", "--algo", MAKE, "--replay"]) == 0
    assert "8 -> 16 bit-equal" in capsys.readouterr().out
    assert evaluate.main(["run", "--algo", MAKE, "--episodes", "2"]) == 0
    assert train.main([MAKE, "--resume", "run", "--max-opts", "32"]) == 0
    capsys.readouterr()
    for named in ([MAKE, "--resume", "run"], ["--resume", "run", "--algo", MAKE]):
        assert train.main(named) == 0
        assert capsys.readouterr().out == (
            "nothing is left to train: max_opts 32 is reached; prolong it by "
            f"python -m jaxrl.train --resume run --algo {MAKE} --max-opts 64\n"
        )
    policy = jaxrl.load_policy("run")
    assert int(policy(np.zeros(4, np.float32))) in (0, 1)


def test_a_setting_of_its_own_counts_as_read_whatever_its_name() -> None:
    given = [MAKE, *SMALL, "--agent.n-step", "5", "--max-opts", "8", "--run-dir", "run", "--quiet"]
    assert train.main(given) == 0
    assert not [note for note in parse(given).notes if note.startswith("nothing reads")]
    with pytest.raises(SettingsError, match=r"other settings or versions \(agent.n_step: 5 -> 3\)"):
        train.main([MAKE, "--resume", "run", "--agent.n-step", "3", "--max-opts", "16", "--quiet"])


@pytest.mark.slow
def test_what_its_maker_gives_to_a_built_in_agent_is_rebuilt_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A target and a network, which no settings describe: the maker that is named supplies them again."""
    before = dict(ALGORITHMS)
    assert train.main(["--algo", MELLOW, *SMALL, "--max-opts", "16", "--run-dir", "run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (go_on,) = re.findall(r"jaxrl.train (--resume run --algo \S+ --max-opts 32)", shown)
    forget(before)
    assert train.main(go_on.split()) == 0
    forget(before)
    assert verify.main(["run", "--algo", MELLOW, "--replay"]) == 0
    verified = capsys.readouterr()
    assert "24 -> 32 bit-equal" in verified.out
    assert verified.err == ""
    assert evaluate.main(["run", "--algo", MELLOW, "--episodes", "2"]) == 0
    assert play.main(["run", "--algo", MELLOW, "--max-steps", "3"]) == 0


@pytest.mark.slow
def test_what_its_maker_gives_is_in_forks_and_populations_too() -> None:
    assert train.main(["--algo", MELLOW, *SMALL, "--max-opts", "32", "--keep", "9", "--run-dir", "run"]) == 0
    assert train.main(["--algo", MELLOW, "--resume", "run", "--from-step", "16", "--run-dir", "fork"]) == 0
    swept = ("--algo", MELLOW, *SMALL, "--sweep", "agent.omega=2,5", "--run-dir", "swept", "--quiet")
    assert train.main([*swept, "--max-opts", "8"]) == 0
    assert train.main(["--algo", MELLOW, "--resume", "swept", "--max-opts", "16"]) == 0
    assert [member_facts(Path("swept"), number)["agent"]["omega"] for number in range(2)] == [2.0, 5.0]


@pytest.mark.slow
def test_its_name_rebuilds_a_run_of_its_registered_maker_in_python_and_of_no_other() -> None:
    module = importlib.import_module("algos_of_mine.built_on")
    env, settings = jaxrl.make_env("CartPole-v1"), {"max_opts": 8, "eval_interval": 8, "eval_episodes": 2}
    small = {"num_envs": 2, "opt_interval": 2, "warmup": 16, "buffer": jaxrl.uniform(64, 8)}
    mellow = jaxrl.register_algorithm("mellow", module.mellow)
    for name, maker in (("registered", mellow(omega=2.0)), ("bare", module.mellow(module.MellowConfig(omega=2.0)))):
        strategy = jaxrl.off_policy(env, maker, **small)
        jaxrl.Trainer(strategy, **settings, run_dir=name, quiet=True).train()
    assert train.main(["--algo", MELLOW, "--resume", "registered", "--max-opts", "16"]) == 0
    assert jaxrl.load_policy("registered").facts["settings"]["agent"]["omega"] == 2.0
    # No command can tell which maker made this DQN.
    with pytest.raises(SettingsError, match=r"has parts that were made in Python \(make_network, target\)"):
        train.main(["--algo", MELLOW, "--resume", "bare", "--max-opts", "16"])
    with pytest.raises(SettingsError, match=r"load_policy\(run_dir, make_network=...\)"):
        jaxrl.load_policy("bare")
    # A process that has not imported the module knows neither name.
    forget({name: row for name, row in ALGORITHMS.items() if row.make is None})
    with pytest.raises(SettingsError, match=r"was trained by mellow; .*by --algo my_package.algos:make, the function"):
        evaluate.main(["registered"])
    with pytest.raises(
        SettingsError, match=r"--replay: registered was trained by mellow, .* name it by --algo my_pack"
    ):
        verify.main(["registered", "--replay"])


@pytest.mark.parametrize(
    ("maker", "flag", "other"), [("gentle", "--rollout", "--data"), ("cloned", "--data", "--rollout")]
)
def test_its_kind_is_that_of_the_built_in_agent_that_its_function_returns(
    maker: str, flag: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main([f"algos_of_mine.built_on:{maker}", "--help"])
    flags = set(capsys.readouterr().out.split())
    assert flag in flags
    assert other not in flags


@pytest.mark.slow
def test_algorithms_of_other_kinds_train_too(cli: Cli) -> None:
    gentle = "algos_of_mine.built_on:gentle"
    assert train.main([gentle, *ROLLOUTS, "--max-opts", "2", "--run-dir", "run", "--quiet"]) == 0
    assert train.main([gentle, "--resume", "run", "--max-opts", "4", "--quiet"]) == 0
    collected = ("run", "--algo", gentle, "--transitions", "64", "--out", "data.npz")
    assert cli.here("collect", *collected).returncode == 0
    cloned = ("algos_of_mine.built_on:cloned", "--data", "data.npz", "--batch-size", "8", "--holdout", "0.2")
    assert train.main([*cloned, "--max-opts", "4", "--eval-interval", "4", "--run-dir", "cloned", "--quiet"]) == 0


@pytest.mark.parametrize(("kind", "needed"), [("off_policy", "on_policy"), ("on_policy", "off_policy")])
def test_an_agent_of_another_kind_is_to_be_registered(kind: str, needed: str) -> None:
    module, maker = importlib.import_module("algos_of_mine.built_on"), "closed" if needed == "on_policy" else "mellow"
    name = f"algos_of_mine.built_on:{maker}"
    if kind == "on_policy":
        jaxrl.register_algorithm("mine", getattr(module, maker), kind="on_policy")
    with pytest.raises(SettingsError, match=f"{name} makes an {needed} agent") as refused:
        train.main([name, "--run-dir", "run"])
    assert f'jaxrl.register_algorithm("NAME", make, kind="{needed}")' in str(refused.value)
    assert not Path("run").exists()


def test_a_registered_algorithm_has_that_kind_too_where_none_is_given() -> None:
    module = importlib.import_module("algos_of_mine.built_on")
    gentle = jaxrl.register_algorithm("gentle", module.gentle, settings={"rollout": 16, "minibatches": 2})
    assert "gentle" in algorithm_names("on_policy")
    assert jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), gentle()).env_steps_per_step == 16 * 8
    jaxrl.register_algorithm("cloned", module.cloned)
    assert "cloned" in algorithm_names("offline")


def test_a_buffer_may_be_plain_where_that_of_the_algorithm_it_is_like_is_prioritised() -> None:
    plain = {"buffer": {"prioritised": False, "capacity": 1_000}}
    mine = jaxrl.register_algorithm("mine", jaxrl.rainbow, config=jaxrl.RainbowConfig, like="rainbow", settings=plain)
    strategy = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), mine(), warmup=100)
    assert (strategy.info.settings or {})["buffer"]["prioritised"] is False


def test_defaults_may_be_those_of_the_algorithm_that_it_is_built_on() -> None:
    module, env = importlib.import_module("algos_of_mine.built_on"), jaxrl.make_env("CartPole-v1")
    mine = jaxrl.register_algorithm("mine", module.gentle, like="a2c", settings={"epochs": 2})
    settings = jaxrl.on_policy(env, mine()).info.settings or {}
    usual = jaxrl.on_policy(env, jaxrl.a2c()).info.settings or {}
    assert (settings["epochs"], settings["rollout"], settings["minibatches"]) == (2, 16, 1)
    assert settings["processor"] == usual["processor"]
    small = {"buffer": {"capacity": 300}}
    sac = jaxrl.register_algorithm("my_sac", jaxrl.sac, config=jaxrl.SACConfig, like="sac", settings=small)
    settings = jaxrl.off_policy(jaxrl.make_env("Pendulum-v1"), sac()).info.settings or {}
    assert (settings["num_envs"], settings["opt_interval"]) == (1, 1)
    assert (settings["buffer"]["capacity"], settings["buffer"]["batch_size"]) == (300, 256)
    assert parse(["my_sac"]).config.env == "Pendulum-v1"
    with pytest.raises(SettingsError, match=r"'ppi', which is no algorithm; did you mean ppo\?"):
        jaxrl.register_algorithm("other", module.gentle, like="ppi")
    with pytest.raises(SettingsError, match="kind of other is off_policy, but ppo is on_policy"):
        jaxrl.register_algorithm("other", module.gentle, like="ppo", kind="off_policy")


def test_help_and_sweeps_know_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main([MAKE, "--help"])
    assert "--agent.epsilon" in capsys.readouterr().out
    with pytest.raises(SettingsError, match=r"--agent.epsilon\?"):
        train.main([MAKE, "--agent.epsilo", "0.1"])
    sweep = ("--sweep", "agent.lr=0.1,0.2", "--max-opts", "8", "--run-dir", "swept", "--quiet")
    assert train.main([MAKE, *SMALL, *sweep]) == 0
    assert [member_facts(Path("swept"), number)["agent"]["lr"] for number in range(2)] == [0.1, 0.2]


def test_a_registered_algorithm_is_used_as_a_built_in_one() -> None:
    from algos_of_mine.tables import make  # type: ignore[import-not-found]

    table = jaxrl.register_algorithm("table", make, actions=("discrete",), settings={"num_envs": 2, "opt_interval": 2})
    with pytest.raises(SettingsError, match="already registered as 'table'"):
        jaxrl.register_algorithm("table", make)
    strategy = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), table(lr=0.2), warmup=16)
    settings = dict(strategy.info.settings or {})
    assert (settings["algo"], settings["num_envs"], settings["agent"]["lr"]) == ("table", 2, 0.2)
    with pytest.raises(SettingsError, match="table takes discrete actions, but Pendulum-v1 has"):
        jaxrl.off_policy(jaxrl.make_env("Pendulum-v1"), table())
    with pytest.raises(SettingsError, match=r"table: TypeError: .*unexpected keyword argument 'lt'"):
        table(lt=3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("algos_of_nobody.tables:make", "there is no module algos_of_nobody"),
        ("algos_of_mine.tables:mak", "has no function mak; did you mean make?"),
        ("algos_of_mine.tables:no_settings", "expected the dataclass of its settings"),
        ("algos_of_mine.tables:broken", "algos_of_mine.tables:broken failed on CartPole-v1: ZeroDivisionError"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        train.main([name, *SMALL, "--run-dir", "run"])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path("run").exists()
