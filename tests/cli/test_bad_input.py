"""What a user can get wrong: refused in one line that says what came and what would do, before anything is done."""

import contextlib
import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Finished, snapshot
from toys_data import walk

import jaxrl
from jaxrl import evaluate, play, train
from jaxrl.errors import JaxrlError, NoCheckpointError, SettingsError
from jaxrl.training import loop, program

Refuse = Callable[[str], str]


@pytest.fixture
def refuse(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Return the line in which a command is refused, once it is clear that it compiled and left nothing.

    `RUN` is a finished run. Where it is called are a folder `notes` of something else, one that is `empty`, one of
    `links`, a `file`, and a data set of an environment `Walk` with discrete actions.
    """
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    Path("notes/thoughts.txt").write_text("mine")
    Path("empty").mkdir()
    Path("links").mkdir()
    Path("links/lib64").symlink_to("../notes")
    Path("file").write_text("mine")
    jaxrl.save_dataset("walk.npz", walk((4,) * 100, (True,) * 100))
    for module in (loop, program):
        monkeypatch.setattr(module, "compile_all", lambda *args: pytest.fail("it began to compile"))

    def line(command: str) -> str:
        name, *words = shlex.split(named(command, finished))
        held = [tmp_path, finished.path] if "RUN" in command else [tmp_path]
        before = [snapshot(path) for path in held]
        with pytest.raises(JaxrlError) as refused:
            importlib.import_module(f"jaxrl.{name}").main(words)
        assert [snapshot(path) for path in held] == before
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)
        return str(refused.value)

    return line


def named(text: str, finished: Finished) -> str:
    """Return `text` with the path of the finished run in place of `RUN`."""
    return re.sub(r"\bRUN\b", str(finished.path), text)


def assert_says(line: str, parts: str) -> None:
    """Assert that a line has `parts`, which ` ... ` divides, in this order."""
    rest = line
    for part in parts.split(" ... "):
        assert part in rest, line
        rest = rest.split(part, 1)[1]


# --- command lines ----------------------------------------------------------------------------------------------

COLLECT = "collect nowhere --transitions 64 --out"
LONG = "x" * 300
WRONG = {
    # names
    "train --env cartpole-v1": "'cartpole-v1' ... CartPole-v1",
    "train --env Zzzzzz": "'Zzzzzz' ... known: ... --list-envs",
    "train --env CliffWalking-v1": "gymnasium:CliffWalking-v1",
    "train --env HalfCheetah": "gymnasium:HalfCheetah-v5",
    "train --env ALE/Breakout-v5": "Breakout-MinAtar",
    "train --env qwertz:ant": "there is no module qwertz; start where it lies",
    "train --env TMaze": "unknown environment 'TMaze'; did you mean memory:TMaze?",
    "train --env gymnasium:CartPol-v1": "did you mean gymnasium:CartPole-v1",
    "train --env ALE/Pong-v9": "unknown environment 'ALE/Pong-v9'; ... jaxrl[atari]' ... gymnasium:ALE/Pong",
    "train dqm": "'dqm' ... dqn",
    "train ''": "unknown algorithm ''; known: ... dqn",
    "train '' --resume RUN": "unknown algorithm ''; known: ... dqn",
    "train ppo --resume RUN": "is a run of dqn, not of ppo; leave the algorithm out, or give --algo dqn",
    "train dqn ppo": "'ppo' ... the algorithm comes first",
    "train dqn --algo ppo": "the algorithm is named twice, as dqn and by --algo ppo; name it once",
    "train --algorithm ppo": "the algorithm is the first argument",
    "train --agent.lrr 3": "--agent.lrr ... --agent.lr",
    "train --agent.lrr=3": "--agent.lrr ... --agent.lr",
    "train --no-agent.double": "--no-agent.double ... --agent.no-double",
    "train --confg x.yaml": "--confg ... --config",
    "train --num-env 3": "--num-envs?",
    "train --qwertz 3": "--help shows all flags",
    "train --agent.optimizer adm": "'adm' ... adam",
    "train --agent.activation rel": "'rel' ... relu",
    "train --agent.torso mpl": "'mpl' ... mlp",
    "train ppo --agent.core gro": "'gro' ... gru",
    "train dqn --agent.values c52": "c51",
    "train --actor-engine rey": "actor_engine is 'rey'; expected threads, processes or ray",
    "train --layout side --seeds 2": "layout is 'side'; known: auto, spread, together",
    "train bc --data walk.npz --agent.tau 0.5": "--agent.tau",
    "export RUN --format torch": "invalid choice: 'torch'",
    "evaluate RUN --episode-count 3": "--episode-count",
    "evaluate RUN --algo ppo": "is a run of dqn, not of ppo; leave the algorithm out, or give --algo dqn",
    "verify RUN --algo ppo": "is a run of dqn, not of ppo; leave the algorithm out, or give --algo dqn",
    "verify RUN --data walk.npz": "unknown argument --data",
    "play nowhere --frames 3": "--frames",
    "doctor --quik": "--quik",
    "completion fish": "fish",
    # flags of other libraries
    "train --batch-size=3 --n-steps 3": "--processor.n-step?",
    "train sac --lr 1e-3": "--agent.lr?",
    "train td3 --learning-rate 1e-3": "--agent.lr?",
    "train --total-frames 100": "--max-env-steps?",
    "train --wandb": "--recorders?",
    "train --max-steps 100": "--max-env-steps? (the run ends where max_opts",
    "train ppo --n-steps 3": "--rollout?",
    "train ppo --batch-size 3": "--minibatches?",
    "train ppo --agent.entropy 1": "--agent.ent-coef?",
    "train ppo --entropy-coef 1": "--agent.ent-coef?",
    "train sac --ent-coef 1": "--agent.temperature?",
    "train ppo --agent.value 1": "--agent.vf-coef?",
    "train ppo --value-coef 1": "--agent.vf-coef?",
    "train sac --agent.critics 3": "--agent.num-critics?",
    "train --clip-range 1": "--agent.clip-eps, which this algorithm does not have",
    "train --track": "--recorders? (names, as in console tensorboard wandb",
    "train --tensorboard": "--recorders?",
    "train --render": "jaxrl play RUN_DIR",
    "train --device gpu": "JAX_PLATFORMS",
    # whole numbers: the least of each setting, and one that is none
    **{f"train --{flag} 0": f"{flag.split('.')[-1].replace('-', '_')} ... at least 1" for flag in (
        "num-envs", "max-opts", "opt-interval", "keep", "buffer.capacity", "buffer.batch-size", "processor.n-step",
        "agent.features", "actors", "sync-interval",
    )},
    **{f"train --{flag} -1": f"{flag.replace('-', '_')} ... -1" for flag in (
        "warmup", "eval-interval", "eval-episodes", "record-interval", "save-interval", "patience", "seed",
        "max-env-steps", "num-envs",
    )},
    "train ppo --rollout 0": "rollout ... at least 1",
    "train sac --updates 0": "updates is 0; expected",
    "train --seeds 2 --layout together --width 0": "width is 0; expected a whole number of at least 1",
    "train --draw-seed -1 --sweep agent.lr=1,2": "draw_seed is -1; expected a whole number of at least 0",
    "train --num-envs 1.5": "--num-envs is '1.5'; expected a whole number",
    "train --num-envs ten": "--num-envs",
    "train --num-envs 1e-3": "--num-envs",
    "train --num-envs nan": "--num-envs",
    "train --num-envs ''": "--num-envs",
    "train --max-opts 1e999999999": "expected a whole number",
    "train --buffer.capacity 1.5": "--buffer.capacity is '1.5'; expected a whole number",
    "train --agent.features 64,wide": "--agent.features is 'wide'; expected a whole number",
    "train --seeds none": "--seeds is 'none'; expected a whole number",
    "train --seeds 2 --width 1.5": "--width is '1.5'; expected a whole number",
    "train --seed 99999999999": "seed is 99999999999; expected",
    "train --max-opts 5000000000": "max_opts is 5000000000; at most 4294967295",
    "train --eval-episodes 1048577": "eval_episodes is 1048577; expected at most 1048576",
    "train dqn --agent.epsilon-decay 10000000000": "at most 2147483647",
    "train sac --buffer.prioritised --buffer.beta-steps 10000000000": "at most 2147483647",
    "train ppo --num-envs 100000000": "lower rollout to at most 21 or num_envs to at most 16777215",
    "evaluate RUN --episodes 0": "--episodes",
    "evaluate RUN --episodes many": "--episodes: it is 'many'; expected a whole number, as in 5000 or 5e3",
    "evaluate RUN --episodes 1.5": "--episodes: it is '1.5'; expected a whole number",
    "evaluate RUN --episodes -1e1": "--episodes is -10; expected a whole number of at least 1",
    "evaluate RUN --env-args max_steps_in_episode -1e0": "time_limit is -1",
    "evaluate nowhere --episodes 99999999999": "--episodes is 99999999999; expected at most 1048576",
    "publish nowhere --out hub --episodes 1048577": "--episodes is 1048577; expected at most 1048576",
    f"evaluate RUN --seed {'9' * 30}": "--seed",
    "play RUN --seed -1": "--seed",
    "play RUN --max-steps 0": "--max-steps",
    "play RUN --fps 0": "--fps",
    f"{COLLECT} x.npz --num-envs 99999999999": "num_envs is 99999999999; expected at most",
    "collect nowhere --transitions 0 --out x.npz": "transitions is 0",
    # other numbers
    "train --agent.lr fast": "--agent.lr is 'fast'; expected a number",
    "train --agent.lr nan": "agent.lr is nan; expected",
    "train --agent.lr -1e-3": "agent.lr is -0.001; expected",
    "train --agent.epsilon-start 1.5": "agent.epsilon_start is 1.5; expected",
    "train --agent.tau inf": "agent.tau is inf; expected",
    "train --processor.reward-clip -1": "reward_clip is -1",
    "train --stop-reward nan": "nan",
    "train ppo --agent.gae-lambda 1.5": "agent.gae_lambda ... 1.5 ... from 0 to 1",
    "train sac --agent.temperature 0": "agent.temperature is 0",
    "train sac --buffer.prioritised --buffer.beta 2": "buffer.beta is 2",
    f"{COLLECT} x.npz --random 1.5": "random is 1.5",
    f"{COLLECT} x.npz --noise -1e-1": "noise is -0.1",
    "collect nowhere --transitions 1e4 --out x.npz": "nowhere is no run directory",
    "collect RUN --transitions 5 --out x.npz --noise 0.5": "noise is for actions of a single Box",
    # parameters of environments, which only they or tracing can judge
    "train --env-args gravity": "expected names with values",
    "train --env-args name 1": "no parameter can be called name",
    "evaluate RUN --env_args name X": "no parameter can be called name",
    "train --env-args max_steps_in_episode -5": "-5",
    "train --env-args max_steps_in_episode nan": "nan",
    "train --env-args max_steps_in_episode 1e+300": "1e+300",
    "train --env-args max_steps_in_episode 2147483648.0": "2147483648.0",
    "train --env-args max_steps_in_episode 20.5": "20.5",
    "train --env-args gravity 1e+39": "1e+39",
    "train --env Asterix-MinAtar --env-args ramping 2.0": "2.0",
    "train --env BernoulliBandit-misc --env-args max_steps_in_episode 1e+30": "1e+30",
    # words that are missing, or too many
    "train --seed": "--seed needs a value",
    "train --config": "--config",
    "train --env": "--env",
    "train --env=": "--env",
    "train --run-dir ''": "--run-dir",
    "train --resume=": "needs a value",
    "train --resume ''": "needs a value",
    "train --config=": "needs a value",
    "train --agent.features": "--agent.features needs a value",
    "train --sweep": "--sweep needs a value, as in --sweep agent.lr=1e-4,3e-4",
    "train dqn extra": "unexpected argument 'extra' after dqn",
    "train --no-quiet false": "unexpected argument 'false'",
    "doctor run": "unrecognized arguments: run",
    "evaluate": "run_dir",
    # given twice, on the command line of training and on that of all others
    "train --env Acrobot-v1 --env=CartPole-v1":
        "--env is given twice, as 'Acrobot-v1' and as 'CartPole-v1'; give it once",
    "train --pbt 2000 --pbt=3000": "--pbt is given twice, as '2000' and as '3000'; give it once",
    "train --env-args gravity 9 --env-args=gravity 8":
        "--env-args is given twice, as 'gravity 9' and as 'gravity 8'; give it once",
    "train --resume a --resume=b": "--resume is given twice, as 'a' and as 'b'; give it once",
    "train --config a --config=b": "--config is given twice, as 'a' and as 'b'; give it once",
    "train --process-id 0 --process-id=1": "--process-id is given twice, as '0' and as '1'; give it once",
    "train --quiet --quiet": "--quiet is given twice; give it once",
    "train --agent.double --agent.no-double": "--agent.double and --agent.no-double contradict each other",
    "train --lr 1e-3 --agent.lr 1e-4": "--agent.lr is given twice, as '1e-3' and as '1e-4'",
    "train --env-args gravity 9 gravity 8": "--env-args names gravity twice, as '9' and as '8'",
    "train --halving factor=2 factor=3": "halving names factor twice",
    "evaluate nowhere --step latest --step=best": "--step is given twice, as 'latest' and as 'best'; give it once",
    "evaluate nowhere --epi 3 --episodes 4": "--episodes is given twice",
    "play nowhere --step latest --step=best": "--step is given twice, as 'latest' and as 'best'; give it once",
    "export nowhere --out a --out=b": "--out is given twice, as 'a' and as 'b'; give it once",
    "collect nowhere --transitions 64 --out a.npz --out=b.npz":
        "--out is given twice, as 'a.npz' and as 'b.npz'; give it once",
    "publish nowhere --out a --out=b": "--out is given twice, as 'a' and as 'b'; give it once",
    # settings that do not go together
    "train dqn --env Pendulum-v1": "Pendulum-v1 ... ppo ... a2c ... reinforce",
    "train pqn --env Pendulum-v1": "pqn takes discrete actions ... ppo",
    "train --eval-env Acrobot-v1": "Acrobot-v1 has the observation space ... expected that of CartPole-v1",
    "train --stop-reward 5 --eval-interval 0": "eval_interval",
    "train --patience 2 --eval-interval 0": "eval_interval",
    "train --mesh member=4,envs=2": "mesh has no axis 'member'",
    "train --mesh members=4,envs=two": "mesh envs is 'two'; expected a whole number",
    "train --mesh members=2,envs=2": "a single run has no members to divide devices among; set mesh to envs=2",
    "train --mesh members=2,envs=2 --seeds 2 --devices 6": "set mesh to members=2,envs=3",
    "train ppo --num-envs 3 --minibatches 5": "384 ... 4 or 6",
    "train ppo --agent.core gru --num-envs 6": "6 environments ... 3 or 6",
    "train a2c --processor.n-step 3": "n_step to 1",
    "train ppo --agent.surrogate weighted": "needs V-trace ... agent.rho_clip",
    "train sac --buffer.prioritised --buffer.normalise some": "expected batch or all",
    "train dqn --agent.values c51 --agent.v-min 3 --agent.v-max 3": "expected v_min below v_max",
    "train rainbow --agent.v-min 1e8 --agent.v-max 100000001": "which float32 can resolve",
    "train rainbow --processor.discount 1 --agent.v-max None": "set agent.v_min and agent.v_max",
    "train dqn --agent.values iqn --agent.features 8": "another behind",
    "train dqn --agent.values c51 --agent.munchausen 0.9": "use qr or iqn",
    "train dqn --agent.values iqn --agent.value-rescaling": "set it to expected",
    "train td3 --agent.noise-memory 0.5 --processor.n-step 3": "set processor.n_step to 1",
    "train iql": "data is unset ... --data FILE",
    "train iql --data none.npz": "cannot read none.npz",
    "train iql --data walk.npz --env CartPole-v1": "Walk ... CartPole-v1",
    "train td3_bc --data walk.npz": "td3_bc takes continuous ... Discrete",
    "train bc --data walk.npz --env-args rows 3": "env_args ... env",
    "train bc --data walk.npz --max-env-steps 5": "max_env_steps ... max_opts",
    "train --env gymnasium:CartPole-v1 --actors 2 --exploration 0.1 0.2 0.3": "exploration has 3 numbers for 2 actors",
    "train --env gymnasium:CartPole-v1 --actors 2 --exploration=-0.5": "exploration is -0.5; expected a number from 0",
    "train --env gymnasium:CartPole-v1 --actors 2 --exploration 5":
        "exploration is 5.0; expected a number from 0 to 1",
    "train --env gymnasium:CartPole-v1 --actor-restarts 2":
        "actor_restarts is 2, but threads die with their process; set actor_engine to processes or",
    "train --env gymnasium:CartPole-v1 --exploration-schedule linear(1,0.1,100)":
        "exploration_schedule is what exploration is multiplied by",
    "train --env gymnasium:CartPole-v1 --exploration 0.4 --exploration-schedule fast":
        "cannot read the schedule 'fast'",
    "train --actors 2 --processes": "CartPole-v1 is written in JAX; processes are for environments of",
    # populations
    "train --sweep agent.lrr=1,2": "'agent.lrr' cannot be swept; did you mean agent.lr?",
    "train --sweep seed=1,2": "'seed' cannot be swept; give --seeds",
    "train --sweep env=Catch-bsuite,CartPole-v1": "'env' cannot be swept",
    "train --sweep eval_env=Acrobot-v1,CartPole-v1": "'eval_env' cannot be swept",
    "train --sweep agent.lr=1e-3,1e-3": "sweep of agent.lr names a value twice",
    "train --sweep agent.lr=x": "agent.lr is 'x'; expected a number",
    "train --sweep agent.lr=-1": "agent.lr is -1.0; expected a number from 0 to 1000",
    "train --sweep agent.lr": "--sweep 'agent.lr'; expected a setting and its values",
    "train --sweep agent.lr=1e-3,,1e-4": "--sweep 'agent.lr=1e-3,,1e-4'; expected a setting and its values",
    "train --sweep agent.lr=log_uniform(1e-3)": "cannot read the range 'log_uniform(1e-3)'",
    "train --sweep agent.lr=log_uniform(1e-5,1e-3)": "a range is drawn from, but not how often; set members",
    "train --sweep buffer.batch_size=between(8,16) --members 4": "takes no fractions",
    "train impala --sweep agent.noise=0,1": "'agent.noise' cannot be swept",
    "train --resume RUN --seeds 2": "leave --seeds, --sweep and --members out",
    # directories and files
    "train --run-dir RUN": "RUN holds a run ... --resume RUN, begin again by --start-over",
    "train --run-dir notes": "notes",
    "train --run-dir notes/thoughts.txt": "notes/thoughts.txt",
    "train --run-dir file/below/run": "file/below/run ... Not a directory",
    "train --resume nowhere": "nowhere ... no run directory",
    "train --resume empty": "empty ... no run directory",
    "train --resume notes": "notes ... no run directory",
    "train --resume file": "file ... no run directory ... it is a file",
    "play notes": "notes ... no run directory",
    "evaluate links": "is no run directory: it has no config.yaml",
    "evaluate nowhere": "nowhere is no run directory",
    "report nowhere --csv t.csv": "nowhere is no run directory",
    "report RUN --csv t.txt --json ./t.txt": "name the same file",
    "export RUN --step 7": "keeps no checkpoint of step 7",
    "play RUN --out film.avi": "ends with .gif or .mp4",
    "play RUN --out film": "ends with .gif",
    "play RUN --out missing/film.gif": "cannot write missing/film.gif",
    "collect nowhere --transitions 64 --out nowhere/metrics.jsonl": "lies in the run nowhere, which is only read",
    f"{COLLECT} missing/x.npz": "cannot write missing/x.npz: No such file",
    f"{COLLECT} .": "cannot write .: Is a directory",
    **{f"{words} ''": "is empty; expected a directory or a file" for words in (
        COLLECT, "doctor --json", "evaluate", "export RUN --out", "report RUN --csv", "report RUN --png a.png --out",
    )},
    "doctor --json no/page.json": "no/page.json",
    **{f"{words} {LONG}": "File name too long" for words in (
        "train --run-dir", "evaluate", "verify", "report", "play", "export", "collect --transitions 64 --out x.npz",
        "publish --out hub", "doctor --json", "report RUN --csv", "report RUN --json",
    )},
    f"report RUN --png {LONG}.png": "File name too long",
    "report RUN --png x.pdf": "--png is 'x.pdf'; expected a name that ends with .png",
    **{f"{words}gs://bucket/run": "gs://bucket/run is a URL" for words in (
        "train --run-dir=", "train --init-from=", "train --config=", "train bc --data=", "evaluate ", "verify ",
        "report ", "play ", "export ", "collect --transitions 64 --out x.npz ", "publish --out hub ", "doctor --json=",
    )},
    # going on with a run
    "train --resume RUN --seed 5": "seed: 0 -> 5",
    "train --resume RUN --agent.lr 0.1 --warmup 300": "agent.lr: 0.001 -> 0.1",
    "train --resume RUN --env CartPole-v1": "env: Catch-bsuite -> CartPole-v1",
    "train --resume RUN --config other.yaml": "--config",
    "train --resume RUN --run-dir other": "--run-dir",
}  # fmt: skip
"""What is said of a command, in this order; what is between the parts may be worded otherwise."""


@pytest.mark.parametrize("command", WRONG)
def test_a_command_is_refused_in_one_line_that_says_what_would_do(
    command: str, refuse: Refuse, finished: Finished
) -> None:
    line = refuse(command)
    assert_says(line, named(WRONG[command], finished))
    assert not line.endswith(":")
    if "?" in WRONG[command]:  # a guess is short
        assert len(line) < 200


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such names")
def test_a_run_directory_that_is_not_utf8_is_refused(refuse: Refuse, finished: Finished) -> None:
    shutil.copytree(finished.path, "run\udcff")
    for command in ("train --run-dir new\udcff", "train --resume run\udcff", "evaluate run\udcff", "report run\udcff"):
        assert "is not UTF-8, and no checkpoint can be kept below such a path" in refuse(command)
    Path("in\udcff").mkdir()
    with contextlib.chdir("in\udcff"):
        assert "is not UTF-8" in refuse("train --run-dir new")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_where_the_system_makes_no_directories_nobody_is_told_that_one_is_missing(refuse: Refuse) -> None:
    assert refuse("train --run-dir /proc/run").endswith("'/proc/run': no directory can be made there")
    assert "cannot write /proc/policy: " in refuse("export RUN --out /proc/policy")


# --- files of settings ------------------------------------------------------------------------------------------

WRONG_FILES = {
    # names
    "num_env: 3": "num_envs",
    "agent:\n  lrr: 3": "agent.lr",
    "agent:\n  learning_rate: 1": "did you mean lr?",
    "algo: dqm": "dqn",
    "env: CartPol-v1": "CartPole-v1",
    "3: 4": "unknown setting 3",
    "seed: 1\nagent:\n  lr: 1e-3\n  lr: 1e-4\n": "lr ... twice",
    # values of other types
    **{text: f"mine.yaml: {name} is ... expected" for text, name in (
        ("num_envs: ten", "num_envs"), ("num_envs: 1.5", "num_envs"), ("num_envs: true", "num_envs"),
        ("num_envs: [1]", "num_envs"), ("num_envs: null", "num_envs"), ("max_opts: 1.0e-3", "max_opts"),
        ("env: 3", "env"), ("env: [CartPole-v1]", "env"), ("algo: [dqn]", "algo"), ("quiet: 1", "quiet"),
        ("agent: 3", "agent"), ("agent: null", "agent"), ("agent: [lr]", "agent"),
        ("agent:\n  lr: fast", "agent.lr"), ("agent:\n  lr: true", "agent.lr"),
        (f"agent:\n  lr: {10**400}", "agent.lr"), ("agent:\n  features: 16", "agent.features"),
        ("agent:\n  features: [[16]]", "agent.features"), ("env_args: [1]", "env_args"),
        ("run_dir: 3", "run_dir"), ("stop_reward: high", "stop_reward"), ("custom: 3", "custom"),
    )},
    "population: {sweep: 5}": "population.sweep is 5; expected settings, as in agent.lr: [",
    "population: {sweep: [1, 2]}": "population.sweep is [1, 2]; expected settings, as in agent.lr: [",
    "population: {sweep: {1: [1]}}": "population.sweep is {1: [1]}; expected settings, as in agent.lr: [",
    "population: {1: 2}": "unknown setting population.1; known: ... seeds, sweep",
    "population: {seedz: 2}": "unknown setting population.seedz; did you mean seeds?",
    # what is no file of settings
    **dict.fromkeys((
        "", "- env\n- seed", "CartPole-v1", "env: [", "env: 'CartPole", "a: b: c", "\tenv: x", "env: *nothing",
        "? [a, b]\n: c", "seed: " + "9" * 5000, "env: " + "[" * 5000, "env: " + "{a: " * 5000,
        "\x80\x04\x95\x19", "!!python/object/apply:os.mkdir [made]", "env: !!python/object/apply:os.mkdir [made]",
        "env: !!python/name:os.system",
    ), "mine.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG_FILES, ids=lambda text: text[:30])
def test_a_file_is_refused_by_its_name_and_that_of_the_setting(text: str, refuse: Refuse) -> None:
    Path("mine.yaml").write_text(text, encoding="latin-1")  # some are no text
    assert_says(refuse("train --config mine.yaml"), WRONG_FILES[text])


BOMB = (
    "[&a [x, x, x, x, x, x, x, x, x, x], "
    + ", ".join(f"&{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True))
    + "]"
)
"""Ten billion items in a few lines, for whoever writes them out."""


@pytest.mark.parametrize("key", ["env", "algo", "custom", "num_envs", "run_dir", "agent", "nothing"])
def test_a_file_that_would_fill_the_memory_is_refused_in_few_words(refuse: Refuse, key: str) -> None:
    Path("mine.yaml").write_text(f"{key}: {BOMB}\n")
    assert len(refuse("train --config mine.yaml")) < 500


@pytest.mark.parametrize(("name", "said"), [("missing.yaml", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused(refuse: Refuse, name: str, said: str) -> None:
    assert said in refuse(f"train --config {name}")


# --- runs that are not as they were written ---------------------------------------------------------------------


def test_a_run_without_a_best_policy_is_refused(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "best")
    for main in (evaluate.main, play.main):
        with pytest.raises(NoCheckpointError, match="no best policy"):
            main([str(tmp_path / "run")])


def test_a_run_whose_algorithm_is_no_name_is_refused_where_it_is_named_too(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("algo: dqn", "algo: [dqn]"))
    with pytest.raises(SettingsError, match=r"algo is \['dqn'\]; expected a name"):
        train.main(["dqn", "--resume", str(tmp_path / "run")])


def test_settings_of_a_stranger_that_the_environment_cannot_hold_are_refused(
    finished: Finished, tmp_path: Path
) -> None:
    shutil.copytree(finished.path, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("env_args: {}", "env_args: {max_steps_in_episode: 1.0e+300}"))
    before = snapshot(tmp_path)
    with pytest.raises(SettingsError, match=r"max_steps_in_episode is 1e\+300; expected a whole number"):
        train.main(["--resume", str(tmp_path / "run"), "--max-opts", "80"])
    assert snapshot(tmp_path) == before
