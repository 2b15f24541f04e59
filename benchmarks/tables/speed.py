"""Tables of speed: of training, its parts, peers, populations, recorders, and of what compiled programs are made of."""

from collections.abc import Mapping

from benchmarks import scale
from benchmarks.compiled import shards
from benchmarks.harness import markdown, spaced
from benchmarks.peers import settings
from benchmarks.tables.results import Row, Rows, compiled_for, figure, prose, results, source
from jaxrl.nn import CORES

TRAINING = {
    "dqn-1": "DQN, CartPole-v1, MLP 120-84, batch 128; 1 environment",
    "dqn-10": "the same, 10 environments",
    "dqn-128": "the same, 128 environments",
    "dqn-1024": "the same, 1024 environments",
    "seeds-32": "the same, 10 environments, 32 seeds in one program",
    "dqn-small": "the same, 10 environments, MLP 64-64, batch 32",
    "dqn-conv": "DQN, Breakout-MinAtar, convolution, batch 32",
    "sac": "SAC, Pendulum-v1, MLPs 256-256, batch 256",
    "ppo-4": "PPO, CartPole-v1, MLPs 64-64; 4 environments",
    "ppo-64": "the same, 64 environments",
    "ppo-1024": "the same, 1024 environments",
}
"""Cases of `benchmarks.run`, by what the page calls them."""


def learnt(row: Row) -> str:
    """Return what a row learnt while it was timed."""
    return f"return {figure(row['learnt']['mean_return'])} after {spaced(row['learnt']['opt_steps'])}"


def in_short() -> str:
    """Return what README shows of speed."""
    rows = Rows("benchmarks.run")
    titles = {
        "dqn-10": "DQN, CartPole-v1, 10 environments, MLP 120-84, batch 128",
        "ppo-64": "PPO, CartPole-v1, 64 environments, MLPs 64-64",
        "dqn-conv": "DQN, Breakout-MinAtar, convolution, batch 32",
    }
    lines = [
        [title, figure(row["opt_steps_per_sec"]), figure(row["env_steps_per_sec"]), learnt(row)]
        for name, title in titles.items()
        for row in [rows[name]]
    ]
    head = ["", "optimisation steps a second", "environment steps a second", "learned meanwhile"]
    return f"{markdown(head, lines)}\n\n{source(rows.used)}"


def training() -> str:
    """Return training against its parts, a bare scan, the device and a plain loop."""
    rows = Rows("benchmarks.run")
    ratio = lambda row, name, digits: f"{row[name]:.{digits}f}" if name in row else ""
    lines = [
        [
            f"{title} ({learnt(row)}{' each' if name.startswith('seeds') else ''})",
            figure(row["us_per_opt_step"]),
            "" if name.startswith("seeds") else ratio(row, "ratio_to_ceiling", 2),
            ratio(row, "ratio_to_scan", 2),
            ratio(row, "ratio_to_device", 1),
            figure(row["env_steps_per_sec"]),
            ratio(row, "times_faster_than_plain", 1),
        ]
        for name, title in TRAINING.items()
        for row in [rows[name]]
    ]
    head = ["", "us per optimisation step", "times its parts", "times a bare scan", "times the device"]
    head += ["environment steps a second", "plain loop takes, times"]
    return f"{markdown(head, lines)}\n\n{source(rows.used)}"


def parts() -> str:
    """Return what environments, large buffers, a session and a trainer take."""
    rows = Rows("benchmarks.run")
    few, many = rows["env-10"], rows["env-1024"]
    low, _, high = rows["session"]["spread"]
    sentences = (
        f"Environments alone, with random actions and auto-reset, take {few['us_per_opt_step']:.1f} us for a vector "
        f"step of 10 and {many['us_per_opt_step']:.0f} us for one of 1024; gymnax's own `step` in a loop takes "
        f"{few['times_faster']:.1f} and {many['times_faster']:.1f} times as long.",
        "With a capacity of 10^6 transitions, an iteration takes "
        f"{rows['capacity 1,000,000']['ratio_to_ceiling']:.2f} times as long as with 10^4.",
        f"A step of a session takes {low:.0f} to {high:.0f} us in addition to the optimisation.",
        "The default run through `Trainer`, with evaluations, records and saves, takes "
        f"{rows['host']['ratio_to_ceiling']:.2f} times as long in training as one bare call of the same iterations.",
    )
    return f"{prose(' '.join(sentences))}\n\n{source(rows.used)}"


