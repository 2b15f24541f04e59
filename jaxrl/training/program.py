"""The compiled training loop: iterations of a strategy with running sums of its metrics, one program for any length."""

import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl.training.processes as processes
from jaxrl.errors import SettingsError
from jaxrl.metrics import Metrics, Stat, Total, stack_metrics
from jaxrl.strategies.base import ComposedStep, EpisodeEnds, Strategy, fold, iterate
from jaxrl.training import devices
from jaxrl.training.memory import Plan, plan_of, plan_of_strategy, require_fit
from jaxrl.trees import Array, Key, PyTree, make_key, require_same
from jaxrl.tuning import Override, override, trace_hyperparams
from jaxrl.xla import current_forms
from jaxrl.xla.ahead import mapped_over
from jaxrl.xla.contexts import bind_context, options_of
from jaxrl.xla.equations import walk
from jaxrl.xla.options import compiler_options, graph_options, once_options, product_options, spread_options

MAX_STRATEGIES = 8
"""Size of the LRU cache of compiled programs, in strategies."""


class Sums(NamedTuple):
    """Running sums of `M` metrics, sorted by name, in constant memory."""

    count: Array  # type: ignore[assignment]
    """Uint32 `[M]`, modulo 2^32."""
    wraps: Array
    """Uint32 `[M]`: how often `count` has wrapped around, in units of 2^32."""
    sum: Array
    """Float32 `[M]`."""
    error: Array
    """Float32 `[M]`, the rounding error of `sum` (Kahan 1965): a sum over millions of steps stays exact."""
    min: Array
    max: Array


class Saved(NamedTuple):
    """The arrays of a checkpoint."""

    state: PyTree
    sums: Sums
    """Sums of the metrics since the last row."""


LEFT_OUT = ["buffer"]
"""The fact `left_out` of a checkpoint `without_replay`; others have no such fact."""


def lacks_replay(strategy: Strategy, state: PyTree) -> bool:
    """Return whether a state was saved without its replay buffer, see `without_replay`."""
    return strategy.state_fns.refill is not None and not jax.tree.leaves(state.buffer)


def without_replay(saved: Saved) -> Saved:
    """Return a state and its sums with an empty buffer `()`; for arrays and shapes alike."""
    return saved._replace(state=saved.state._replace(buffer=()))


def as_saved(tree: PyTree, facts: Mapping[str, Any]) -> PyTree:
    """Return the part of `tree` that a checkpoint with these facts holds: all of it, or all `without_replay`."""
    bare = facts.get("left_out") == LEFT_OUT and isinstance(tree, Saved) and hasattr(tree.state, "buffer")
    return without_replay(tree) if bare else tree


def zero_sums(size: int) -> Sums:
    """Return the sums of `size` metrics before the first iteration."""

    def full(value: float, dtype: type = np.float32) -> Any:
        return np.full(size, value, dtype)  # `jnp.full` would compile a program in the middle of a run

    return Sums(full(0, np.uint32), full(0, np.uint32), full(0), full(0), full(math.inf), full(-math.inf))


def metric_shapes(strategy: Strategy, state: PyTree) -> dict[str, Any]:
    """Return the shapes of the metrics of `strategy.step`, sorted by name."""
    trace = lambda: jax.eval_shape(_step_of(strategy), *_step_arguments(strategy, state))[1]
    return dict(sorted(cached(strategy, "metrics", trace).items()))


def _step_arguments(strategy: Strategy, state: PyTree) -> tuple[PyTree, ...]:
    """Return the shapes of the arguments of `strategy.step`."""
    arrival = () if strategy.actor_fns is None else (strategy.actor_fns.arrival,)
    return state, state.key, np.uint32(0), *arrival


def _step_of(strategy: Strategy) -> Any:
    """Return the jitted step of `strategy`, traced once for both the metric shapes and the memory plan."""
    return cached(strategy, "step", lambda: jax.jit(strategy.step, inline=True))


