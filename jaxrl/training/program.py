"""The compiled loop: iterations of a strategy with running sums of its metrics, one program for every length."""

import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from jaxrl.training.memory import Plan, plan_of, plan_of_state, require_fit
from jaxrl.trees import Array, Key, PyTree, make_key, require_same
from jaxrl.tuning import Override, override, trace_hyperparams
from jaxrl.xla import current_forms
from jaxrl.xla.contexts import bind_context, options_of
from jaxrl.xla.equations import walk
from jaxrl.xla.options import compiler_options, graph_options, once_options, product_options, spread_options

KEPT = 8
"""Strategies whose compiled programs are kept for the next run of the same one."""


class Sums(NamedTuple):
    """Running sums of `M` metrics in the order of their sorted names: memory does not grow with what is summed."""

    count: Array  # type: ignore[assignment]
    """Uint32 `[M]`, modulo 2^32."""
    wraps: Array
    """Uint32 `[M]`: how many times 2^32 there are beside `count`."""
    sum: Array
    """Float32 `[M]`."""
    error: Array
    """Float32 `[M]`, what rounding has lost of `sum` (Kahan 1965): a sum over millions of steps stays exact."""
    min: Array
    max: Array


class Saved(NamedTuple):
    """What a checkpoint holds of a run."""

    state: PyTree
    sums: Sums
    """Of the metrics since the last row."""


Form = Callable[[PyTree], PyTree]
"""Makes of the shapes of a state those of another form in which a checkpoint may hold it."""


def forms_of(strategy: Strategy) -> list[Form]:
    """Return in what forms a checkpoint may hold the state and the sums of a run, beside the one of `state_shapes`.

    Without the replay buffer, which is then `()`. One of shards always has it.
    """
    if strategy.placement.shards > 1 or strategy.state_fns.refill is None:
        return []
    return [without_replay]


def without_replay(saved: Saved) -> Saved:
    """Return a state, and its sums, without what the buffer holds; arrays and shapes alike."""
    return saved._replace(state=saved.state._replace(buffer=()))


def zero_sums(size: int) -> Sums:
    """Return the sums of `size` metrics before the first iteration."""

    def full(value: float, dtype: type = np.float32) -> Any:
        return np.full(size, value, dtype)  # for JAX it would be a program, to be compiled in the midst of a run

    return Sums(full(0, np.uint32), full(0, np.uint32), full(0), full(0), full(math.inf), full(-math.inf))


def metric_shapes(strategy: Strategy, state: PyTree) -> dict[str, Any]:
    """Return the metrics that `strategy.step` reports, as shapes, sorted by name."""
    made = programs_of(strategy)
    if "metrics" not in made:
        _, metrics = jax.eval_shape(_step_of(strategy), *_given(strategy, state))
        made["metrics"] = dict(sorted(metrics.items()))
    return dict(made["metrics"])


def _given(strategy: Strategy, state: PyTree) -> tuple[PyTree, ...]:
    """Return what the step of `strategy` is given, as shapes."""
    arrival = () if strategy.actor_fns is None else (strategy.actor_fns.arrival,)
    return state, state.key, np.uint32(0), *arrival


def _step_of(strategy: Strategy) -> Any:
    """Return the step of `strategy`, traced once for the shapes of its metrics and the memory plan."""
    return programs_of(strategy).setdefault("step", jax.jit(strategy.step, inline=True))


def run(strategy: Strategy, state: PyTree, sums: Sums, start: Array, stop: Array) -> tuple[PyTree, Sums]:
    """Make iterations `start .. stop-1`; return the new state and sums. Pure; compiled once by the trainer."""

    def body(carry: tuple[PyTree, Sums], key: Key, t: Array) -> tuple[PyTree, Sums]:
        state, sums = carry
        state, metrics = strategy.step(state, key, t)
        return state, add(sums, metrics)

    return iterate(body, state.key, (state, sums), start, stop)


def run_one(strategy: Strategy, state: PyTree, sums: Sums, arrival: PyTree, t: Array) -> tuple[PyTree, Sums]:
    """Make iteration `t` of a strategy whose actors have sent `arrival`."""
    state, metrics = strategy.step(state, fold(state.key, t), t, arrival)
    return state, add(sums, metrics)


class Lanes(NamedTuple):
    """What a call for members in lanes `[W, ...]` leaves."""

    state: PyTree
    sums: Sums
    ended_rows: list[EpisodeEnds]
    """Of one that tells of episodes, what ended."""
    health: Any
    """Of a strategy that says how its updates have been going."""


