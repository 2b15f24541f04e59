"""`python -m jaxrl.doctor`: facts about this machine for bug reports, and checks that training works on it.

It prints the facts, then a line per check: name, `ok`, `failed` or `skipped`, seconds, and figures. It writes only to
temporary directories, which it removes, and to the file of `--json`.
"""

import jaxrl.cli.main as command_line  # first: it installs signal handlers

# isort: split
import contextlib
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl
from jaxrl.errors import JaxrlError, describe_error, one_line, print_stderr
from jaxrl.reports.exports import write
from jaxrl.strategies import Strategy
from jaxrl.training.program import Compiled, compile_all, state_shapes
from jaxrl.training.storage.checkpoints import Store
from jaxrl.training.storage.files import sync_dir, write_atomically
from jaxrl.training.storage.leaves import state_digest
from jaxrl.training.storage.opening import open_store
from jaxrl.training.storage.run import OTHER_VERSIONS, VERSIONS, versions
from jaxrl.training.storage.run_dir import CHECKPOINTS
from jaxrl.trees import PyTree
from jaxrl.verify import Problems, check_checkpoints, check_logs
from jaxrl.xla import attempts, current_forms, forms, requested_forms
from jaxrl.xla.contexts import host_device, product_precision
from jaxrl.xla.options import compiler_options

Figures = Mapping[str, float | str]
BOUND = 1e-4
"""Largest difference of one iteration between chosen and plain forms, relative to its change of the agent.

Float32 rounds by 6e-8. Another order of sums, and Adam's division, amplify that to at most 3e-6 for 15 agents on an
H100. TF32 rounds by 5e-4: products in reduced precision exceed the bound, as does an error in a form.
"""
OPT_STEPS, REPEATS, SAVE_MB = 512, 5, 8
"""Optimisation steps per run, timings per choice of forms, and size of a save."""
AGENTS: dict[str, Callable[[], Strategy]] = {
    "dqn": lambda: jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), jaxrl.dqn()),
    "ppo": lambda: jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(), rollout=64, epochs=2, minibatches=4),
}
ADVICE = {
    "forms": "train with JAXRL_FORMS=plain for now, and report this page",
    **dict.fromkeys(("save", "disk"), "make room there, or set TMPDIR to another disk; runs need such a one, too"),
}


def main(args: Sequence[str]) -> int:
    """Parse, look, check, print; return the exit code: 0, or 1 if a check has failed."""
    parser = command_line.Parser(
        "doctor",
        "--quick --json doctor.json",
        description="Print what a bug report needs to know of this machine, and check that training works on it. "
        "Nothing is written but temporary files, where TMPDIR says.",
    )
    parser.add_argument("--quick", action="store_true", help="compile one agent only, and measure no speed")
    parser.add_argument("--json", type=command_line.path_arg, help="file to write the same to, as data")
    options = parser.parse(args)
    page = Page(options.json and Path(options.json))
    command_line.without_compilation_cache()
    try:
        look(page)
        check(page, options.quick)
    except KeyboardInterrupt:  # from the trainer, which handles signals while it trains
        print_stderr("stopped by SIGINT")
        return 130
    page.add_fact("fallbacks", "; ".join(f"{name} ({why})" for name, why in attempts.failures().items()) or "none")
    failed = [name for name, found in page.found["checks"].items() if found["verdict"] == "failed"]
    advice = dict.fromkeys(ADVICE.get(name.split()[0], "report this page") for name in failed)
    page.add_fact("result", f"failed: {', '.join(failed)}; {'; '.join(advice)}" if failed else "all is well")
    return 1 if failed else 0


