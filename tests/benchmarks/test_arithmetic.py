"""The benchmarks' own arithmetic: what is called faster, and what is counted."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import vector_of

import jaxrl
from benchmarks import cases, harness, hlo, inside, loops, outside, run as benchmarks_run
from benchmarks.cases import CASES, scans
from benchmarks.cases.shapes import DQN, PPO, replaying
from benchmarks.cases.training import growth
from benchmarks.compare import compare, verdict
from benchmarks.device import Limits, limits
from benchmarks.plain import Setting, plain_dqn
from benchmarks.tables import reach
from jaxrl.strategies.base import iterate
from jaxrl.training.program import metric_shapes


def row(case: str, *samples: float, kernels: int = 10) -> harness.Row:
    return harness.row(case, samples, samples, 1.0, kernels_per_iteration=kernels)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ((100, 110, 120), (80, 85, 90), "faster"),
        ((80, 85, 90), (100, 110, 120), "slower"),
        ((100, 110, 120), (80, 85, 101), "same"),  # the ranges overlap
        ((100, 100, 100), (98, 98, 98), "same"),  # apart, but by less than 3 %
    ],
)
def test_a_difference_counts_only_beyond_the_noise(old: tuple[float, ...], new: tuple[float, ...], said: str) -> None:
    assert verdict(row("x", *old)["spread"], row("x", *new)["spread"]) == said


def test_a_row_is_also_judged_by_what_took_turns_with_it() -> None:
    """Twice as slow, but so was its limit: the machine was. A plain loop beside it goes before the limit."""
    old, busy = harness.row("x", [10.0] * 3, [5.0] * 3, 1.0), harness.row("x", [20.0] * 3, [10.0] * 3, 1.0)
    (line,) = compare({"rows": [old]}, {"rows": [busy]})
    assert line.split()[1:] == ["10.0", "20.0", "2.000", "slower", "1.000", "same", "beside", "its", "limit"]
    old, busy = {**old, "plain_ratio_spread": [1, 1, 1]}, {**busy, "plain_ratio_spread": [0.5, 0.5, 0.5]}
    (line,) = compare({"rows": [old]}, {"rows": [{**busy, "settings": {"lr": 1}}]})
    assert line.endswith("slower     0.500  faster beside its plain")
    (line,) = compare({"rows": [{**old, "settings": {}}]}, {"rows": [{**busy, "settings": {"lr": 1}}]})
    assert "other settings" in line


def test_what_only_one_result_has_and_other_kernels_are_told() -> None:
    lines = compare(
        {"rows": [row("a", 1, 1, 1), row("b", 1, 1, 1)]}, {"rows": [row("b", 1, 1, 1, kernels=12), row("c", 1, 1, 1)]}
    )
    assert "only in A" in lines[0]
    assert "kernels_per_iteration 10 -> 12" in lines[1]
    assert "only in B" in lines[2]


def test_a_row_is_made_of_medians_and_of_ratios_side_by_side_and_says_how_far_the_device_is() -> None:
    made = harness.row("x", [10.0, 30.0, 20.0], [10.0, 15.0, 5.0], env_steps=4)
    assert (made["us_per_opt_step"], made["spread"], made["ceiling_us"]) == (20.0, [10.0, 20.0, 30.0], 10.0)
    assert made["ratio_to_ceiling"] == 2.0  # of 1, 2 and 4
    assert (made["opt_steps_per_sec"], made["env_steps_per_sec"]) == (50_000.0, 200_000.0)
    made = harness.row("x", [30.0] * 3, [10.0] * 3, 1, device_us=12.0, kernels_per_opt_step=60)
    assert (made["ratio_to_device"], made["us_per_kernel"]) == (2.5, 0.5)
    assert "2.500" in harness.table([made])


def test_subjects_take_turns_and_the_first_round_is_not_counted() -> None:
    calls: list[str] = []
    samples = harness.interleave(
        {name: lambda name=name: float(len(calls.append(name) or calls)) for name in ("a", "b")}, repeats=2
    )
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def runs(program: Any, depth: int = 2) -> int:
    return sum(kernel.times for kernel in hlo.kernels(program, depth))


def looped(turn: Any, carry: Any) -> loops.Loop:
    """Return a loop that applies `turn(carry, key)` in each iteration."""
    body = lambda carry, key, t: turn(carry, key)
    return loops.Loop(lambda carry, a, b: iterate(body, jax.random.key(0), carry, a, b), carry)


def test_kernels_are_those_of_one_iteration() -> None:
    def sorts(times: int) -> Any:
        def turn(carry: jax.Array, key: jax.Array) -> jax.Array:
            for _ in range(times):  # a sort cannot be fused with another
                carry = jnp.sort(carry + jax.random.uniform(key, carry.shape))
            return carry

        return turn

    one, four, plain = (looped(turn, jnp.zeros(32)) for turn in (sorts(1), sorts(4), lambda x, key: x + 1))
    assert "sort(" in one.compiled.as_text()
    assert one.us(10) > 0
    assert runs(one.compiled) >= 2
    assert max(8, runs(plain.compiled) + 1) <= runs(four.compiled)


def test_a_loop_inside_an_iteration_counts_as_often_as_it_turns() -> None:
    """A sort is a kernel, and cannot be fused with another."""

    def counted(turns: int) -> tuple[int, int]:
        turn = lambda carry, key: jax.lax.fori_loop(0, turns, lambda i, x: jnp.sort(x * 1.5 - i), carry)
        loop = looped(turn, jnp.zeros(32))
        return runs(loop.compiled), len(hlo.kernels(loop.compiled))

    (few, size), (many, same) = counted(7), counted(17)
    assert same == size
    assert many - few >= 10 * 2  # what is sorted, and the sort
    assert (many - few) % 10 == 0


GPU_PROGRAM = """HloModule jit_run, is_scheduled=true