def run_together(strategy: Strategy, tells: bool, state: PyTree, sums: Sums, start: Array, stop: Array) -> Lanes:
    """Make iterations `start .. stop-1` of several members at once; all counters are one scalar for all of them."""
    program = partial(tell if tells else run, strategy)
    state, sums, *ended_rows = jax.vmap(program, in_axes=(0, 0, None, None))(state, sums, start, stop)
    return Lanes(state, sums, ended_rows, strategy.state_fns.health and jax.vmap(strategy.state_fns.health)(state))


MOST_TOLD = 1 << 18
"""Environment steps of one call, at most, of which is told whether they ended an episode; never less than an
iteration's."""


def most_told(strategy: Strategy) -> int:
    """Return how many iterations a call of `tell` makes at most: what each tells is kept, in arrays of that length."""
    return max(1, MOST_TOLD // strategy.env_steps_per_step)


def tell(strategy: Strategy, state: PyTree, sums: Sums, start: Array, stop: Array) -> tuple[PyTree, Sums, EpisodeEnds]:
    """Make iterations `start .. stop-1`, as `run` does, of `most_told` at most; return also what ended in each.

    Its leaves are `[most_told, T, N]`: an iteration writes one row, whether or not an episode ended.
    """
    assert isinstance(strategy.step, ComposedStep)
    step, most = strategy.step.with_episodes, most_told(strategy)
    _, _, like = jax.eval_shape(step, state, state.key, start)
    # Arrays of the longest call, so that one program serves every length.
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


def tell_one(
    strategy: Strategy, state: PyTree, sums: Sums, arrival: PyTree, t: Array
) -> tuple[PyTree, Sums, EpisodeEnds]:
    """Make iteration `t` of a strategy whose actors have sent `arrival`; return also what ended in it."""
    assert isinstance(strategy.step, ComposedStep)
    state, metrics, ended = strategy.step.with_episodes(state, fold(state.key, t), t, arrival)
    return state, add(sums, metrics), jax.tree.map(lambda x: x[None], ended)


def add(sums: Sums, metrics: Metrics) -> Sums:
    """Add one iteration's metrics."""
    return add_up(sums, stack_metrics(metrics))


def add_up(sums: Sums, new: Stat | Sums) -> Sums:
    """Add what others have summed up."""
    # Kahan's sum: what the last addition has lost is put back before the next one.
    addend = new.sum - sums.error
    total = sums.sum + addend
    count = sums.count + new.count.astype(jnp.uint32)
    # A count that is smaller than before has wrapped around, once at most.
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
    """Return a row of the log: totals as integers; mean, `_min` and `_max` of what was measured (`None` if never)."""
    row: dict[str, float | int | None] = {}
    # Not by `jax.device_get`: of small arrays on the CPU it takes thirty times as long.
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
    """The compiled programs of a run, and the shapes of what they work on."""

    init: Any
    """`(key) -> (state, sums)`; compiled when first called, for a run that is resumed."""
    run: Any
    """`(state, sums, start, stop) -> (state, sums)`, of one that acts on the host `(state, sums, arrival, t) -> ...`;
    the state and sums given are donated. One that tells of episodes returns them as well."""
    like: Saved
    metrics: dict[str, Any]


def compile_all(
    strategy: Strategy, key: Array, evaluator: Any, params: Any, resume: bool, tells: bool = False, runs: bool = True
) -> Compiled:
    """Compile all programs of a run at once, each in a thread: XLA lets go of Python's lock while it compiles.

    With `tells`, the training also tells which episodes ended. Without `runs` its program is left out: others have it.
    What was compiled for the same strategy before, in this process, is used again.
    """
    processes.tell("compile", resume)
    # What this process has compiled for the strategy before is in `made`.
    init, made, values = jit_init(strategy), programs_of(strategy), values_of(strategy)
    like, run = state_shapes(strategy), "tell" if tells else "run"
    state = like[0]
    # What is traced at the same time shares what JAX remembers, and so decides what XLA sees of programs of shards.
    with ThreadPoolExecutor(3 if strategy.placement.shards == 1 else 1) as pool:
        submit = lambda job, *args: pool.submit(bind_context(job), *args)
        run_job = None if run in made or not runs else submit(_compile_run, strategy, like, tells)
        init_job = None if resume or "init" in made else submit(lambda: init.lower(key, values).compile())
        if hasattr(evaluator, "compile"):
            submit(evaluator.compile, jax.eval_shape(params, state), key).result()
        made |= {run: run_job.result()} if run_job else {}
        made |= {"init": init_job.result()} if init_job else {}
    processes.meet("compiled")
    first = made.get("init", init)
    begin = lambda key: Saved(*devices.begun(first, key, values))
    where = Saved(*devices.whereabouts(strategy, *like))
    return Compiled(begin, runs and devices.after_placing(strategy, made[run]), where, metric_shapes(strategy, state))


def values_of(strategy: Strategy) -> dict[str, Array]:
    """Return the settings that live in a training state, as `_init` takes them.

    A run by itself hands them over as well: as constants in its program they could be rounded otherwise than in a
    population.
    """
    own = {name: swap.new for name, swap in strategy.info.overrides.items()}
    return {name: jnp.float32(own.get(name, value)) for name, value in _traced_begin(strategy)[1].items()}


def compile_together(strategy: Strategy, width: int, tells: bool) -> Any:
    """Compile `run_together` for `width` members; `(state, sums, start, stop) -> Lanes`, the state is donated."""
    wide = lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype)
    made, name = programs_of(strategy), f"{'tell' if tells else 'run'} {width} together"
    if name not in made:
        count = jax.ShapeDtypeStruct((), jnp.uint32)
        # The sums come from the host with each call, so only the states are donated.
        program = jax.jit(partial(run_together, strategy, tells), donate_argnums=0, compiler_options=compiler_options())
        traced = program.trace(*jax.tree.map(wide, state_shapes(strategy)), count, count)
        made[name] = traced.lower().compile(compiler_options=product_options(lambda: longest_sum(traced.jaxpr)))
    return made[name]