def run(strategy: Strategy, state: PyTree, sums: Sums, start: Array, stop: Array) -> tuple[PyTree, Sums]:
    """Run iterations `start .. stop-1`; return the new state and sums. Pure; compiled once by the trainer."""

    def body(carry: tuple[PyTree, Sums], key: Key, t: Array) -> tuple[PyTree, Sums]:
        state, sums = carry
        state, metrics = strategy.step(state, key, t)
        return state, add(sums, metrics)

    return iterate(body, state.key, (state, sums), start, stop)


def run_one(strategy: Strategy, state: PyTree, sums: Sums, arrival: PyTree, t: Array) -> tuple[PyTree, Sums]:
    """Run iteration `t` of a strategy with actors, on the batch `arrival`."""
    state, metrics = strategy.step(state, fold(state.key, t), t, arrival)
    return state, add(sums, metrics)


class BatchedResult(NamedTuple):
    """The results of a call for several members; every leaf is `[W, ...]`, one lane per member."""

    state: PyTree
    sums: Sums
    ended_rows: list[EpisodeEnds]
    """The `EpisodeEnds`, if the program reports episodes; else empty."""
    health: Any
    """The health counters of the updates, if the strategy keeps them."""


def run_together(
    strategy: Strategy, with_episodes: bool, state: PyTree, sums: Sums, start: Array, stop: Array
) -> BatchedResult:
    """Run iterations `start .. stop-1` of several members at once; they share all counters, which are scalars."""
    program = partial(run_with_episodes if with_episodes else run, strategy)
    with mapped_over(len(sums.count)):
        state, sums, *ended_rows = jax.vmap(program, in_axes=(0, 0, None, None))(state, sums, start, stop)
    return BatchedResult(
        state, sums, ended_rows, strategy.state_fns.health and jax.vmap(strategy.state_fns.health)(state)
    )


MAX_EPISODE_STEPS = 1 << 18
"""Maximum number of environment steps in one call that reports episodes, but at least one iteration."""


def max_iterations(strategy: Strategy) -> int:
    """Return the maximum number of iterations of `run_with_episodes`, which is the length of its arrays of episodes."""
    return max(1, MAX_EPISODE_STEPS // strategy.env_steps_per_step)


def run_with_episodes(
    strategy: Strategy, state: PyTree, sums: Sums, start: Array, stop: Array
) -> tuple[PyTree, Sums, EpisodeEnds]:
    """Run iterations `start .. stop-1`, at most `max_iterations`; return the state, the sums and the ended episodes.

    Leaves of the latter are `[max_iterations, T, N]`: an iteration writes one row, whether or not an episode ended.
    """
    assert isinstance(strategy.step, ComposedStep)
    step, most = strategy.step.with_episodes, max_iterations(strategy)
    _, _, like = jax.eval_shape(step, state, state.key, start)
    # Allocate for the longest call, so that one program serves any length.
    blank = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), like)

    def body(
        carry: tuple[PyTree, Sums, Array, EpisodeEnds], key: Key, t: Array
    ) -> tuple[PyTree, Sums, Array, EpisodeEnds]:
        state, sums, place, ended_rows = carry
        state, metrics, ended = step(state, key, t)
        write = lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, place, 0)
        return state, add(sums, metrics), place + 1, jax.tree.map(write, ended_rows, ended)

    state, sums, _, ended_rows = iterate(body, state.key, (state, sums, jnp.int32(0), blank), start, stop)
    return state, sums, ended_rows


def run_one_with_episodes(
    strategy: Strategy, state: PyTree, sums: Sums, arrival: PyTree, t: Array
) -> tuple[PyTree, Sums, EpisodeEnds]:
    """Run iteration `t` of a strategy with actors, on the batch `arrival`; return also the ended episodes."""
    assert isinstance(strategy.step, ComposedStep)
    state, metrics, ended = strategy.step.with_episodes(state, fold(state.key, t), t, arrival)
    return state, add(sums, metrics), jax.tree.map(lambda x: x[None], ended)


