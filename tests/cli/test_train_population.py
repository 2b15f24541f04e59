"""`python -m jaxrl.train --seeds N --sweep ...`: members in one run, killed, stopped, gone on with, and taken apart."""

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from commands import SMALL, Cli, one_error_line, snapshot
from toys_envs import forget_envs
from toys_runs import member_facts, repeated_rows, rows_about_all, rows_in

import jaxrl
from jaxrl.cli.config import parse
from jaxrl.cli.sweeps import PopulationConfig, build_population, read_sweep
from jaxrl.errors import NoCheckpointError, SettingsError
from jaxrl.strategies.population import Population
from jaxrl.train import population_config
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.leaves import digest
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run_dir import BEST, CHECKPOINTS, member_dir

POPULATION = (*SMALL, "--max-opts", "60", "--seeds", "2", "--sweep", "agent.lr=1e-3,1e-2", "--run-dir", "run")


def sums(cli: Cli, run_dir: str, *args: object) -> list[str]:
    done = cli.here("verify", run_dir, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def newest(lines: list[str]) -> list[str]:
    """Return of each member the digest of its last checkpoint."""
    last: dict[str, str] = {}
    member = ""
    for line in lines:
        if line.startswith("member"):
            member = line
        elif line[:1].isdigit():
            last[member] = line
    return list(last.values())


def bests(cli: Cli, run_dir: str) -> list[tuple[str, bool]]:
    """Return of each member the digest of its best policy, and whether it is as good as its checkpoints know of."""
    found = []
    for member in (member_dir(cli.cwd / run_dir, number) for number in range(4)):
        best, digested, known = open_store(member, BEST), "none", 0
        if steps := best.steps():
            digested = digest(best.read(steps[0])[0])
        with contextlib.suppress(NoCheckpointError):
            known = open_store(member, CHECKPOINTS).newest_facts()[1]["ledger"]["best_opt_steps"]
        found.append((digested, known <= (steps[0] if steps else 0)))
    return found


@pytest.mark.slow
def test_members_are_what_the_command_leaves_for_each_alone(cli: Cli) -> None:
    done = cli.train(*POPULATION)
    assert "4 members: 2 settings with 2 seeds each" in done.stdout
    assert "at a time (spread), one program" in done.stdout
    table = [line for line in done.stdout.splitlines() if line.strip().startswith("2 ") and "agent.lr=" in line]
    assert {line.split()[-1] for line in table} == {"agent.lr=0.001", "agent.lr=0.01"}
    alone = [flag if flag != "1e-3" else "1e-2" for flag in SMALL]
    cli.here("train", *alone, "--max-opts", "60", "--seed", "1", "--run-dir", "alone")
    assert sums(cli, "run", "--member", 3)[1:] == sums(cli, "alone")
    single = cli.cwd / "alone"
    assert member_facts(cli.cwd / "run", 3) == yaml.safe_load((single / "config.yaml").read_text())
    assert repeated_rows(rows_in(cli.cwd / "run", 3)) == repeated_rows(rows_in(single))
    said = cli.here("evaluate", "run", "--member", "3", "--episodes", "5")
    alone_said = cli.here("evaluate", "alone", "--episodes", "5").stdout
    assert said.stdout.replace("run/members/00003", "alone") == alone_said
    assert "has no member 4; expected 0 to 3" in one_error_line(cli.here("evaluate", "run", "--member", "4"))
    refused = one_error_line(cli.here("train", "--resume", "run/members/00003", "--max-opts", "80"))
    assert "is among the members of the population" in refused
    assert f"jaxrl.extract('{cli.cwd / 'run'}', 3, ...)" in refused


@pytest.mark.slow
def test_members_in_shards_go_on_on_another_mesh(cli: Cli) -> None:
    """The settings of the directory name the mesh; a flag of either kind replaces it."""
    members = (*POPULATION, "--shards", "2")
    done = cli.train(*members, "--mesh", "members=2,envs=2")
    assert "2 seeds each, 2 at a time on 4 devices, 2 each (spread), one program" in done.stdout
    assert "mesh: members=2,envs=2" in (cli.cwd / "run/config.yaml").read_text()
    flags = [{"run": "other", "60": "30"}.get(str(flag), flag) for flag in members]
    cli.train(*flags, "--devices", "2")
    cli.train("--resume", "other", "--max-opts", "60", "--mesh", "members=1,envs=2")
    assert cli.run("train", "--resume", "other", "--devices", "4").returncode == 0
    assert newest(sums(cli, "other")) == newest(sums(cli, "run"))
    refused = cli.run("train", "--resume", "other", "--mesh", "envs=3")
    assert refused.returncode == 2
    assert "set shards to a multiple of 3, or mesh envs to 2" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layout"), [(signal.SIGKILL, "spread"), (signal.SIGKILL, "together"), (signal.SIGTERM, "spread")]
)
def test_whatever_ends_it_it_goes_on_to_the_same_bits(cli: Cli, how: signal.Signals, layout: str) -> None:
    longer = [{"60": "400", "30": "50", "20": "100"}.get(flag, flag) for flag in map(str, POPULATION)]
    longer += ["--layout", layout]
    assert cli.here("train", *[flag if flag != "run" else "whole" for flag in longer]).returncode == 0
    running = cli.start("train", *longer)
    second = cli.cwd / "run/checkpoints"
    while running.poll() is None:
        with contextlib.suppress(OSError):
            if len(list(second.iterdir())) > 1:
                break
        time.sleep(0.01)
    running.send_signal(how)
    out, err = running.communicate()
    assert running.returncode == (-9 if how == signal.SIGKILL else 143), err
    assert "--resume run" in out or how == signal.SIGKILL
    assert [known for _, known in bests(cli, "run")] == [True] * 4
    assert cli.run("train", "--resume", "run").returncode == 0
    assert newest(sums(cli, "run")) == newest(sums(cli, "whole"))
    assert bests(cli, "run") == bests(cli, "whole")
    of_each = lambda run: [row for number in range(4) for row in rows_in(run, number)]
    for rows in (rows_about_all, of_each):
        assert repeated_rows(rows(cli.cwd / "run")) == repeated_rows(rows(cli.cwd / "whole"))
    metadata = json.loads((cli.cwd / "run/metadata.json").read_text())
    assert [member["status"] for member in metadata["table"]] == ["max_opts"] * 4


