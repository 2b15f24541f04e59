"""Programs compiled for devices that are not there: what is counted in them, and that it does not grow."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo
from benchmarks.compiled import shards as spread, thunks
from benchmarks.compiled.cases import Program, case_named
from benchmarks.compiled.measure import measure, worse
from benchmarks.tables.results import compiled_for
from jaxrl.registry import ALGORITHMS
from jaxrl.strategies.base import iterate
from jaxrl.xla import ahead, forms
from jaxrl.xla.options import compiler_options, graph_options, spread_options

ROOT = Path(__file__).parents[2]
SEQUENCE = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
    002: kCopy [source | sink] kCopy
003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] wrapped_compare
  body:
    005: kCustomKernel [source | sink] loop_pad_fusion
    006: kWhile [prev=005 (1) | sink ]
condition:
        007: kCustomKernel [source | sink] wrapped_compare_1
      body:
        008: kCustomKernel [source | sink] gemm_fusion_dot
        009: kConditional [prev=008 (1) | sink ]
            010: kCustomKernel [source | sink] loop_sub_fusion
"""
METADATA = 'thunk_metadata { thunk_info { profile_annotation: "while.7" thunk_id: 6 } thunk_kind: "kWhile" }'


def test_launches_are_those_of_the_host() -> None:
    """One graph; a loop that asks the host (condition, pad), in it one of 16 turns (condition, product, branch)."""
    assert thunks.names(METADATA) == {6: "while.7"}
    counted = thunks.launches(thunks.parse(SEQUENCE), {6: 16})
    assert counted == thunks.Launches(launches=1 + 2 + 16 * 3, waits=1 + 16 * 1, buffers=1)


def test_turns_are_read_where_the_compiler_writes_them_and_where_it_does_not() -> None:
    text = """
%body (p: (s32[], f32[])) -> (s32[], f32[]) {
  %p = (s32[], f32[]) parameter(0)
  ROOT %sum = (s32[], f32[]) fusion(%p), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"250"}
}

%counted (p: (s32[], f32[])) -> pred[] {
  %p = (s32[], f32[]) parameter(0)
  %end = s32[]{:T(128)} constant(12)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT
}

%asked (p: (s32[], f32[])) -> pred[] {
  %p = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: (s32[], f32[])) -> (s32[], f32[]) {
  %x = (s32[], f32[]) parameter(0)
  %a = (s32[], f32[]) while(%x), condition=%counted, body=%body
  %b = (s32[], f32[]) while(%a), condition=%asked, body=%body
  ROOT %c = (s32[], f32[]) while(%b), condition=%asked, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    program = SimpleNamespace(as_text=lambda: text)
    assert hlo.turns(program) == {"a": 12, "c": 5}
    assert hlo.waits(program) == hlo.Waits(conditionals=0, unknown_loops=1)
    assert sum(kernel.times * kernel.cycles for kernel in hlo.kernels(program, depth=0)) == (12 + 1 + 5) * 250


SUMS = """
%rows (p: f32[128,2]) -> f32[90] {
  %p = f32[128,2]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %sum = f32[2]{0} reduce(%p, %zero), dimensions={0}, to_apply=%add
  ROOT %vector = f32[90]{0} pad(%sum, %zero), padding=0_88
}