def _compile_run(strategy: Strategy, like: Saved, tells: bool) -> Any:
    count = jax.ShapeDtypeStruct((), jnp.uint32)
    given = (count, count) if strategy.actor_fns is None else (strategy.actor_fns.arrival, count)
    state, sums = like
    traced = jit_run(strategy, tells).trace(devices.placed(strategy, state), sums, *given)
    return traced.lower().compile(compiler_options=product_options(lambda: longest_sum(traced.jaxpr)))


def programs_of(strategy: Strategy) -> dict[str, Any]:
    """Return what was compiled for `strategy` in this process, by name, to be added to.

    Strategies are told apart by their functions, and programs by what JAX was told about numbers and devices. The
    programs of the `KEPT` strategies used last are kept, so what their functions refer to must not change, as of any
    function given to `jax.jit`. A strategy whose functions cannot be hashed keeps none, nor does one that takes no
    environment steps: its data would be kept with them.
    """
    if not strategy.env_steps_per_step:
        return {}
    # An environment stepped on the host has a spec that programs are made for, too.
    env = strategy.actor_fns.env if strategy.actor_fns else strategy.env
    # No program sets hyperparameters, and each member of a population has a function of its own for it.
    on_state = strategy.state_fns._replace(set_hyperparams=None)
    evaluation, envs = strategy.evaluation, [env, strategy.evaluation.env, getattr(env, "eval_env", None)]
    groups = (strategy, strategy.policy, strategy.placement, evaluation, on_state, on_state.refill, *envs)
    functions = [[part for part in group or () if callable(part)] for group in groups]
    facts: list[Any] = [part and _facts(part) for part in envs]
    facts += [strategy.env_steps_per_step, strategy.placement.shards]
    try:
        return _programs((*map(tuple, functions), *facts, *_where(strategy), current_forms(), *options_of().values()))
    # Nothing is kept: whoever asks gets a dict of its own, and compiles for itself.
    except TypeError:
        return {}


def _facts(env: Any) -> tuple[Any, ...]:
    """Return what else than its functions decides programs of an environment."""
    values = tuple(dict(getattr(env, "values", {})).items())
    return repr(env.spec), getattr(env, "agents", None), values, getattr(env, "open", None)


def _where(strategy: Strategy) -> tuple[int, ...]:
    """Return the first device and the number of devices of a strategy; the one of a single device is JAX's default."""
    return (strategy.placement.first_device, strategy.placement.devices) if strategy.placement.devices > 1 else ()


@functools.lru_cache(maxsize=KEPT)
def _programs(key: tuple[Any, ...]) -> dict[str, Any]:
    # The cache is the store: each key has a dict, and the one not used for longest is dropped.
    del key
    return {}


def state_shapes(strategy: Strategy) -> Saved:
    """Return the shapes of a training state and of its sums, as a checkpoint holds them."""
    state, _ = _traced_begin(strategy)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    sums: Sums = jax.tree.map(shape, zero_sums(len(metric_shapes(strategy, state))))
    return Saved(state, sums)