%push (ring: f32[1000,12], rows: f32[10,12], place: s32[]) -> f32[1000,12] {
  %ring = f32[1000,12]{1,0} parameter(0)
  %place = s32[] parameter(2)
  %rows = f32[10,12]{1,0} parameter(1)
  %twice = f32[10,12]{1,0} add(%rows, %rows)
  %zero = s32[] constant(0)
  ROOT %written = f32[1000,12]{1,0} dynamic-update-slice(%ring, %twice, %place, /*index=3*/%zero)
}

%turn (given: (s32[], f32[128,120], f32[120,84])) -> (s32[], f32[128,120], f32[120,84]) {
  %given = (s32[], f32[128,120]{1,0}, f32[120,84]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%given), index=0
  %x = f32[128,120]{1,0} get-tuple-element(%given), index=1
  %k = f32[120,84]{1,0} get-tuple-element(%given), index=2
  %gemm = (f32[128,84]{1,0}, s8[4194304]{0}) custom-call(%x, %k), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %next = (s32[], f32[128,120]{1,0}, f32[120,84]{1,0}) tuple(%i, %x, %k)
}

%graph (ring: f32[1000,12], rows: f32[10,12], place: s32[]) -> f32[10,12] {
  %ring = f32[1000,12]{1,0} parameter(0)
  %rows = f32[10,12]{1,0} parameter(1)
  %place = s32[] parameter(2)
  %pushed = f32[1000,12]{1,0} fusion(%ring, %rows, %place), kind=kLoop, calls=%push, metadata={op_name="jit(run)/x"}
  %zero = s32[] constant(0)
  ROOT %read = f32[10,12]{1,0} dynamic-slice(%pushed, %place, %zero), dynamic_slice_sizes={10,12}
}

%iteration (all: (f32[1000,12], f32[10,12], s32[])) -> (f32[1000,12], f32[10,12], s32[]) {
  %all = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) parameter(0)
  %ring = f32[1000,12]{1,0} get-tuple-element(%all), index=0
  %rows = f32[10,12]{1,0} get-tuple-element(%all), index=1
  %place = s32[] get-tuple-element(%all), index=2
  %replayed = f32[10,12]{1,0} call(%ring, %rows, %place), to_apply=%graph
  %start = (s32[], f32[128,120]{1,0}, f32[120,84]{1,0}) constant({...})
  %loop = (s32[], f32[128,120]{1,0}, f32[120,84]{1,0}) while(%start), condition=%goes_on, body=%turn, \
backend_config={"known_trip_count":{"n":"16"}}
  ROOT %done = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) tuple(%ring, %rows, %place)
}

%captured (all: (f32[1000,12], f32[10,12], s32[])) -> (f32[1000,12], f32[10,12], s32[]) {
  %all = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) parameter(0)
  ROOT %loop = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) while(%all), condition=%goes_on, body=%iteration
}

