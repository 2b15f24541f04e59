"""Suites of environments, each by the same doors: bad input, exact resumes, the command line, presets, what is missing.

What each suite does is in a file of its own.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from toys_suites import checked, keeps_its_contract, presets_fit, resumes_to_the_same_bits, trains_by_command

import jaxrl
from jaxrl.envs import make_env
from jaxrl.errors import SettingsError

MODULES = {"playground": "mujoco_playground", "ale": "ale_py", "gymnasium": "ale_py"}
"""The modules of suites, where they are not called like the suite."""


def of_suites(names: str, rows: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrise over rows that begin with the name of an environment; those of other libraries are slow."""
    slow = lambda row: () if row[0].startswith("memory:") else pytest.mark.slow
    return pytest.mark.parametrize(names, [pytest.param(*row, marks=slow(row)) for row in rows])


@pytest.fixture
def installed(request: pytest.FixtureRequest, ranks_promoted: None) -> None:
    """Skip what needs a suite that is not installed; let ranks be promoted."""
    suite = request.getfixturevalue("name").partition(":")[0]
    if suite != "memory":
        pytest.importorskip(MODULES.get(suite, suite))


@of_suites(
    "name, params, said",
    [
        ("memory:TMase", {}, r"unknown environment 'memory:TMase'; did you mean memory:TMaze\?"),
        ("memory:TMaze", {"lenght": 9}, r"memory:TMaze has no parameter 'lenght'; did you mean length\?"),
        ("memory:Parity", {"symbols": 9}, r"memory:Parity has no parameter 'symbols'; known: length"),
        ("memory:TMaze", {"length": 0}, "memory:TMaze: length is 0; expected a whole number of at least 1"),
        ("memory:Recall", {"length": 2.5}, "memory:Recall: length is 2.5; expected a whole number of at least 1"),
        ("memory:Recall", {"symbols": 1.0}, "memory:Recall: symbols is 1; expected a whole number of at least 2"),
        ("memory:Copy", {"wait": -1}, "memory:Copy: wait is -1; expected a whole number of at least 0"),
        ("memory:Copy", {"wait": "long"}, "memory:Copy: wait is 'long'; expected a whole number of at least 0"),
        ("memory:Count", {"length": 1}, "memory:Count: length is 1; expected a whole number of at least 2"),
        ("memory:Count", {"length": 1e6}, "memory:Count: length is 1000000; expected at most 100000"),
        ("memory:NoisyCue", {"noise": -0.5}, "memory:NoisyCue: noise is -0.5; expected a number from 0 to 1000"),
        ("brax:antt", {}, r"unknown environment 'brax:antt'; did you mean brax:ant\?"),
        # Its swimmer calls `clip` of JAX by arguments that are no longer there.
        ("brax:swimmer", {}, r"^Brax cannot make swimmer: clip\(\) got an unexpected"),
        ("brax:ant", {"bakend": "mjx"}, r"brax:ant has no parameter 'bakend'; did you mean backend\?"),
        ("brax:ant", {"backend": "bullet"}, "Brax cannot make ant: backend should be in"),
        ("brax:ant", {"backend": 3}, "brax:ant: backend is 3; expected a string, such as 'generalized'"),
        ("brax:ant", {"episode_length": 0.5}, "episode_length is 0.5; expected a whole number of at least 1"),
        ("brax:ant", {"healthy_z_range": [1.0]}, r"expected 2 values, such as \[0.2, 1.0\]"),
        ("brax:ant", {"terminate_when_unhealthy": 2}, "terminate_when_unhealthy is 2; expected true or false"),
        ("craftax:Craftax-Symbolic", {}, r"unknown environment 'craftax:Craftax-Symbolic'; did you mean craftax:Craft"),
        ("craftax:Craftax-Symbolic-v1", {"max_timestep": 3}, r"'max_timestep'; did you mean max_timesteps\?"),
        ("craftax:Craftax-Symbolic-v1", {"god_mode": 3}, "god_mode is 3; expected true or false"),
        ("craftax:Craftax-Symbolic-v1", {"max_timesteps": 3.5}, "max_timesteps is 3.5; expected a whole number"),
        ("jaxmarl:MPE_simple_tag_v3", {}, "MPE_simple_tag_v3 is not supported: its agents differ"),
        ("jaxmarl:MPE_simple_spread", {}, r"did you mean jaxmarl:MPE_simple_spread_v3\?"),
        ("jaxmarl:MPE_simple_spread_v3", {"num_agent": 2}, r"no parameter 'num_agent'; did you mean num_agents\?"),
        ("jaxmarl:MPE_simple_spread_v3", {"local_ratio": 2}, "cannot be made with .*: local_ratio must be between 0.0"),
        ("jaxmarl:switch_riddle", {"num_agents": 2}, "cannot be made with .*: The minimum number of agents"),
        ("jumanji:Snake-v0", {}, r"unknown environment 'jumanji:Snake-v0'; did you mean jumanji:Snake-v1\?"),
        ("jumanji:Maze-v0", {"timelimit": 7}, r"has no parameter 'timelimit'; did you mean time_limit\?"),
        ("jumanji:Maze-v0", {"time_limit": 7.5}, "time_limit is 7.5; expected a whole number of at least 1"),
        ("jumanji:BinPack-v2", {"normalize_dimensions": 2}, "normalize_dimensions is 2; expected true or false"),
        ("jumanji:TSP-v1", {"cities": 3}, "jumanji:TSP-v1 has no parameter 'cities'; it has none"),
        ("jumanji:Connector-v3", {}, "^jumanji:Connector-v3 has rewards of 10 agents; expected one reward a step$"),
        ("jumanji:SearchAndRescue-v0", {}, "^jumanji:SearchAndRescue-v0 has rewards of 2 agents; expected one reward"),
        ("jumanji:LevelBasedForaging-v0", {}, "^jumanji:LevelBasedForaging-v0 has rewards of 2 agents; expected one"),
        ("pgx:breakout", {}, r"unknown environment 'pgx:breakout'; did you mean pgx:minatar-breakout\?"),
        ("pgx:go_9x9", {}, r"^pgx:go_9x9 is a game for 2 players; those for one: 2048, minatar-asterix"),
        ("pgx:2048", {"sticky": 1}, "pgx:2048 has no parameter 'sticky'; it has none"),
        ("pgx:minatar-breakout", {"sticky_prob": 1}, r"'sticky_prob'; did you mean sticky_action_prob\?"),
        ("pgx:minatar-breakout", {"sticky_action_prob": 1.5}, "sticky_action_prob is 1.5; expected a number from 0 to"),
        ("pgx:2048", {"time_limit": 0}, "time_limit is 0; expected a whole number of at least 1"),
        ("playground:CartpoleBalanc", {}, "unknown environment 'playground:CartpoleBalanc'; did you mean playground:C"),
        ("playground:CartpoleBalance", {"ctrl_td": 1}, r"has no parameter 'ctrl_td'; did you mean ctrl_dt\?"),
        ("playground:CartpoleBalance", {"ctrl_dt": 0.001}, "ctrl_dt is 0.001; expected at least sim_dt, 0.01"),
        ("playground:CartpoleBalance", {"impl": "bullet"}, "Playground cannot make CartpoleBalance: 'bullet'"),
        ("playground:CartpoleBalance", {"episode_length": 0}, "episode_length is 0; expected a whole number of at lea"),
        ("xminigrid:MiniGrid-Emtpy-8x8", {}, r"'xminigrid:MiniGrid-Emtpy-8x8'; did you mean xminigrid:Mini"),
        ("xminigrid:MiniGrid-Empty-5x5", {"hight": 9}, r"has no parameter 'hight'; did you mean height\?"),
        ("xminigrid:MiniGrid-Empty-5x5", {"height": 2}, "height is 2; expected a whole number of at least 5"),
        ("xminigrid:MiniGrid-Empty-5x5", {"view_size": 4}, "view_size is 4; expected an odd number"),
        ("xminigrid:MiniGrid-Empty-5x5", {"max_steps": 2.5}, "max_steps is 2.5; expected a whole number"),
        ("xminigrid:MiniGrid-Empty-5x5", {"one_hot": 2}, r"one_hot is 2; expected true or false"),
        ("xminigrid:MiniGrid-Empty-5x5", {"pickles": True}, "has no parameter 'pickles'"),
        ("xminigrid:XLand-MiniGrid-R1-9x9", {}, "has no goal of its own; give a RuleSet"),
        ("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "trivial-12k"}, r"'trivial-12k'; did you mean trivial-21k"),
        ("xminigrid:XLand-MiniGrid-R1-9x9", {"benchmark": "trivial-21k", "ruleset": 0}, "is a pickle from the intern"),
        ("ale:Pong", {"repeat_action_probability": 2}, r"repeat_action_probability is 2.0; expected"),
        ("ale:Pong", {"mode": 1}, r"ale:Pong has no parameter 'mode'"),
        ("ale:Pong", {"life_los": 1}, r"ale:Pong has no parameter 'life_los'; did you mean life_loss"),
        ("ale:Pong", {"wrap": ["time"]}, r"ale:Pong is no environment written in JAX, which alone are wrapped; leave"),
        ("ale:SpaceInvader", {}, r"unknown environment 'ale:SpaceInvader'; did you mean ale:SpaceInvaders"),
        ("gymnasium:ALE/Pong-v5", {"repeat_action_probability": 2}, r"repeat_action_probability is 2.0; expected"),
        ("gymnasium:ALE/Pong-v5", {"frameskip": 4}, r"has no parameter 'frameskip'; did you mean frame_skip"),
        ("gymnasium:ALE/Pong-v5", {"noop_max": -1}, r"noop_max is -1; expected a whole number of at least 0"),
        ("gymnasium:ALE/Pong-v5", {"raw": 1, "life_loss": 1}, r"life_loss is for games that are preprocessed"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_bad_input_is_refused_in_one_line(name: str, params: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        make_env(name, **params)
    assert "\n" not in str(refused.value)


GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("brax:fast", "brax:inverted_pendulum", "brax:reacher", "craftax:Craftax-Classic-Symbolic-v1", "pgx:2048"),
        *(f"pgx:minatar-{game}" for game in GAMES),
        *("playground:CartpoleBalance", "playground:PendulumSwingup", "playground:ReacherEasy"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_environment_passes_the_check(name: str) -> None:
    env = make_env(name)
    keeps_its_contract(env)
    assert checked(env) == []


@of_suites(
    "name, params",
    [
        ("brax:fast", {"episode_length": 6}),
        ("jaxmarl:MPE_simple_spread_v3", {"num_envs": 6}),
        ("jumanji:Game2048-v1", {}),
        ("pgx:minatar-breakout", {}),
        ("playground:CartpoleBalance", {"episode_length": 6}),
        ("xminigrid:MiniGrid-EmptyRandom-5x5", {"max_steps": 9}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_run_goes_on_to_the_same_bits(name: str, params: Any, tmp_path: Path) -> None:
    resumes_to_the_same_bits(name, tmp_path, **params)


WHOLE = "over 4 episodes, 0 unfinished"
LIFE = "life_loss true max_num_frames_per_episode 400"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env_args", "said"),
    [
        ("memory:Recall", "length 3 symbols 2", WHOLE),
        ("brax:fast", "episode_length 20", WHOLE),
        ("craftax:Craftax-Classic-Symbolic-v1", "max_timesteps 20", WHOLE),
        ("jumanji:Maze-v0", "time_limit 20", WHOLE),
        ("jumanji:Tetris-v0", "time_limit 20", WHOLE),
        ("pgx:2048", "time_limit 40", WHOLE),
        ("pgx:minatar-space_invaders", "time_limit 40", WHOLE),
        ("playground:CartpoleBalance", "episode_length 20", WHOLE),
        ("xminigrid:MiniGrid-Empty-5x5", "max_steps 20", WHOLE),
        ("ale:Breakout", LIFE, "info/lives"),
        ("gymnasium:ALE/Breakout-v5", LIFE, "info/lives"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_run_is_trained_and_evaluated_by_the_command_line(
    name: str, env_args: str, said: str, tmp_path: Path
) -> None:
    assert said in trains_by_command(name, tmp_path, "--env-args", *env_args.split())
    if name.startswith("craftax"):
        assert '"episode_achievements/collect_wood"' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("ppo", "brax:fast"),
        ("ppo", "brax:inverted_pendulum"),
        ("ppo", "craftax:Craftax-Classic-Symbolic-v1"),
        ("ppo", "playground:CartpoleBalance"),
        *((algo, name) for algo in ("ppo", "dqn") for name in ("ale:Pong", "gymnasium:ALE/Pong-v5")),
    ],
)
@pytest.mark.usefixtures("installed")
def test_presets_fit(algo: str, name: str) -> None:
    presets_fit(algo, name)


# --- what is not installed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        *(
            (name, module, rf"need the extra `{extra}`: pip install 'jaxrl\[{extra}\]'$")
            for name, module, extra in (
                ("xminigrid:MiniGrid-Empty-8x8", "xminigrid", "xminigrid"),
                ("jumanji:Snake-v1", "jumanji", "jumanji"),
                ("pgx:2048", "pgx", "pgx"),
                ("jaxmarl:MPE_simple_spread_v3", "jaxmarl", "jaxmarl"),
                ("craftax:Craftax-Symbolic-v1", "craftax", "craftax"),
                ("brax:ant", "brax", "brax"),
                ("playground:CartpoleBalance", "mujoco_playground", "playground"),
                ("gymnasium:ALE/Pong-v5", "ale_py", "atari"),
                ("ale:Pong", "ale_py", "atari"),
            )
        ),
        ("navix:Navix-Empty-5x5-v0", "navix", r"which no extra of jaxrl installs .*: pip install navix$"),
        ("gymnasium:CartPole-v1", "gymnasium", r"pip install 'jaxrl\[gymnasium\]'"),
    ],
)
def test_a_suite_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    name: str, module: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=said) as refused:
        make_env(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("module", ["stoa", "envelope"])
def test_objects_of_what_is_not_installed_are_answered_with_what_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = rf"^environments of {module} need it: pip install 'jaxrl\[{module}\]'"
    with pytest.raises(SettingsError, match=said):
        getattr(jaxrl, f"{module}_env")(3)