def add(sums: Sums, metrics: Metrics) -> Sums:
    """Add the metrics of one iteration to the sums."""
    return merge_sums(sums, stack_metrics(metrics))


def merge_sums(sums: Sums, new: Stat | Sums) -> Sums:
    """Add stacked metrics, or other sums."""
    # Kahan summation: subtract the rounding error of the last addition before the next one.
    addend = new.sum - sums.error
    total = sums.sum + addend
    count = sums.count + new.count.astype(jnp.uint32)
    # A smaller count than before has wrapped around, at most once.
    wraps = sums.wraps + (count < sums.count).astype(jnp.uint32)
    return Sums(
        count=count,
        wraps=wraps + new.wraps if isinstance(new, Sums) else wraps,
        sum=total,
        error=(total - sums.sum) - addend,
        min=jnp.minimum(sums.min, new.min),
        max=jnp.maximum(sums.max, new.max),
    )


def summarise(shapes: dict[str, Any], sums: Sums) -> dict[str, float | int | None]:
    """Return the columns of a row: totals as integers; mean, `_min` and `_max` of statistics (`None` if empty)."""
    row: dict[str, float | int | None] = {}
    # Not `jax.device_get`: for small arrays on the CPU it takes thirty times as long.
    fields = (sums.count, sums.wraps, sums.sum, sums.min, sums.max)
    columns = zip(*(np.asarray(x).tolist() for x in fields), strict=True)
    for (name, shape), (count, wraps, value, low, high) in zip(shapes.items(), columns, strict=True):
        count += wraps << 32
        if isinstance(shape, Total):
            row[name] = count
        else:
            mean = value / count if count else None
            row |= {name: mean, f"{name}_min": low if count else None, f"{name}_max": high if count else None}
    return row


class Compiled(NamedTuple):
    """The compiled programs of a run, and the shapes of their states."""

    init: Any
    """`(key) -> (state, sums)`; in a resumed run, compiled when first called."""
    run: Any
    """`(state, sums, start, stop) -> (state, sums)`, with actors `(state, sums, arrival, t) -> ...`; state and sums are
    donated. A program that reports episodes also returns `EpisodeEnds`."""
    like: Saved
    metrics: dict[str, Any]


def compile_all(
    strategy: Strategy,
    key: Array,
    evaluator: Any,
    params: Any,
    resume: bool,
    with_episodes: bool = False,
    runs: bool = True,
) -> Compiled:
    """Compile all programs of a run concurrently, each in a thread: XLA releases the GIL while it compiles.

    With `with_episodes`, the training program also returns the ended episodes; without `runs` there is none, for a
    member that a team trains. Programs compiled earlier in this process for the same strategy are reused.
    """
    processes.broadcast("compile", resume)
    # `made` has the programs that this process has already compiled for the strategy.
    init, made, values = jit_init(strategy), program_cache(strategy), values_of(strategy)
    like, run = state_shapes(strategy), "run_with_episodes" if with_episodes else "run"
    state = like[0]
    # Concurrent traces share JAX's caches, which changes what XLA sees of sharded programs: compile those in turn.
    with ThreadPoolExecutor(3 if strategy.placement.shards == 1 else 1) as pool:
        submit = lambda job, *args: pool.submit(bind_context(job), *args)
        run_job = None if run in made or not runs else submit(_compile_run, strategy, like, with_episodes)
        init_job = None if resume or "init" in made else submit(lambda: init.lower(key, values).compile())
        if hasattr(evaluator, "compile"):
            submit(evaluator.compile, jax.eval_shape(params, state), key).result()
        made |= {run: run_job.result()} if run_job else {}
        made |= {"init": init_job.result()} if init_job else {}
    processes.meet_compiled()
    first = made.get("init", init)
    begin = lambda key: Saved(*devices.run_init(first, key, values))
    where = Saved(*devices.shardings_of(strategy, *like))
    return Compiled(
        begin, runs and devices.place_then(strategy, made[run], state), where, metric_shapes(strategy, state)
    )