ENTRY %main (x: f32[128,2]) -> f32[90] {
  %x = f32[128,2]{1,0} parameter(0)
  %alone = f32[90]{0} fusion(%x), kind=kLoop, calls=%rows
  ROOT %together = f32[90]{0} fusion(%x), kind=kInput, calls=%rows
}
"""


def test_a_sum_that_one_thread_adds_up_is_told_from_one_of_many_threads() -> None:
    alone, together = hlo.kernels(SimpleNamespace(as_text=lambda: SUMS), depth=0)
    assert (alone.serial, together.serial) == (128, 0)


def test_a_row_counts_an_iteration_and_its_share_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 4 iterations begins with their draws; each makes twenty products, and two optimisations."""
    monkeypatch.setattr(ahead, "BLOCK", 4)

    def run(x: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        product = lambda x: reduce(jnp.matmul, [x] * 21)
        turn = lambda x, key, t: jnp.maximum(product(x), jax.random.uniform(key, (1, 128)))
        return iterate(turn, jax.random.key(0), x, start, stop)

    count = jax.ShapeDtypeStruct((), jnp.uint32)
    shapes = (jax.ShapeDtypeStruct((128, 128), jnp.float32), count, count)
    row = measure("x", lambda: Program(run, shapes, opt_steps=2, env_steps=8), "cpu")
    assert (row["case"], row["target"], row["unknown_trip_loops"], row["conditionals"]) == ("x", "cpu", 2, 0)
    assert row["kernels_per_iteration"] >= 20
    share = (row["kernels_per_opt_step"] * 2 - row["kernels_per_iteration"]) * 4  # of what a block begins with
    assert share >= 1
    assert row["kernels_per_env_step"] * 8 == pytest.approx(row["kernels_per_opt_step"] * 2)
    assert row["bytes"] * 2 >= 20 * 128 * 128 * 4 * 2
    assert row["estimated_cycles_per_opt_step"] is None


def test_members_together_wait_for_nothing_and_take_fewer_kernels_than_two_would_apart() -> None:
    """As compiled for an H200: whatever the width, together is less to launch than two members one after the other."""
    rows = {row["case"]: row for row in compiled_for("h200")[0].rows}
    one = rows["dqn-10"]
    for case in ("seeds-32", "seeds-256"):
        found = rows[case]
        assert found["kernels_per_iteration"] < 2 * one["kernels_per_iteration"]
        told = [found[name] for name in ("host_launches_per_call", "host_waits_per_call", "conditionals")]
        assert told == [1, 0, 0]
        assert found["unknown_trip_loops"] == one["unknown_trip_loops"]


def test_every_call_is_one_graph_with_convolutions_and_memories_too() -> None:
    """As compiled for an H200: the host launches once, and waits for nothing."""
    rows = [row for row in compiled_for("h200")[0].rows if not row["case"].startswith("plain-")]
    told = {row["case"]: (row["host_launches_per_call"], row["host_waits_per_call"]) for row in rows}
    assert {*ALGORITHMS, "evaluate", "ppo-gru", "dqn-conv", "dqn-nature", "ppo-impala"} <= told.keys()
    assert {case for case, counted in told.items() if counted != (1, 0)} == set()


def test_only_what_grew_is_worse() -> None:
    figures = {"host_launches_per_call": 1, "host_waits_per_call": 0, "conditionals": 0, "temp_bytes": 1000}
    old = {"case": "a", "target": "h200", "kernels_per_opt_step": 50.0, **figures}
    assert worse([old], [{**old, "kernels_per_opt_step": 51.0}, {**old, "case": "b"}]) == []
    found = worse([old], [{**old, "kernels_per_opt_step": 51.1, "conditionals": 1}])
    assert found == ["a on h200: kernels_per_opt_step 51.1, was 50", "a on h200: conditionals 1, was 0"]
    assert worse([{**old, "target": "v5e"}], [{**old, "conditionals": 1}]) == []


@pytest.mark.slow
def test_a_case_that_there_is_none_of_is_told_in_one_line() -> None:
    with pytest.raises(KeyError):
        case_named("dqn-many")
    command = [sys.executable, "-m", "benchmarks.compiled", "dqm-10", "--target", "cpu"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 2
    assert said.stderr.startswith("unknown case 'dqm-10'; there are dqn-1, dqn-10,")
    assert said.stderr.count("\n") == 1


def test_a_graph_is_asked_for_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with forms("cuda"):
        assert "WHILE" in (compiler_options() or {})["xla_gpu_enable_command_buffer"]
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
        assert compiler_options() is None
    with forms("tpu"):
        assert compiler_options() is None
    with forms("cpu"):
        assert graph_options() is None


def test_passes_that_are_left_out_are_those_of_all_who_ask_and_of_the_user_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program of shards that is one graph leaves two out; what stands in `XLA_FLAGS` is not replaced."""
    passes = "xla_disable_hlo_passes"
    with forms("cuda"):
        (alone,) = (graph_options() or {})[passes].split(",")
        both = spread_options(graph_options()) or {}
        assert both[passes].split(",") == [alone, "cse"]
        monkeypatch.setenv("XLA_FLAGS", f"--{passes}=dce")
        assert passes not in (spread_options(graph_options()) or {})
        assert "WHILE" in (graph_options() or {})["xla_gpu_enable_command_buffer"]
    with forms("tpu"):
        monkeypatch.delenv("XLA_FLAGS")
        assert spread_options(None) == {passes: "cse"}


def _installed(target: str) -> bool:
    return find_spec("jax_plugins.xla_cuda13" if target == "h200" else "libtpu") is not None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5e"])
@pytest.mark.parametrize("case", ["dqn-10", "ppo-64", "a2c", "evaluate", "seeds-32", "dqn-nature"])
def test_no_figure_of_a_committed_case_grew(case: str, target: str, tmp_path: Path) -> None:
    """Nothing here has noise, where the compilers are those of the result."""
    (newest,) = compiled_for(target)
    try:
        compilers = _installed(target) and version("jax")
    except PackageNotFoundError:
        compilers = False
    if compilers != newest.header["jax"]:
        pytest.skip(f"the compilers of {newest.file.name} are not installed")
    command = [sys.executable, "-m", "benchmarks.compiled", case, "--target", target, "--against", str(newest.file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


EXCHANGE = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[1,10])) -> (s32[], f32[1,10]) {
  %p = (s32[], f32[1,10]) parameter(0)
  %x = f32[1,10]{1,0} get-tuple-element(%p), index=1
  %n = s32[1,3]{1,0} constant({...})
  %both = ((f32[1,10]{1,0}, s32[1,3]{1,0}), (f32[8,10]{1,0}, s32[8,3]{1,0})) all-gather-start(%x, %n), dimensions={0}
  ROOT %all = (f32[8,10]{1,0}, s32[8,3]{1,0}) all-gather-done(%both)
}

ENTRY %main (x: (s32[], f32[1,10])) -> f32[8] {
  %x = (s32[], f32[1,10]) parameter(0)
  %w = (s32[], f32[1,10]) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %y = f32[8]{0} constant({...})
  ROOT %r = f32[8]{0} all-reduce(%y), to_apply=%add
}
"""


def test_what_devices_exchange_is_read_with_its_turns() -> None:
    """In a loop of four turns 10 floats and 3 integers are given, and once 8 floats to be added."""
    found = hlo.collectives(SimpleNamespace(as_text=lambda: EXCHANGE))
    assert found == [hlo.Collective("all-gather", (40.0, 12.0), 4), hlo.Collective("all-reduce", (32.0,), 1)]


def only_gradients_moments_and_metrics(rows: Sequence[Mapping[str, Any]]) -> None:
    """Each device gives one gradient an update, and beside that arrays that are smaller than its part of a batch."""
    for row in rows:
        assert 0 < row["large_bytes_per_opt_step"] <= row["parameter_bytes"], row
        assert row["small_bytes_per_opt_step"] < 1_024, row
        assert row["kinds"].keys() <= {"all-gather", "all-reduce"}, row


def test_between_devices_go_only_gradients_moments_and_metrics() -> None:
    """As compiled for eight H200 and for sixteen v5e. What is added there is one number in each place, with zeros."""
    rows = [row for file in compiled_for("shards-8-h200", "shards-16-v5e") for row in file.rows]
    assert {row["target"] for row in rows} == {"8-h200", "16-v5e"}
    assert {row["case"] for row in rows} == set(spread.CASES)
    only_gradients_moments_and_metrics(rows)
    assert all(row["kinds"].keys() == {"all-gather"} for row in rows if row["target"] == "8-h200")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["8-cpu", "8-h200", "16-v5e"])
@pytest.mark.parametrize("case", ["dqn-1024", "ppo-normalised-1024"])
def test_a_program_compiled_now_exchanges_no_more(case: str, target: str, tmp_path: Path) -> None:
    if target != "8-cpu" and not _installed(target.partition("-")[2]):
        pytest.skip(f"no compiler for {target} is installed")
    command = [sys.executable, "-m", "benchmarks.compiled.shards", case, "--target", target, "--json"]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    where = {"capture_output": True, "text": True, "cwd": ROOT, "env": env}
    done = subprocess.run([*command, str(tmp_path / "row.json")], **where)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-2_000:]
    only_gradients_moments_and_metrics(json.loads((tmp_path / "row.json").read_text())["rows"])