def _traced_begin(strategy: Strategy) -> tuple[PyTree, dict[str, float]]:
    """Return the shapes of a training state, and the settings that live in it; traced once for all who ask."""
    made = programs_of(strategy)
    if "begin" not in made:
        made["begin"] = trace_hyperparams(partial(_begin, strategy), jax.eval_shape(lambda: make_key(0)))
    shapes, found = made["begin"]
    return shapes, found


def _begin(strategy: Strategy, key: Array) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), strategy.init(key))


def _init(strategy: Strategy, key: Array, values: Mapping[str, Array] | None = None) -> tuple[PyTree, Sums]:
    old = _traced_begin(strategy)[1] if values else {}
    # The settings are arguments of this program: in place of each number that the strategy holds comes an array.
    with override({name: Override(old[name], value) for name, value in (values or {}).items()}):
        state = _begin(strategy, key)
    return state, zero_sums(len(metric_shapes(strategy, state)))


def jit_init(strategy: Strategy) -> Any:
    """Return the program `(key, values of hyperparameters = {}) -> (state, sums)`, compiled when first called."""
    init = devices.over_devices(strategy, partial(_init, strategy), state_shapes(strategy)[0], begins=True)
    # Compiled quickly, XLA works the same sum out in two places, and rounds it in two ways.
    options = once_options() if strategy.placement.shards == 1 else spread_options(graph_options())
    program = jax.jit(init, compiler_options=options)
    return programs_of(strategy).setdefault("jit_init", program)


def jit_run(strategy: Strategy, tells: bool = False) -> Any:
    """Return the program of `Compiled.run`, compiled when first called."""
    programs = (run, tell) if strategy.actor_fns is None else (run_one, tell_one)
    spread = devices.over_devices(strategy, partial(programs[tells], strategy), state_shapes(strategy)[0])
    made = jit_training(spread, strategy.placement.shards)
    return programs_of(strategy).setdefault("jit_tell" if tells else "jit_run", made)


def jit_refill(strategy: Strategy) -> Any:
    """Return the program `(state, first, stop) -> state` of `BufferRefill.fill`, compiled when first called."""
    assert strategy.state_fns.refill is not None
    program = jax.jit(strategy.state_fns.refill.fill, donate_argnums=0, compiler_options=once_options())
    return programs_of(strategy).setdefault("jit_refill", program)


def jit_training(function: Callable[..., Any], shards: int = 1) -> Any:
    """Compile what optimises when it is first called; its first two arguments are donated."""
    options = compiler_options() if shards == 1 else spread_options(compiler_options())
    return jax.jit(function, donate_argnums=(0, 1), compiler_options=options)


def longest_sum(jaxpr: Any) -> int:
    """Return over how many entries a product of matrices sums, the longest one wherever it stands.

    A product of two vectors is none: XLA makes a sum of it.
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

    `evaluator` and `params`, from a state to its policy's parameters, say what evaluating takes.

    Raises:
      SettingsError: the step changes the structure, shapes or dtypes of its state, or the run cannot fit.
    """
    made = programs_of(strategy)
    if "memory" not in made:
        made["memory"] = _check_step(strategy)
    plan: Plan = made["memory"]
    if hasattr(evaluator, "bytes_of"):
        plan = plan._replace(evaluation=evaluator.bytes_of(jax.eval_shape(params, state_shapes(strategy)[0])))
    require_fit(plan, num_envs_of(strategy), getattr(evaluator, "episodes", None))
    return plan


def num_envs_of(strategy: Strategy) -> int | None:
    """Return how many environments the settings of a strategy ask for, if they do."""
    num_envs = (strategy.info.settings or {}).get("num_envs")
    return num_envs if isinstance(num_envs, int) else None


def _check_step(strategy: Strategy) -> Plan:
    """Return the memory plan of a strategy whose step keeps its state."""
    # The state alone is checked first, since tracing a step of one that cannot fit may take long.
    state, num_envs = _traced_begin(strategy)[0], num_envs_of(strategy)
    require_fit(plan_of_state(state, strategy.state_fns.capacity), num_envs)
    jaxpr, (new, metrics) = jax.make_jaxpr(_step_of(strategy), return_shape=True)(*_given(strategy, state))
    require_same("strategy: the state after step", new, "that after init", state)
    if not isinstance(metrics, Mapping):
        array = isinstance(metrics, jax.ShapeDtypeStruct)
        came = f"{metrics.dtype}{list(metrics.shape)}" if array else type(metrics).__name__
        raise SettingsError(f"strategy: step returned {came} as metrics; expected a dict of scalars")
    return plan_of(strategy, state, jaxpr)
