"""Tables of what is learnt: by presets, in suites, from data and demonstrations, and by searches."""

import re
import statistics
from collections.abc import Sequence
from itertools import product

from benchmarks import begin, distil, harness, learning, offline, search
from benchmarks.harness import markdown, spaced
from benchmarks.tables.results import Result, Row, figure, prose, results, source
from jaxrl.nn import CORES
from jaxrl.registry import split_suite

PRESETS = "Measured with the versions of jaxrl in the last column (`benchmarks/results/*-learning-*.json`)."
"""The line below figures of many files."""


def presets() -> list[Result]:
    """Return all results of `benchmarks.learning`."""
    return [
        Result(one.file, one.header, [_dated(row, one) for row in one.rows]) for one in results("*-learning-*.json")
    ]


def _dated(row: Row, of: Result) -> Row:
    return {**row, "jaxrl": of.header["jaxrl"]}


def reached(*algos: str) -> str:
    """Return what presets reach, of some algorithms or of all."""
    rows = [row for one in presets() for row in one.rows if not algos or row["algo"] in algos]
    return f"{learning.documented(rows)}\n\n{PRESETS}"


def judged() -> str:
    """Return how greedy actions compare with sampled ones."""
    found = results("*-judging*.json")
    return f"{by_actions([row for one in found for row in one.rows])}\n\n{source(found)}"


PLAYED = {
    "last, greedy": ("last", "greedy"),
    "last, sampled": ("last", "sampled"),
    "best by greedy, played greedily": ("best_by_greedy", "greedy"),
    "best by sampled, played greedily": ("best_by_sampled", "greedy"),
    "sampled": ("best_by_sampled", "sampled"),
}
"""Columns of policies by how they were chosen, and by how they played."""


def by_actions(rows: Sequence[Row]) -> str:
    """Return a table of evaluations by greedy and by sampled actions: means over the seeds, the worst in brackets."""
    lines = []
    for env, algo in dict.fromkeys((row["env"], row["algo"]) for row in rows):
        of_task = [row for row in rows if (row["env"], row["algo"]) == (env, algo)]
        ends = [row["moments"]["end"] for row in of_task]
        steps = f"{statistics.mean(row['env_steps'] for row in of_task):,.0f}".replace(",", " ")
        played = [[end["training"] for end in ends], *([end[of][mode] for end in ends] for of, mode in PLAYED.values())]
        means = [f"{statistics.mean(values):.1f} ({min(values):.1f})" for values in played]
        apart = [f"{distance(of_task, mode):.1f}" for mode in ("greedy", "sampled")]
        lines.append([env, f"`{algo}`", steps, *means, *apart])
    head = ["environment", "agent", "environment steps", "training", *PLAYED, "distance of greedy", "of sampled"]
    return markdown(head, lines)


def distance(rows: Sequence[Row], mode: str) -> float:
    """Return how far evaluations lie from the training return of their interval, in the mean over all of `rows`."""
    pairs = [(point[mode], point["training"]) for row in rows for point in row["curve"]]
    return statistics.mean(abs(score - training) for score, training in pairs if training is not None)


def default_command() -> str:
    """Return what the default command reaches."""
    of = {row["seed"]: (row, one) for one in presets() for row in one.rows if _is_default(row)}
    rows = [row for row, _ in of.values()]
    best, last = ([row[name] for row in rows] for name in ("best", "last"))
    later, steady = ([row[name] for row in rows] for name in ("later", "steady"))
    sentences = (
        f"The default command, seeds {min(of)} to {max(of)}, {spaced(rows[0]['env_steps'])} environment steps each: "
        f"over 100 fresh episodes the best policies hold the pole for {_ends(best, ':g')} of 500 steps, the last ones "
        f"for {_ends(last, ':.1f')}.",
        f"From the first evaluation of 475 on, {_ends(steady, ':.0%')} of the {_ends(later)} later ones are as good "
        "(`python -m benchmarks.learning --algo dqn --env CartPole-v1`).",
    )
    return f"{prose(' '.join(sentences))}\n\n{source(one for _, one in of.values())}"


def _ends(values: Sequence[float], form: str = "") -> str:
    """Return the least and the largest of some numbers."""
    written = (f"{{{form}}}".format(x) for x in (min(values), max(values)))
    return " to ".join(dict.fromkeys(written))