def start() -> str:
    """Return what the command takes to begin."""
    rows = Rows("benchmarks.run")
    cold, warm = rows["start cold"], rows["start warm"]
    seconds = lambda row: f"{row['us_per_opt_step'] / 1e6:.1f} s"
    sentence = (
        f"From the command (`{cold['settings']['command']}`, DQN on CartPole-v1) to its optimisation step it takes "
        f"{seconds(cold)} with empty caches and {seconds(warm)} with filled ones; to the end of the run "
        f"{cold['whole_command_s']:.1f} and {warm['whole_command_s']:.1f} s."
    )
    return f"{prose(sentence)}\n\n{source(rows.used)}"


BUFFERS = ("uniform", "prioritised", "prioritised, weights over all", "flashbax uniform", "flashbax prioritised")


def replay() -> str:
    """Return what replay takes alone, beside flashbax's."""
    rows = Rows("benchmarks.run")
    cell = lambda size, name: figure(rows[f"replay {size} {name}"]["us_per_opt_step"])
    lines = [[name, *(cell(size, name) for size in ("10,000", "1,000,000"))] for name in BUFFERS]
    return f"{markdown(['us', 'of 10^4', 'of 10^6'], lines)}\n\n{source(rows.used)}"


def actors() -> str:
    """Return how fast a learner with actors is."""
    rows = Rows("benchmarks.run")
    found = {"threads": rows["actors"], "processes": rows["actors-processes"]}
    lines = [
        [name, figure(row["us_per_opt_step"]), f"{row['ratio_to_ceiling']:.1f}", learnt(row)]
        for name, row in found.items()
    ]
    head = ["actors in", "us per optimisation step", "times the slower side alone", "learned meanwhile"]
    return f"{markdown(head, lines)}\n\n{source(rows.used)}"


LIBRARIES = {
    "rejax": "Rejax",
    "purejaxrl": "PureJaxRL",
    "stable-baselines3": "Stable-Baselines3",
    "sbx": "SBX",
    "tianshou": "Tianshou",
}
TASKS = {"": "DQN, 10 environments", "-ppo-4": "PPO, 4 environments", "-ppo-1024": "PPO, 1024", "-sac": "SAC"}
WIDTHS = {
    f"-{algo}-width-{width}": f"{algo.upper()}, 2 x {width}" for algo in ("dqn", "ppo") for width in settings.WIDTHS
}
SEEDS = {
    "-dqn-8": "DQN, 10 environments, 8 seeds",
    "-dqn-32": "DQN, 32 seeds",
    "-ppo-4-32": "PPO, 4 environments, 32 seeds",
}


def peers(tasks: Mapping[str, str]) -> str:
    """Return how many times as long as jaxrl others take for some tasks."""
    rows, lines = Rows("benchmarks.peers"), []
    for name, title in LIBRARIES.items():
        own = [rows.get(name + task) for task in tasks]
        if any(own):
            (first, *_) = filter(None, own)
            version = next((first["versions"][each] for each in (name, f"{name}-rl") if each in first["versions"]), "")
            lines.append(
                [f"{title} {version}".strip(), *(f"{row['ratio_to_ceiling']:.3g}" if row else "" for row in own)]
            )
    return f"{markdown(['', *tasks.values()], lines)}\n\n{source(rows.used)}"


GPU, GPU_CORES = "H100", ("none", "mingru", "gru")
"""The device of the table of a GPU, by a part of its name, and the cores that were run there."""