ENTRY %main (all: (f32[1000,12], f32[10,12], s32[])) -> (f32[1000,12], f32[10,12], s32[]) {
  %all = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) parameter(0)
  ROOT %call = (f32[1000,12]{1,0}, f32[10,12]{1,0}, s32[]) call(%all), to_apply=%captured
}
"""


def test_a_kernel_is_charged_with_the_slices_that_it_moves_and_the_products_that_it_makes() -> None:
    """A push of 10 rows of 12 words, a slice as large, and 16 products that a library makes, with 4 MB of its own."""
    program = SimpleNamespace(as_text=lambda: GPU_PROGRAM)
    push, read, product = hlo.kernels(program, depth=1)
    assert push[:4] == ("fusion", 480 + 4 + 480, 0, 1)  # the rows, where to, and the rows again
    assert read[:4] == ("dynamic-slice", 480 + 4 + 4 + 480, 0, 1)
    assert product[:4] == ("custom-call", 4 * (128 * 120 + 120 * 84 + 128 * 84), 2 * 128 * 120 * 84, 16)


@pytest.mark.parametrize(
    "sides", ["true_computation=%one, false_computation=%three", "branch_computations={%one, %three}"]
)
def test_of_a_branch_the_larger_side_counts(sides: str) -> None:
    side = "%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{lines}\n}}\n"
    sorts = [f"  %sort.{i} = f32[8]{{0}} sort(%x), dimensions={{0}}, to_apply=%less" for i in range(3)]
    text = side.format(name="one", lines=sorts[0]) + side.format(name="three", lines="\n".join(sorts))
    program = (
        text
        + f"""