def values_of(strategy: Strategy) -> dict[str, Array]:
    """Return the hyperparameters stored in the training state, as arguments of `_init`.

    A single run passes them too: constants in its program could be rounded differently than in a population.
    """
    own = {name: swap.new for name, swap in strategy.info.overrides.items()}
    return {name: jnp.float32(own.get(name, value)) for name, value in _trace_begin(strategy)[1].items()}


def compile_together(strategy: Strategy, width: int, with_episodes: bool) -> Any:
    """Compile `run_together` for `width` members: `(state, sums, start, stop)`, of which the state is donated."""

    def make() -> Any:
        count = jax.ShapeDtypeStruct((), jnp.uint32)
        # The sums come from the host with each call: donate the states only.
        together = partial(run_together, strategy, with_episodes)
        program = jax.jit(together, donate_argnums=0, compiler_options=compiler_options())
        wide = lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype)
        state, sums = jax.tree.map(wide, state_shapes(strategy))
        return _compile(program.trace(devices.shard_state(strategy, state), sums, count, count))

    return cached(strategy, f"{'run_with_episodes' if with_episodes else 'run'} {width} together", make)


def compile_evaluation_together(strategy: Strategy, evaluate: Callable[..., Any], width: int) -> Any:
    """Compile `evaluate`, `(params, key) -> ...`, for `width` members at once, whose parameters are stacked."""
    made, name = program_cache(strategy), f"evaluation {width} together"
    if made.get(name, ())[:1] != (evaluate,):
        wide = lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype)
        params = strategy.policy.params if strategy.policy is not None else lambda state: state
        given = jax.eval_shape(params, state_shapes(strategy).state), jax.eval_shape(lambda: make_key(0))
        program = jax.jit(jax.vmap(evaluate), compiler_options=graph_options())
        made[name] = evaluate, program.lower(*jax.tree.map(wide, given)).compile()
    return made[name][1]


def _compile_run(strategy: Strategy, like: Saved, with_episodes: bool) -> Any:
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    given = (count, count) if strategy.actor_fns is None else (strategy.actor_fns.arrival, count)
    state, sums = like
    return _compile(jit_run(strategy, with_episodes).trace(devices.shard_state(strategy, state), sums, *given))


def _compile(traced: Any) -> Any:
    return traced.lower().compile(compiler_options=product_options(lambda: longest_sum(traced.jaxpr)))


def cached(strategy: Strategy, name: str, make: Callable[[], Any]) -> Any:
    """Return what `make` has made for `strategy` under this name, in this process."""
    made = program_cache(strategy)
    # `setdefault`: of two threads that make it at the same time, both take the first one's.
    return made[name] if name in made else made.setdefault(name, make())


def program_cache(strategy: Strategy) -> dict[str, Any]:
    """Return the mutable cache of the programs compiled for `strategy` in this process, by name.

    The key has the strategy's functions, and JAX's settings of numerics and devices. The strategies used last are
    cached, up to `MAX_STRATEGIES`, so their functions must not depend on mutable state, like any function given to
    `jax.jit`. Strategies with unhashable functions are not cached, nor those without environment steps: the cache would
    retain their data.
    """
    if not strategy.env_steps_per_step:
        return {}
    # Programs depend on the spec of a host environment, too.
    env = strategy.train_env
    # No program uses `set_hyperparams`, which is another function in each member of a population.
    on_state = strategy.state_fns._replace(set_hyperparams=None)
    evaluation, envs = strategy.evaluation, [env, strategy.evaluation.env, getattr(env, "eval_env", None)]
    groups = (strategy, strategy.policy, strategy.placement, evaluation, on_state, on_state.refill, *envs)
    functions = [[part for part in group or () if callable(part)] for group in groups]
    facts: list[Any] = [part and _facts(part) for part in envs]
    facts += [strategy.env_steps_per_step, strategy.placement.shards]
    if strategy.placement.devices > 1:  # a single one is JAX's default
        facts += [strategy.placement.first_device, strategy.placement.devices]
    try:
        return _programs((*map(tuple, functions), *facts, current_forms(), *options_of().values()))
    # Unhashable: return a fresh dict, so that each caller compiles for itself.
    except TypeError:
        return {}