def gpu() -> str:
    """Return what was measured on a GPU: beside peers, beside a plain loop, and whether agents repeat themselves."""
    beside, own = Rows("benchmarks.peers", GPU), Rows("benchmarks.campaign", GPU)
    took = [figure(beside[f"jaxrl{task}"]["us_per_opt_step"]) for task in TASKS]
    lines = [["jaxrl, us an optimisation step", *took]]
    for name in ("rejax", "purejaxrl"):
        rows = [beside.get(name + task) for task in TASKS]
        lines.append(
            [f"{LIBRARIES[name]}, times as long", *(f"{row['ratio_to_ceiling']:.2f}" if row else "" for row in rows)]
        )
    cases = {"dqn-10": "DQN, 10 environments", "dqn-4096": "DQN, 4096", "ppo-1024": "PPO, 1024"}
    trained = [
        [
            f"{title} ({learnt(row)})",
            figure(row["us_per_opt_step"]),
            figure(row["env_steps_per_sec"]),
            f"{row['kernels_per_opt_step']:.0f}",
            f"{row['ratio_to_scan']:.2f}",
            f"{row['times_faster_than_plain']:.2f}",
        ]
        for case, title in cases.items()
        for row in [own[case]]
    ]
    head = ["", "us an optimisation step", "environment steps a second", "kernels", "times a bare scan"]
    (correct,), (kernels,), (memory,) = (
        results(f"*-{GPU.lower()}-{name}.json")[-1:] for name in ("correct", "kernels", "memory")
    )
    envs = own["env-65536"]
    agents = [row for row in correct.rows if row["repeated"]]
    counted = ", ".join(f"`{row['case']}` {row['kernels_per_iteration']}/{row['predicted']}" for row in kernels.rows)
    took_core = {row["core"]: row for row in memory.rows}
    none, scan, gru = (took_core[core] for core in GPU_CORES)
    sentences = (
        f"{len(agents)} of {len(correct.rows)} agents came twice to the same bits, and after one iteration in full "
        f"precision were at most {max(row['apart'] for row in correct.rows):.1g} of its step from the CPU's.",
        f"Kernels of an iteration beside those predicted: {counted}.",
        f"65 536 environments of CartPole-v1 make {envs['env_steps_per_sec'] / 1e9:.2f} thousand million steps a "
        "second with random actions.",
        f"PPO takes {figure(none['us_per_opt_step'])} us an optimisation step without a core, "
        f"{scan['ratio_to_none']:.1f} times as long with `mingru`, and {gru['ratio_to_none']:.1f} times with `gru`.",
    )
    used = [*beside.used, *own.used, correct, kernels, memory]
    tables = f"{markdown(['', *TASKS.values()], lines)}\n\n{markdown([*head, 'plain loop takes, times'], trained)}"
    return f"{tables}\n\n{prose(' '.join(sentences))}\n\n{source(used)}"


def members() -> str:
    """Return what many members cost beside few."""
    rows = Rows("benchmarks.population")
    us = {name: rows[f"members {name}"] for name in ("1", "8", "32", "32 on one core")}
    one, eight, many = (figure(us[name]["us_per_opt_step"]) for name in ("1", "8", "32"))
    compiling = [rows[f"compiling 32 {layout}"]["ratio_to_one"][1] for layout in ("spread", "together")]
    named = {
        "32 members of 3 600 steps, as often as the preset has it": rows["host 32"],
        "8 members of 18 000 steps, intervals five times as long": rows["longer 8"],
        "256 members of PPO together, 2 000 steps, as often as the preset has it": rows["together 256"],
    }
    parts = [(kind, part) for part in ("whole", "evaluated") for kind in ("share", "processor_share")]
    lines = [[title, *(f"{1 + row[kind][part][1]:.2f}" for kind, part in parts)] for title, row in named.items()]
    head = ["times as long as training alone", "all", "all, processor time"]
    head += ["evaluations alone", "evaluations alone, processor time"]
    sentences = (
        f"An optimisation step of 1, 8 and 32 members takes {one}, {eight} and {many} us.",
        f"Kept to one core, 32 take {us['32 on one core']['ratio_to_ceiling']:.1f} times as long as on two.",
        f"To compile takes {compiling[0]:.2f} times as long for 32 members as for one, and {compiling[1]:.2f} times as "
        "long where they train together.",
    )
    return f"{prose(' '.join(sentences))}\n\n{markdown(head, lines)}\n\n{source(rows.used)}"


def recorders() -> str:
    """Return what recorders cost."""
    (found,) = results("*-recorders.json")[-1:]
    ppo, dqn = ({row["algo"]: row["recorders"] for row in found.rows}[algo] for algo in ("ppo", "dqn"))
    percent = lambda costs, name: f"{100 * costs[name][1]:.2f}"
    cells = lambda costs: [percent(costs, "share"), percent(costs, "own"), f"{costs['cpu_s'][1]:.2f}"]
    lines = [[name if name == "none" else f"`{name}`", *cells(ppo[name]), *cells(dqn[name])] for name in ppo]
    head = [f"{algo}: {what}" for algo in ("PPO", "DQN") for what in ("in %", "recorders, in %", "processor, in s")]
    return f"{markdown(['', *head], lines)}\n\n{source([found])}"