def made(args: list[str], teacher: GreedyPolicy | None = None) -> Population:
    request = parse(args)
    given = dict(request.population or {})
    sweep = read_sweep(given.pop("sweep", []))
    return build_population(request.algo, request.config, PopulationConfig(**given, sweep=sweep), teacher)


def test_resuming_a_population_whose_members_have_ended_says_how_and_changes_nothing(cli: Cli) -> None:
    alike = [flag if flag != "1e-3" else "1e-9" for flag in SMALL]  # no score is better than the first
    cli.train(
        *alike, "--eval-starts", "fixed", "--seeds", "2", "--patience", "1", "--max-opts", "600", "--run-dir", "run"
    )
    before = snapshot(cli.cwd / "run")
    for flags in ("", " --max-opts 1200"):
        done = cli.here("train", "--resume", "run", *flags.split())
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (
            "nothing is left to train: all members have ended (2 by patience); prolong it by "
            f"python -m jaxrl.train --resume run --patience 2{flags}\n"
        )
        assert snapshot(cli.cwd / "run") == before
    # Killed while it began to go on with more patience.
    (cli.cwd / "run/metadata.json").write_text(json.dumps({**told(cli), "status": "running"}))
    config = cli.cwd / "run/config.yaml"
    config.write_text(config.read_text().replace("patience: 1", "patience: 2"))
    cli.train("--resume", "run")
    assert rows_in(cli.cwd / "run", 1)[-1]["opt_steps"] > 60
    assert told(cli)["status"] == "done"


def told(cli: Cli) -> dict[str, Any]:
    """Return the metadata of the population."""
    metadata: dict[str, Any] = json.loads((cli.cwd / "run/metadata.json").read_text())
    return metadata


def test_numbers_of_a_population_may_be_written_as_any_others_in_a_file(cli: Cli) -> None:
    file, sweep = cli.cwd / "search.yaml", "{agent.lr: 'log_uniform(1e-5,1e-2)'}"

    def members_of(count: str) -> int:
        numbers = f"members: {count}, draw_seed: 1e3, width: 1e1"
        file.write_text(f"algo: dqn\npopulation: {{{numbers}, layout: together, sweep: {sweep}}}\n")
        request = parse(["--config", str(file)])
        asked = population_config(request.population)
        assert asked is not None
        return len(build_population(request.algo, request.config, asked).members)

    assert members_of("1e1") == 10
    with pytest.raises(SettingsError, match="members is 'two'; expected a whole number"):
        members_of("two")


def test_what_makes_another_program_is_built_once_for_each() -> None:
    asked = ["dqn", *SMALL, "--sweep", "agent.lr=1e-3,1e-2", "buffer.batch_size=8,16", "--seeds", "2"]
    members = made(asked).members
    assert len(members) == 8
    assert len({id(member.strategy.step) for member in members}) == 2
    settings = [dict(member.strategy.info.settings or {}) for member in members[::2]]
    told = [(each["agent"]["lr"], each["buffer"]["batch_size"]) for each in settings]
    assert told == [(1e-3, 8), (1e-3, 16), (1e-2, 8), (1e-2, 16)]
    assert dict(members[0].swept) == {"agent.lr": 1e-3, "buffer.batch_size": 8}