def _facts(env: Any) -> tuple[Any, ...]:
    """Return the facts of an environment, besides its functions, on which programs depend."""
    values = tuple(dict(getattr(env, "values", {})).items())
    return repr(env.spec), getattr(env, "agents", None), values, getattr(env, "open", None)


@functools.lru_cache(maxsize=MAX_STRATEGIES)
def _programs(key: tuple[Any, ...]) -> dict[str, Any]:
    # The LRU cache is the store: one dict per key.
    del key
    return {}


def state_shapes(strategy: Strategy) -> Saved:
    """Return the shapes of a training state and its sums, as in a checkpoint."""
    state, _ = _trace_begin(strategy)
    return Saved(state, jax.eval_shape(lambda: zero_sums(len(metric_shapes(strategy, state)))))


def _trace_begin(strategy: Strategy) -> tuple[PyTree, dict[str, float]]:
    """Return the shapes of a training state, and the hyperparameters stored in it; traced once."""
    trace = lambda: trace_hyperparams(partial(_begin, strategy), jax.eval_shape(lambda: make_key(0)))
    return cached(strategy, "begin", trace)


def _begin(strategy: Strategy, key: Array) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), strategy.init(key))


def _init(strategy: Strategy, key: Array, values: Mapping[str, Array] | None = None) -> tuple[PyTree, Sums]:
    with _set_values(strategy, values or {}):
        state = _begin(strategy, key)
    return state, zero_sums(len(metric_shapes(strategy, state)))


def _warm_up(strategy: Strategy, state: PyTree, key: Array, values: Mapping[str, Array]) -> tuple[PyTree, tuple[()]]:
    assert strategy.state_fns.warm_up is not None
    with _set_values(strategy, values):
        return strategy.state_fns.warm_up(state, key), ()  # `over_devices` wraps functions with two results


def _set_values(strategy: Strategy, values: Mapping[str, Array]) -> AbstractContextManager[None]:
    """Replace hyperparameters in the strategy by arrays, which are arguments of the program that is traced."""
    old = _trace_begin(strategy)[1] if values else {}
    return override({name: Override(old[name], value) for name, value in values.items()})


def jit_init(strategy: Strategy) -> Any:
    """Return the program `(key, values of hyperparameters = {}) -> (state, sums)`, compiled when first called."""
    init = devices.over_devices(strategy, partial(_init, strategy), state_shapes(strategy)[0], begins=True)
    # Sharded: the options for fast compilation make XLA compute a sum in two places, with different rounding.
    options = once_options() if strategy.placement.shards == 1 else spread_options(graph_options())
    return cached(strategy, "jit_init", lambda: jax.jit(init, compiler_options=options))


def jit_warm_up(strategy: Strategy) -> Any:
    """Return the program `(state, key, values of hyperparameters) -> (state, ())` of `StateFns.warm_up`, compiled when
    first called; the state is donated."""
    program = devices.over_devices(strategy, partial(_warm_up, strategy), state_shapes(strategy)[0])
    options = once_options() if strategy.placement.shards == 1 else spread_options(graph_options())
    return cached(strategy, "jit_warm_up", lambda: jax.jit(program, donate_argnums=0, compiler_options=options))