ENTRY %main (x: f32[8], which: pred[]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %which = pred[] parameter(1)
  ROOT %either = f32[8]{{0}} conditional(%which, %x, %x), {sides}, metadata={{op_name="jit(f)/cond"}}
}}
"""
    )
    assert [kernel.kind for kernel in hlo.kernels(SimpleNamespace(as_text=lambda: program), depth=0)] == ["sort"] * 3


def test_a_program_that_xla_made_is_charged_the_same_way() -> None:
    """The loop adds 1 to the 12 words of each row of a million that it points to, and multiplies 64x32 by 32x16."""

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ring, x, k, seen = carry
        row = jax.lax.dynamic_slice(ring, (i, 0), (1, 12)) + 1
        ring = jax.lax.dynamic_update_slice(ring, row, (i, 0))
        return ring, 0.5 * x, k, seen + jnp.tanh(x @ k)

    carry = (jnp.zeros((1_000_000, 12)), jnp.ones((64, 32)), jnp.ones((32, 16)), jnp.zeros((64, 16)))
    run = lambda carry, start, stop: jax.lax.fori_loop(start.astype(jnp.int32), stop.astype(jnp.int32), body, carry)
    found = hlo.kernels(loops.Loop(run, carry).compiled, depth=1)
    assert sum(kernel.flops for kernel in found) == 2 * 64 * 32 * 16
    moved = sum(kernel.bytes for kernel in found)
    assert 4 * (64 * 32 + 32 * 16 + 64 * 16) < moved < 100_000  # the ring has 48 000 000


def test_the_bound_is_what_each_kernel_takes_at_the_least() -> None:
    device = Limits({1_000: 2.0, 3_000: 4.0, 10_000: 11.0}, flops_per_us=100, turn_us=0)
    times = {(0, 0): 2.0, (1_200, 0): 2.0, (2_400, 0): 3.2, (3_000, 0): 4.0, (4_500, 0): 4.95, (20_000, 0): 22.0}
    times |= {(2_400, 200): 3.2, (2_400, 1_000): 10.0}
    assert {given: device.kernel(hlo.Kernel("fusion", *given, 1)) for given in times} == pytest.approx(times)
    assert device.bound([hlo.Kernel("fusion", 0, 0, 5), hlo.Kernel("dot", 2_000, 1_000, 3)]) == 5 * 2 + 3 * 10


@pytest.mark.slow
def test_what_the_device_allows_is_measured_and_told() -> None:
    device = limits()
    assert list(device.kernel_us) == [12 * 4**k for k in range(4, 13)]
    assert all(0 < us < 1e7 for us in [*device.kernel_us.values(), device.flops_per_us])
    assert "us a kernel" in str(device)
    assert limits() is device  # measured once


def test_the_plain_loop_beside_a_case_is_no_population() -> None:
    loop = DQN(num_envs=2, features=(8,), batch_size=4, capacity=20).plain()
    assert loop.carry.updates.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replay", "rollouts"])
def test_a_scan_of_the_parts_trains_as_training_does(kind: str) -> None:
    """The scan begins where training does, and goes on when that has donated its state."""
    if kind == "replay":
        shape = DQN(num_envs=2, opt_interval=4, features=(8,), batch_size=8, capacity=200, warmup=40)
        strategy = replaying(shape)
        make = lambda state: scans.off_policy(shape, strategy, state)
    else:
        rollouts = PPO(num_envs=2, rollout=8, epochs=2, minibatches=2, features=(8,))
        strategy = rollouts.strategy()
        make = lambda state: scans.on_policy(rollouts, strategy, state)
    training = loops.Training(strategy)
    scan, before = make(training.state), np.asarray(vector_of(training.state.agent.params))
    for loop in (training, scan):
        loop.us(20)
    after = vector_of(scan.carry[-1].params)
    np.testing.assert_allclose(after, vector_of(training.state.agent.params), rtol=1e-4, atol=1e-6)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize(
    ("spread", "ratio", "temp_bytes", "said"),
    [
        ([105, 108, 110], 1.08, 2_100, None),
        ([99, 130, 140], 1.3, 2_000, None),  # within the noise of the smallest
        ([120, 130, 140], 1.3, 2_000, "takes 1.30 times as long as with 10 items"),
        ([100, 100, 100], 1.0, 92_000, "needs 90,000 bytes more beside its state than with 10 items"),
    ],
)
def test_a_case_fails_where_time_or_memory_grows_with_the_capacity(
    spread: list[float], ratio: float, temp_bytes: int, said: str | None
) -> None:
    smallest = {"capacity": 10, "spread": [90, 100, 110], "state_bytes": 10_000, "temp_bytes": 2_000}
    row = {"spread": spread, "ratio_to_ceiling": ratio, "state_bytes": 100_000, "temp_bytes": temp_bytes, "repeats": 7}
    assert growth(smallest, row) == said
    if said is not None and said.startswith("takes"):
        assert growth(smallest, {**row, "repeats": 1}) is None, "of one repeat nobody knows the noise"


def test_a_run_with_a_failed_row_writes_it_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row("capacity", 1, 1, 1), "failed": None}, {**row("capacity", 2, 2, 2), "failed": "takes too long"}]
    monkeypatch.setattr(benchmarks_run, "case_named", lambda name: lambda effort: rows)
    monkeypatch.setattr(benchmarks_run, "limits", lambda: Limits({1: 1.0}, 1, 0))
    rows[1]["device_us"] = 1.0
    monkeypatch.setattr("sys.argv", ["benchmarks.run", "capacity", "--json", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match=r"^capacity takes too long$"):
        benchmarks_run.main()
    assert capsys.readouterr().out.count("\ncapacity ") == 2
    kept = json.loads((tmp_path / "x.json").read_text())
    assert len(kept["rows"]) == 2
    assert kept["header"]["device_limits"] == {"kernel_us": {"1": 1.0}, "flops_per_us": 1, "turn_us": 0}


def test_actors_are_left_out_in_one_line_where_gymnasium_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert CASES["actors"](harness.Effort()) == []
    assert capsys.readouterr().err == "actors: left out, it needs Gymnasium: pip install 'jaxrl[gymnasium]'\n"


@pytest.mark.slow
def test_a_learner_alone_makes_the_optimisation_steps_of_a_strategy_with_actors() -> None:
    env, agent, actors = jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(8,)), jaxrl.ActorsConfig(actors=2)
    sizes = {"buffer": jaxrl.uniform(100, 8), "num_envs": 2, "opt_interval": 4, "warmup": 0}
    strategy = jaxrl.off_policy(env, agent, actors=actors, **sizes)
    learner = outside.Learner(strategy)
    assert learner.us(3) > 0
    names = list(metric_shapes(strategy, learner.training.state))
    counts = dict(zip(names, learner.training.sums.count.tolist(), strict=True))
    assert counts["loss"] == 3 * strategy.opt_steps_per_step
    assert counts["skipped_updates"] == 0


@pytest.mark.parametrize(("num_envs", "opt_interval"), [(1, 10), (5, 10), (10, 10), (16, 16), (4096, 4096)])
def test_a_case_of_any_size_has_its_own_settings(num_envs: int, opt_interval: int) -> None:
    cases.case_named(f"dqn-{num_envs}")
    shape = cases.dqn_shape(num_envs)
    assert (shape.num_envs, shape.opt_interval) == (num_envs, opt_interval)
    replaying(shape)  # which refuses settings that do not go together


@pytest.mark.parametrize("name", ["dqn-0", "dqn", "dqn-", "dqn-1.5", "nothing-4", "seeds-x", ""])
def test_an_unknown_case_is_refused_with_the_known_ones(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.run", name])
    with pytest.raises(SystemExit) as error:
        benchmarks_run.main()
    assert error.value.code == 2
    assert f"unknown case {name}; known: dqn-1, " in capsys.readouterr().err


@pytest.mark.slow
def test_the_plain_loop_and_the_population_of_it_learn_as_often_as_asked() -> None:
    """Ten environment steps an update: with two environments every fifth vector step."""
    setting = Setting("CartPole-v1", num_envs=2, opt_interval=10, features=(8,), batch_size=4, capacity=20)
    one, several = plain_dqn(setting), plain_dqn(setting, seeds=3)
    for loop in (one, several):
        loop.us(15)
    assert int(one.carry.updates) == 3
    assert several.carry.updates.tolist() == [3, 3, 3]
    kernels = [x.reshape(3, -1) for x in jax.tree.leaves(several.carry.params) if x.ndim == 3]
    assert kernels
    assert all(len({tuple(seed.tolist()) for seed in x}) == 3 for x in kernels)  # each seed has weights of its own


@pytest.mark.slow
def test_seeds_in_turn_and_at_once_train_the_same() -> None:
    strategy = replaying(DQN(num_envs=2, features=(8,), batch_size=4, capacity=100, warmup=20))
    turn, at_once = loops.in_turn(strategy, 3), loops.population(strategy, 3)
    for loop in (turn, at_once):
        loop.us(7)
    one, other = vector_of(turn.carry.agent.params), vector_of(at_once.carry.agent.params)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert len({tuple(seed.tolist()) for seed in one}) == 3
    counts = [runs(turn.compiled, 3), runs(at_once.compiled)]
    assert min(counts) > 20, counts  # an update is in what was counted, so it is no shell around it


@pytest.mark.slow
def test_a_trace_names_the_kernels_that_ran(tmp_path: Path) -> None:
    loop = looped(lambda carry, key: jnp.sort(carry + jax.random.uniform(key, carry.shape)), jnp.zeros(256))
    kernels = inside.profile(loop, 50, tmp_path)
    (runs,) = [runs for name, _, runs in kernels if name.startswith("sort")]
    assert runs == 1
    assert list(tmp_path.rglob("*.xplane.pb"))


# --- judging ------------------------------------------------------------------------------------------------------


def judged(seed: int, training: float | None, greedy: float, sampled: float) -> harness.Row:
    """Return the row of a run with one evaluation, at whose end all policies are the same."""
    point = {"env_steps": 100, "training": training, "greedy": greedy, "sampled": sampled}
    played = {of: {"greedy": greedy, "sampled": sampled} for of in ("last", "best_by_greedy", "best_by_sampled")}
    moments = {"end": {**point, **played, "training": 5.0}}
    return {"algo": "ppo", "env": "Toy", "seed": seed, "env_steps": 1_000, "moments": moments, "curve": [point]}


@pytest.mark.slow
def test_the_table_of_judging_has_means_the_worst_seed_and_the_distance_from_training() -> None:
    rows = [judged(0, 4.0, 10.0, 5.0), judged(1, 6.0, 0.0, 5.0), judged(2, None, 2.0, 2.0)]
    assert reach.distance(rows, "greedy") == 6.0  # of a run without a finished episode nothing is known
    assert reach.distance(rows, "sampled") == 1.0
    (line,) = reach.by_actions(rows).splitlines()[2:]
    greedy, sampled = "4.0 (0.0)", "4.0 (2.0)"
    cells = ["Toy", "`ppo`", "1 000", "5.0 (5.0)", greedy, sampled, greedy, greedy, sampled, "6.0", "1.0"]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == cells