def atari() -> str:
    """Return what a vector step of a game of Atari takes, in compiled programs and on the host."""
    (found,) = results("*-atari.json")[-1:]
    names = {
        "ale, compiled": "`ale:{}`, in a compiled loop",
        "ale, host": "`ale:{}`, as an actor steps it",
        "gymnasium": "`gymnasium:ALE/{}-v5`, as an actor steps it",
        "gymnasium, processes": "the same with `--processes`",
        "envpool": "`envpool:{}-v5`, as an actor steps it",
    }
    per_second = lambda row, name: figure(1e6 / row["us"][name][1])
    shown = lambda low, median, high: f"{median:.2f} ({low:.2f} to {high:.2f})"
    times = lambda row, name: "1" if name == "ale, compiled" else shown(*row["ratio_to_compiled"][name])
    lines = [
        [title.format(found.rows[0]["game"]), *(f(row, name) for row in found.rows for f in (per_second, times))]
        for name, title in names.items()
        if name in found.rows[0]["us"]
    ]
    kinds = ("vector steps a second", "times as long")
    head = [f"{row['num_envs']} games: {kind}" for row in found.rows for kind in kinds]
    return f"{markdown(['', *head], lines)}\n\n{source([found])}"


def spread() -> str:
    """Return what several devices of a CPU gain."""
    (found,) = results("*-scale.json")[-1:]
    return f"{scale.table(found.rows)}\n\n{source([found])}"


def compiled() -> str:
    """Return what compiled programs are made of."""
    files = compiled_for("h200", "v5e")
    gpu, tpu = ({row["case"]: row for row in file.rows} for file in files)
    lines = []
    for case, row in gpu.items():
        told = [f"{row['kernels_per_opt_step']:,.0f}", f"{row['serial_terms']:,.0f}"]
        told += [f"{row['host_launches_per_call']}", f"{row['host_waits_per_call']}", f"{row['bytes'] / 1e6:,.1f}"]
        lines.append([f"`{case}`", *told, *(on_tpu(tpu[case]) if case in tpu else ("", ""))])
    head = ["case", "H200: kernels", "serial terms", "launches", "waits", "MB moved", *ON_TPU]
    return f"{markdown(head, lines)}\n\n{source(files, 'Compiled')}"


ON_TPU = ("v5e: instructions", "thousand cycles")


def on_tpu(row: Row) -> tuple[str, str]:
    """Return the cells below `ON_TPU`."""
    return f"{row['kernels_per_opt_step']:,.0f}", f"{row['estimated_cycles_per_opt_step'] / 1e3:,.0f}"


def cores() -> str:
    """Return what an optimisation step takes with each recurrent core."""
    files = compiled_for("h200", "v5e")
    (measured,) = [one for one in results("*cores-memory-*.json") if one.rows and one.rows[0]["seed"] is None][-1:]
    ratio = {row["core"]: row["ratio_to_none"] for row in measured.rows}
    gpu, tpu = ({row["case"]: row for row in file.rows} for file in files)
    lines = []
    for core in (core for core in CORES if f"ppo-{core}" in gpu):
        row = gpu[f"ppo-{core}"]
        told = [f"{ratio[core]:.2f}", f"{row['kernels_per_opt_step']:,.0f}", f"{row['bytes'] / 1e6:,.1f}"]
        lines.append([f"`{core}`", *told, *on_tpu(tpu[f"ppo-{core}"])])
    head = ["core", "CPU, times as long", "H200: kernels", "MB moved", *ON_TPU]
    return f"{markdown(head, lines)}\n\n{source([measured])}\n\n{source(files, 'Compiled')}"


def exchanged() -> str:
    """Return what devices exchange."""
    files = compiled_for("shards-8-h200", "shards-16-v5e")
    return f"{shards.table([row for file in files for row in file.rows])}\n\n{source(files, 'Compiled')}"