def rerun_warm_up(strategy: Strategy, saved: Saved, key: Array) -> Saved:
    """Return a fresh state whose initial weights have acted in its warm-up, if that depends on them; donated.

    Of several processes, all call it.
    """
    if strategy.state_fns.warm_up is None:
        return saved
    with processes.reported():
        return saved._replace(state=jit_warm_up(strategy)(saved.state, key, values_of(strategy))[0])


def jit_run(strategy: Strategy, with_episodes: bool = False) -> Any:
    """Return the program of `Compiled.run`, compiled when first called."""
    programs = (run, run_with_episodes) if strategy.actor_fns is None else (run_one, run_one_with_episodes)
    spread = devices.over_devices(strategy, partial(programs[with_episodes], strategy), state_shapes(strategy)[0])
    name = "jit_run_with_episodes" if with_episodes else "jit_run"
    return cached(strategy, name, lambda: jit_donating(spread, strategy.placement.shards))


def jit_refill(strategy: Strategy) -> Any:
    """Return the program `(state, first, stop) -> state` of `BufferRefill.fill`, compiled when first called."""
    assert strategy.state_fns.refill is not None
    fill = partial(jax.jit, strategy.state_fns.refill.fill, donate_argnums=0, compiler_options=once_options())
    return cached(strategy, "jit_refill", fill)


def jit_donating(function: Callable[..., Any], shards: int = 1) -> Any:
    """Jit a training function with the compiler options for training; its first two arguments are donated."""
    options = compiler_options() if shards == 1 else spread_options(compiler_options())
    return jax.jit(function, donate_argnums=(0, 1), compiler_options=options)


def longest_sum(jaxpr: Any) -> int:
    """Return the longest contraction of all matrix products in a jaxpr, nested ones included.

    Products of two vectors do not count: XLA turns them into sums.
    """
    longest = 0
    for eqn in walk(jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            if eqn.outvars[0].aval.ndim > len(batch):
                longest = max(longest, math.prod(shape[axis] for axis in contracted))
    return longest


def check_step(strategy: Strategy, evaluator: Any = None, params: Any = None) -> Plan:
    """Trace one iteration; return the memory plan of a run.

    `evaluator` and `params`, which maps a state to the policy's parameters, add the memory of an evaluation.

    Raises:
      SettingsError: the step changes the structure, shapes or dtypes of its state, or the run cannot fit.
    """
    plan: Plan = cached(strategy, "memory", partial(_check_step, strategy))
    if hasattr(evaluator, "bytes_of"):
        plan = plan._replace(evaluation=evaluator.bytes_of(jax.eval_shape(params, state_shapes(strategy)[0])))
    require_fit(plan, num_envs_of(strategy), getattr(evaluator, "episodes", None))
    return plan


def num_envs_of(strategy: Strategy) -> int | None:
    """Return `num_envs` from the settings of a strategy, if it has them."""
    num_envs = (strategy.info.settings or {}).get("num_envs")
    return num_envs if isinstance(num_envs, int) else None


def _check_step(strategy: Strategy) -> Plan:
    """Return the memory plan of a strategy; check that its step preserves the structure of the state."""
    # Check the state alone first: tracing the step of one that cannot fit may take long.
    state, num_envs = _trace_begin(strategy)[0], num_envs_of(strategy)
    require_fit(plan_of_strategy(strategy, state), num_envs)
    jaxpr, (new, metrics) = jax.make_jaxpr(_step_of(strategy), return_shape=True)(*_step_arguments(strategy, state))
    require_same("strategy: the state after step", new, "that after init", state)
    if not isinstance(metrics, Mapping):
        array = isinstance(metrics, jax.ShapeDtypeStruct)
        came = f"{metrics.dtype}{list(metrics.shape)}" if array else type(metrics).__name__
        raise SettingsError(f"strategy: step returned {came} as metrics; expected a dict of scalars")
    return plan_of(strategy, state, jaxpr)