def test_what_hangs_on_another_setting_is_built_with_it() -> None:
    """Without ratios clipped there is no `c_clip` in a state; what is told of a member is so all the same."""
    asked = ["impala", "--agent.features", "8", "--sweep", "agent.ent_coef=0.01,0.02", "agent.torso=mlp,auto"]
    told = [dict(member.strategy.info.settings or {})["agent"] for member in made(asked).members]
    assert [(each["ent_coef"], each["torso"]) for each in told] == [
        (0.01, "mlp"),
        (0.01, "auto"),
        (0.02, "mlp"),
        (0.02, "auto"),
    ]
    asked = ["sac", "--env", "Pendulum-v1", "--agent.features", "8", "--sweep", "agent.target_entropy=-1,0"]
    told = [dict(member.strategy.info.settings or {})["agent"]["target_entropy"] for member in made(asked).members]
    assert told == [-1.0, 0.0]


@pytest.mark.slow
def test_a_weight_of_0_of_a_teacher_or_demonstrations_is_refused_in_any_order(tmp_path: Path) -> None:
    env = jaxrl.make_env("CartPole-v1")
    strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(8,)))
    assert strategy.policy is not None
    params = strategy.policy.params(strategy.init(jax.random.key(0)))
    teacher, file = GreedyPolicy(strategy.policy, params, {}), str(tmp_path / "shown.npz")
    jaxrl.save_dataset(file, jaxrl.gather(env, strategy.policy, params, jax.random.key(1), 64))
    small = ["ppo", "--agent.features", "8"]
    for values in ("0,1", "1,0"):
        with pytest.raises(SettingsError, match=r"there is a teacher, but agent\.teacher_coef, .*, is 0; set it"):
            made([*small, "--teacher", "shown", "--sweep", f"agent.teacher_coef={values}"], teacher)
        with pytest.raises(SettingsError, match=r"there are demos, but agent\.imitation_coef, .*, is 0; set it"):
            made([*small, "--demos", file, "--sweep", f"agent.imitation_coef={values}"])
    taught = jaxrl.on_policy(env, jaxrl.ppo(features=(8,), teacher_coef=1.0), teacher=teacher)
    with pytest.raises(SettingsError, match=r"agent\.teacher_coef is 0.0, which turns it off"):
        jaxrl.population(taught, sweep={"agent.teacher_coef": [1.0, 0.0]})
    several = made([*small, "--demos", file, "--sweep", "agent.imitation_coef=0.5,1"]).members
    assert len({id(member.strategy.step) for member in several}) == 1


def spread(width: float = 1.0, length: int = 3) -> jaxrl.Env:
    """Begin where a draw of the given width says."""
    draw = lambda key, width: width * jax.random.uniform(key)

    def reset(key: Any, params: Any) -> Any:
        return params, params[None]

    def step(state: Any, action: Any, key: Any) -> Any:
        return state, jaxrl.TimeStep(state[None], state, True)

    spec = jaxrl.EnvSpec("spread", jaxrl.Box(0.0, 9.0, (1,)), jaxrl.Discrete(2), time_limit=length)
    return jaxrl.randomise(jaxrl.Env(spec, reset, step), draw, width=width)  # type: ignore[arg-type]


def test_members_may_differ_in_what_episodes_are_drawn_from_and_all_are_judged_alike(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(lambda: forget_envs("spread"))
    jaxrl.register_env("spread", spread)
    asked = ["a2c", "--env", "spread", "--env-args", "width", "0.5", "length", "7", "--sweep", "env_args.width=0.25,1"]
    members = made([*asked, "--eval-env-args", "width", "2"]).members
    assert members[0].strategy.step is members[1].strategy.step  # one program
    assert [member.strategy.info.settings["env_args"] for member in members if member.strategy.info.settings] == [
        {"width": 0.25, "length": 7},
        {"width": 1.0, "length": 7},
    ]
    envs = [member.strategy.evaluation.env for member in members]
    assert [env.values["width"] for env in envs if isinstance(env, jaxrl.Env)] == [2, 2]
    with pytest.raises(SettingsError, match=r"scores cannot be compared; .* --eval-env-args width 0.5"):
        made(asked)
    with pytest.raises(SettingsError, match=r"'env_args.widht' cannot be swept; did you mean env_args.width"):
        made([*asked[:-1], "env_args.widht=0.25,1", "--eval-env-args", "width", "2"])


def test_whole_numbers_of_an_environment_stay_whole(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: forget_envs("spread"))
    jaxrl.register_env("spread", spread)

    def lengths(first: str, sweep: str) -> list[str]:
        asked = ["a2c", "--env", "spread", "--env-args", "length", first, "--eval-env-args", "length", "7"]
        members = made([*asked, "--sweep", f"env_args.length={sweep}"]).members
        return [repr(member.strategy.info.settings["env_args"]["length"]) for member in members]  # type: ignore[index]

    assert lengths("7", "5,1e1") == ["5", "10"]
    assert lengths("7.0", "5,9") == ["5.0", "9.0"]
    with pytest.raises(SettingsError, match=r"is a whole number, 7, .* or give it a fraction first, .* length 7\.0"):
        lengths("7", "between(5,9)")