class Page:
    """Facts and checks so far. Each is printed at once, and the file rewritten, so that a crash loses none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {"facts": {}, "checks": {}}
        self._show()

    def add_fact(self, name: str, value: str) -> None:
        """Add and print a fact."""
        self.found["facts"][name] = one_line(value)
        self._show(f"{name:<17} {one_line(value)}")

    def check(self, name: str, job: Callable[..., Figures], *givers: Callable[[], Any], skipped: bool = False) -> None:
        """Run `job` on the results of `givers`, or skip it; add and print its outcome."""
        begun, verdict = time.perf_counter(), "skipped" if skipped else "ok"
        try:
            found = {} if skipped else dict(job(*(give() for give in givers)))
        except Exception as error:  # a faulty machine may raise anything
            first = one_line((str(error).splitlines() or [""])[0])
            verdict, found = "failed", {"error": f"{type(error).__name__}: {first}".removeprefix("JaxrlError: ")}
        seconds = round(time.perf_counter() - begun, 1)
        self.found["checks"][name] = {"verdict": verdict, "seconds": seconds, **found}
        shown = (f"{key} {value if isinstance(value, str) else f'{value:.4g}'}" for key, value in found.items())
        self._show(f"{name:<17} {verdict:<7} {seconds:6.1f} s  {', '.join(shown)}".rstrip())

    def _show(self, *lines: str) -> None:
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
        if self.path is not None:
            write(self.path, json.dumps(self.found, indent=2) + "\n")


def look(page: Page) -> None:
    """Add the facts; raise `SettingsError`, after those that need no device, if JAX finds no requested one."""
    for name in (*VERSIONS, *OTHER_VERSIONS):
        page.add_fact(name, _attempt(lambda name: versions((name,))[name], name))
    page.add_fact("platform", f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    names = sorted(name for name in os.environ if name.startswith(("JAX_", "XLA_", "JAXRL_")))
    page.add_fact("variables", " ".join(f"{name}={os.environ[name]}" for name in names) or "none")
    page.add_fact("compiled in", f"{command_line.compilation_cache() or 'memory alone'} (not used here)")
    first, *others = command_line.require_devices()
    page.add_fact("devices", f"{1 + len(others)} of {first.device_kind} ({first.platform})")
    if (limit := (first.memory_stats() or {}).get("bytes_limit")) is not None:
        page.add_fact("memory", f"{limit / 2**30:.1f} GiB each")
    page.add_fact("products", product_precision(first))
    page.add_fact("forms", f"{current_forms()} (asked for: {requested_forms()})")
    options = lambda: " ".join(f"{name}={value}" for name, value in (compiler_options() or {}).items())
    page.add_fact("XLA's options", _attempt(options) or "none")


def _attempt(find: Callable[..., str], *args: str) -> str:
    try:
        return find(*args)
    except Exception as error:
        return f"unknown ({describe_error(error)})"


def check(page: Page, quick: bool) -> None:
    """Run all checks, even if some fail; with `quick`, skip those of PPO and of speed."""
    parts = {"forms": compare_forms, "bits": repeat, "save": save, "speed": measure_speed}
    for algo, make in AGENTS.items():
        made = cache(make)  # one strategy, so that each program is compiled once for all checks
        for name, part in parts.items():
            page.check(f"{name} {algo}", part, made, skipped=quick and (algo != "dqn" or name == "speed"))
    page.check("disk", use_disk)


def compare_forms(strategy: Strategy) -> Figures:
    """Compare an iteration in chosen forms to one in plain forms on the CPU, if available, from the same state."""
    here, there = jax.devices()[0], host_device()
    state, sums = _compile(strategy).init(jax.random.key(0))
    with jax.default_matmul_precision(None if product_precision(here) == "float32" else "highest"):
        chosen = _train(_compile(strategy, init=False), (state, sums), 0, 1, here)[0]
        with forms("plain"), jax.default_device(None if there == here else there):
            plain = _train(_compile(strategy, init=False), (state, sums), 0, 1, there)[0]
    before, one, other = (_floats(each.agent) for each in (state, chosen, plain))
    changed = float(np.linalg.norm(other - before))
    apart = float(np.linalg.norm(one - other)) / max(changed, 1e-12)
    if not (changed > 0 and apart <= BOUND):
        raise JaxrlError(f"apart by {apart:.2g} of what an iteration changes; rounding makes {BOUND:g} at most")
    return {"apart": apart, "at most": BOUND, "plain on": there.platform}


def repeat(strategy: Strategy) -> Figures:
    """Train twice from one key, and require equal bits."""
    compiled, count = _compile(strategy), OPT_STEPS // strategy.opt_steps_per_step
    one, other = (state_digest(_train(compiled, compiled.init(jax.random.key(0)), 0, count)[0]) for _ in range(2))
    if one != other:
        raise JaxrlError(f"two runs from one key differ, {one[:16]} and {other[:16]}")
    return {"digest": one[:16]}


def save(strategy: Strategy) -> Figures:
    """Train in a temporary run directory, load the checkpoint, and check it as `verify` does."""
    with TemporaryDirectory(prefix="jaxrl-") as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        run = Path(folder) / "run"
        config = jaxrl.TrainerConfig(OPT_STEPS, run_dir=str(run), eval_interval=0, eval_episodes=0, quiet=True)
        trained = state_digest(jaxrl.Trainer(strategy, config, recorders=["jsonl"]).train().state)
        store, problems = open_store(run, CHECKPOINTS), Problems()
        loaded = state_digest(store.load_newest(state_shapes(strategy))[1].state)
        good = list(check_checkpoints(store, strategy, problems))
        check_logs(run, store, good, problems)
    verified = [line.split()[-1] for line in printed.getvalue().splitlines() if line.startswith(f"{OPT_STEPS} ok ")]
    if problems.found or [loaded, *verified] != [trained, trained]:
        raise JaxrlError(f"{trained[:16]} was saved, {loaded[:16]} loaded; verify says: {one_line(printed.getvalue())}")
    return {"digest": trained[:16]}


def measure_speed(strategy: Strategy) -> Figures:
    """Time training in chosen and in plain forms, alternately."""
    count, chosen = OPT_STEPS // strategy.opt_steps_per_step, _compile(strategy)
    with forms("plain"):
        programs = {"steps/s": chosen, "plain": _compile(strategy, init=False)}
    carries = {name: chosen.init(jax.random.key(0)) for name in programs}
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(REPEATS + 1):
        for name, program in programs.items():
            begun = time.perf_counter()
            carries[name] = _train(program, carries[name], turn * count, (turn + 1) * count)
            rates[name].append(OPT_STEPS / (time.perf_counter() - begun))
    ours, theirs = (found[1:] for found in rates.values())  # without the first turn, which warms up
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {"steps/s": statistics.median(ours), "plain": statistics.median(theirs), "ratio": ratio}


def use_disk() -> Figures:
    """Sync a file and its directory, and write a checkpoint, in the directory for temporary files."""
    with TemporaryDirectory(prefix="jaxrl-") as folder:
        begun, path = time.perf_counter(), Path(folder)
        write_atomically(path / "file", "0" * (SAVE_MB << 20))  # which syncs the file
        sync_dir(path)
        synced, store = time.perf_counter() - begun, Store(path / "saves", 1)
        store.write(1, {"array": np.zeros(SAVE_MB << 18, np.float32)}, {})
        return {"where": str(path.parent), "MB": SAVE_MB, "sync s": synced, "save s": store.write_s}


def _compile(strategy: Strategy, init: bool = True) -> Compiled:
    return compile_all(strategy, jax.random.key(0), None, None, resume=not init)


def _train(compiled: Compiled, carry: PyTree, start: int, stop: int, device: Any = None) -> PyTree:
    # The program donates its state: with a `device`, it gets a copy there.
    carry = carry if device is None else jax.device_put(carry, device, may_alias=False)
    return jax.block_until_ready(compiled.run(*carry, np.uint32(start), np.uint32(stop)))


def _floats(tree: PyTree) -> np.ndarray:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


if __name__ == "__main__":
    command_line.run_main(main)