def _is_default(row: Row) -> bool:
    return (row["algo"], row["env"], row["preset"], row["flags"]) == ("dqn", "CartPole-v1", True, [])


def without_preset() -> str:
    """Return what agents reach by generic settings."""
    (found,) = results("*-learning-generic.json")[-1:]
    rows = [_dated({**row, "preset": True}, found) for row in found.rows]
    return f"{learning.documented(rows)}\n\n{source([found])}"


BFLOAT16 = (("dqn", "CartPole-v1"), ("ppo", "CartPole-v1"), ("ppo", "Pendulum-v1"), ("sac", "Pendulum-v1"))
BFLOAT16 += (("ppo", "Breakout-MinAtar"),)


def bfloat16() -> str:
    """Return the last policies of presets with bfloat16, beside those without."""
    found, lines = presets(), []
    for algo, env in BFLOAT16:
        both = [_last(found, algo, env, flags) for flags in (["--agent.dtype", "bfloat16"], [])]
        cells = [cell for rows in both for cell in _of_each([row["last"] for row in rows])]
        version = harness.versions(row["jaxrl"] for rows in both for row in rows)
        lines.append([f"`{algo}` on {env}", *cells, version])
    head = ["", "bfloat16", "of each seed", "float32", "of each seed", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


def _of_each(returns: Sequence[float]) -> list[str]:
    return [learning.mean_and_deviation(returns), ", ".join(f"{x:.0f}" for x in sorted(returns))]


def _last(found: Sequence[Result], algo: str, env: str, flags: list[str]) -> list[Row]:
    """Return the latest row of each seed of a preset with these flags."""
    own = lambda row: (row["algo"], row["env"], row["preset"], row["flags"]) == (algo, env, True, flags)
    return [*{row["seed"]: row for one in found for row in one.rows if own(row)}.values()]


SUITES = {
    "`pgx:2048`, the preset": ("2048-preset", "pgx:2048"),
    "`pgx:2048`, the settings below": ("2048-with-mask", "pgx:2048"),
    "`pgx:2048` without its mask (`benchmarks.masks:pgx_2048`)": ("2048-without-mask", "benchmarks.masks:pgx_2048"),
    "`jumanji:Snake-v1`, 12 x 12 fields (143 to fill), the preset": ("snake-12x12-seed-*", "jumanji:Snake-v1"),
    "the same without its mask (`benchmarks.masks:snake_unmasked`)": ("snake-12x12-without-mask", ""),
    "`jumanji:Snake-v1` on 6 x 6 fields, 35 to fill (`benchmarks.masks:snake`)": (
        "snake-with-mask",
        "benchmarks.masks:snake",
    ),
    "6 x 6 without its mask (`benchmarks.masks:snake_unmasked`)": (
        "snake-without-mask",
        "benchmarks.masks:snake_unmasked",
    ),
    "`jaxmarl:coin_game`, two agents with shared rewards": ("coin-game", "jaxmarl:coin_game"),
    "`jaxmarl:MPE_simple_spread_v3`, not learnt well": ("simple-spread", "jaxmarl:MPE_simple_spread_v3"),
}
"""Learning results of suites: the names of result files, and the environment of random play."""


def suites() -> str:
    """Return what PPO reaches in suites, beside random actions."""
    chance = {row["env"]: (row, one) for one in results("*-random-*.json") for row in one.rows}
    lines, used = [], []
    for title, (file, env) in SUITES.items():
        cells = _best(f"ppo-{file}")
        row, one = chance.get(env, (None, None))
        used += [one] if one else []
        random = learning.mean_and_deviation([row["returns"]["mean"]]) if row else ""
        lines.append([title, *cells[:-1], random, cells[-1]])
    head = ["environment", "environment steps", "seeds", "PPO", "random", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}\n\n{source(used, 'Random play measured')}"


def _best(name: str) -> list[str]:
    """Return environment steps, seeds, return of the best policy and version of results of `benchmarks.learning`."""
    rows = [_dated(row, one) for one in results(f"*-learning-{name}.json") for row in one.rows]
    best = learning.mean_and_deviation([row["best"] for row in rows])
    return [spaced(rows[0]["env_steps"]), str(len(rows)), best, harness.versions(row["jaxrl"] for row in rows)]


PLAYGROUND = {
    "BallInCup": (172, 0, 187),
    "CartpoleBalance": (983, 995, 897),
    "CartpoleSwingup": (298, 783, 680),
    "CartpoleSwingupSparse": (12, 222, 2),
    "FingerSpin": (197, 651, 531),
    "PendulumSwingup": (47, 368, 3),
    "ReacherEasy": (950, 917, 856),
}
"""Returns after 10.5 million environment steps of Brax's PPO, FastTD3 and REPPO, means over 5, 22 to 30 and 40 to 47
runs, which the authors of REPPO publish: `results/TASK_*.csv` (`ppo_brax`, `fasttd3_small`, `full_small_data`) of
https://github.com/cvoelcker/reppo/tree/a7ab85b."""


def playground() -> str:
    """Return what small agents reach in MuJoCo Playground, beside published returns at as many steps."""
    rows = [row for one in presets() for row in one.rows if row["env"].startswith("playground:")]
    lines = []
    for task, published in PLAYGROUND.items():
        of_task = [row for row in rows if row["env"] == f"playground:{task}"]
        for algo in sorted({row["algo"] for row in of_task}):
            own = [row for row in of_task if row["algo"] == algo]
            version = harness.versions(row["jaxrl"] for row in own)
            lines.append([task, f"`{algo}`", *_policies(own), *map(str, published), version])
    counts = ["environment steps", "seeds"]
    head = ["task", "agent", *counts, "best policy", "last", "Brax PPO", "FastTD3", "REPPO", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


def _policies(rows: Sequence[Row]) -> list[str]:
    """Return environment steps, seeds, and the returns of the best and the last policies."""
    reached = (learning.mean_and_deviation([row[name] for row in rows]) for name in ("best", "last"))
    return [spaced(rows[0]["env_steps"]), str(len(rows)), *reached]


MUJOCO = {
    "HalfCheetah-v4": {"sac": (4212, 6156), "crossq": (6345, 8112)},
    "Hopper-v4": {"sac": (530, 1103), "crossq": (1421, 2764)},
    "Walker2d-v4": {"sac": (384, 690), "crossq": (1096, 3914)},
}
MUJOCO_STEPS = (50_000, 100_000)
"""Environment steps, and the returns of evaluations then by task and agent, means over ten seeds: SAC's (at 49 998 and
99 996) and CrossQ's from `results/baseline/*.csv` of https://github.com/dojeon-ai/SimbaV2 (commit 14fafb2)."""
MUJOCO_PPO = {"HalfCheetah-v4": "5783.9 ± 1244.0", "Hopper-v4": "2609.3 ± 700.8", "Walker2d-v4": "3588.5 ± 756.6"}
"""Evaluations of PPO in version 3, mean and standard deviation over ten seeds, where the mean was highest in the first
million of three million steps: `examples/mujoco/README.md` of https://github.com/thu-ml/tianshou (commit f240205)."""


def mujoco() -> str:
    """Return the evaluations of agents in Gymnasium's MuJoCo tasks, beside published ones after as many steps."""
    rows = [row for row in _in_mujoco() if row["algo"] != "ppo"]
    how = lambda row: (split_suite(row["env"])[1], row["algo"], _settings(row))
    lines = []
    for task, algo, settings in sorted({how(row) for row in rows}):
        own = [row for row in rows if how(row) == (task, algo, settings)]
        for published, at in zip(MUJOCO[task].get(algo, ("", "")), MUJOCO_STEPS, strict=True):
            scores = [score for row in own for steps, score in row["curve"] if steps == at]
            if scores:
                told = [spaced(at), str(len(scores)), learning.mean_and_deviation(scores), str(published)]
                version = harness.versions(row["jaxrl"] for row in own)
                lines.append([task, f"`{algo}`", settings, *told, version])
    head = ["task", "agent", "settings", "environment steps", "seeds", "evaluation", "published", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


def _in_mujoco() -> list[Row]:
    return [row for one in presets() for row in one.rows if split_suite(row["env"])[1] in MUJOCO]


def _settings(row: Row) -> str:
    """Return the flags of a row but those that say how long to train and when to evaluate."""
    flags = re.split(r" (?=--)", " ".join(row["flags"])) if row["flags"] else []
    own = [flag for flag in sorted(flags) if not flag.startswith(("--max-opts", "--eval-interval", "--eval-episodes"))]
    return f"`{' '.join(own)}`" if own else "the preset" if row["preset"] else "the defaults"


def mujoco_ppo() -> str:
    """Return what the preset of PPO reaches in Gymnasium's MuJoCo tasks, beside Tianshou's."""
    rows, lines = [row for row in _in_mujoco() if row["algo"] == "ppo" and row["preset"] and not row["flags"]], []
    for task, published in MUJOCO_PPO.items():
        own = [row for row in rows if split_suite(row["env"])[1] == task]
        lines.append([task, *_policies(own), published, harness.versions(row["jaxrl"] for row in own)])
    head = ["task", "environment steps", "seeds", "best policy", "last policy", "Tianshou", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


CRAFTAX_MOST = 226
"""The largest return of an episode of Craftax-Symbolic-v1, as its authors count it."""
CRAFTAX = {("ppo", "none"): "2.2", ("ppo", "gru"): "2.3"}
"""Percent of it after a million environment steps, by agent and core, of the table in
https://github.com/MichaelTMatthews/Craftax (commit c3c2e0d)."""


def craftax() -> str:
    """Return what agents reach in Craftax in a million steps, with and without memory, beside published shares."""
    rows = [row for one in presets() for row in one.rows if row["env"] == "craftax:Craftax-Symbolic-v1"]
    kind = lambda row: (row["algo"], row["settings"]["agent"]["core"], row["settings"]["num_envs"])
    lines = []
    for algo, core, num_envs in sorted({kind(row) for row in rows}):
        own = [row for row in rows if kind(row) == (algo, core, num_envs)]
        returns = [row["last"] for row in own]
        share = f"{100 * statistics.fmean(returns) / CRAFTAX_MOST:.1f}"
        counts = [str(num_envs), spaced(own[0]["env_steps"]), str(len(own))]
        version = harness.versions(row["jaxrl"] for row in own)
        published = CRAFTAX.get((algo, core), "")
        lines.append([f"`{algo}`", f"`{core}`", *counts, f"{statistics.fmean(returns):.2f}", share, published, version])
    head = ["agent", "core", "environments", "environment steps", "seeds", "return", "in %", "published, in %", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


def memory() -> str:
    """Return what a task of memory is worth with a recurrent core and without."""
    names = {
        "the preset": "ppo-memory-s8-gru-seed-*",
        "`--agent.core mingru --agent.core-layers 2 --epochs 4`": "ppo-memory-s8-mingru-4-epochs-seed-*",
        "`--agent.core mingru`": "ppo-memory-s8-mingru-seed-*",
        "`--agent.core none`": "ppo-memory-s8-no-core",
    }
    lines = [[title, *_best(name)] for title, name in names.items()]
    head = ["`MiniGrid-MemoryS8`", "environment steps", "seeds", "best policy", "jaxrl"]
    return f"{markdown(head, lines)}\n\n{PRESETS}"


def demonstrations() -> str:
    """Return what demonstrations beside replay save."""
    (found,) = results("*-demos.json")[-1:]
    lines = []
    for length in dict.fromkeys(row["length"] for row in found.rows):
        of = lambda demos, length=length: [r for r in found.rows if (r["length"], r["demos"]) == (length, demos)]
        lines.append([str(length), _opened(of(False)), _opened(of(True))])
    return f"{markdown(['turns', 'alone', 'with demonstrations'], lines)}\n\n{source([found])}"


def _opened(rows: Sequence[Row]) -> str:
    steps = sorted(row["env_steps_to_open"] for row in rows if row["env_steps_to_open"] is not None)
    ends = " to ".join(dict.fromkeys(spaced(x) for x in (steps[0], steps[-1]))) if steps else ""
    never = len(rows) - len(steps)
    return ", ".join(filter(None, [ends, f"{never} of {len(rows)} seeds never" if never else ""]))


def beginnings() -> str:
    """Return what PPO saves that begins with what was shown."""
    (found,) = results("*-begin.json")[-1:]
    lines = []
    for pay, how in product(begin.PAYS, begin.HOW):
        rows, alone = ([r for r in found.rows if (r["pay"], r["how"]) == (pay, way)] for way in (how, "alone"))
        # Of a run that never came to it, all the steps that it took.
        steps = [row["curve"][-1][0] for row in rows]
        mean, span = statistics.mean(steps), " to ".join(dict.fromkeys(map(figure, search.bounds(steps))))
        never = sum(begin.steps_to_good(row) is None for row in rows)
        missed = f", {never} of {len(rows)} seeds never" if never else ""
        first = statistics.mean(row["curve"][0][1] for row in rows)
        share = mean / statistics.mean(row["curve"][-1][0] for row in alone)
        lines.append([pay, how, f"{first:.3g}", f"{figure(mean)} ({span}){missed}", f"{share:.2f}"])
    head = ["paid", "PPO", "before any step", f"environment steps to {begin.GOOD} a climb", "of those alone"]
    return f"{markdown(head, lines)}\n\n{source([found])}"


def students() -> str:
    """Return how far students come that see less than their teachers."""
    (found,) = results("*-distil.json")[-1:]
    lines = []
    for env in dict.fromkeys(row["env"] for row in found.rows):
        rows = [row for row in found.rows if row["env"] == env]
        returns = [learning.mean_and_deviation([row[name] for row in rows]) for name in ("teacher", "student", "alone")]
        shares = [distil.share(row) for row in rows]
        lines.append([env, *returns, f"{rows[0]['random']:.0f}", f"{min(shares):.1%} to {max(shares):.1%}"])
    head = ["environment", "teacher", "student", "its agent without a teacher", "random", "of the way to the teacher"]
    return f"{markdown(head, lines)}\n\n{source([found])}"


def from_data() -> str:
    """Return what offline agents reach, and what their data are."""
    (found,) = results("*-offline.json")[-1:]
    lines = []
    for env, about in found.header["data"].items():
        halves = [f"{mean:.0f}" for mean in about["data_returns"]]
        lines.append([env, f"{about['pilot_return']:.0f}", *halves])
    data = markdown(["environment", "pilot, greedy", "its half of the data", "the random half"], lines)
    return f"{data}\n\n{offline.documented(found.rows)}\n\n{source([found])}"


def from_data_beside() -> str:
    """Return what offline agents reach beside JAX-CORL's, from the same data."""
    found = results("*-offline-jax-corl-*.json")
    return f"{offline.documented_beside([row for one in found for row in one.rows])}\n\n{source(found)}"


def searches() -> str:
    """Return what searches find."""
    (found,) = results("*-search.json")[-1:]
    return f"{search.documented(found.rows)}\n\n{source([found])}"


def cores() -> str:
    """Return after how many environment steps an agent with each recurrent core has learnt tasks of memory."""
    measured = [one for one in results("*cores-memory-*.json") if one.rows and one.rows[0]["seed"] is not None]
    name_of = lambda row: (row["algo"], row["task"], row["core"], row["seed"])
    # Of a run that was measured again, the latest.
    latest = {name_of(row): (row, one) for one in measured for row in one.rows}
    rows = [row for row, _ in latest.values()]
    used = [one for one in measured if any(one is taken for _, taken in latest.values())]
    columns = [*dict.fromkeys((row["algo"], row["task"]) for row in rows)]
    of = lambda column, core: [row for row in rows if (row["algo"], row["task"], row["core"]) == (*column, core)]
    cores = ("none", *CORES)
    lines = [[f"`{core}`", *(_learnt(of(column, core)) for column in columns)] for core in cores]
    head = ["core", *(f"`{algo}`, {task}" for algo, task in columns)]
    counts = sorted({len(of(column, core)) for column in columns for core in cores} - {0})
    several = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    seeds = (
        f"The fastest and the slowest of {several} seeds; in brackets after how many steps the others were given up."
    )
    return f"{markdown(head, lines)}\n\n{seeds}\n\n{source(used)}"


def _learnt(rows: Sequence[Row]) -> str:
    steps = sorted(row["env_steps"] for row in rows if row["env_steps"] is not None)
    ends = " to ".join(dict.fromkeys(spaced(x) for x in (steps[0], steps[-1]))) if steps else ""
    never = [row["tried"] for row in rows if row["env_steps"] is None]
    told = f"{len(never)} of {len(rows)} not ({spaced(max(never))})" if never else ""
    return ", ".join(filter(None, [ends, told]))
