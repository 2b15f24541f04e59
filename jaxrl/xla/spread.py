"""The function of one shard, run for all shards of this device in sequence, and together only in collectives.

`jax.vmap` with a named axis defines the meaning of such a function. But it runs all shards in one batch, and the
rounding of a matrix product depends on the size of its batch, so the bits would depend on the number of shards per
device. Here all computations of a single shard run in a loop over shards, always in the same shapes; replicated values
are computed once, and collectives gather from all devices. Parts of large arrays, such as a ring of transitions, are
read and written in place for all shards at once, since this moves numbers without rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl.shards as shards_of_run
from jaxrl.errors import SettingsError
from jaxrl.shards import AXIS, axis_size
from jaxrl.trees import Array, PyTree, is_key, key_impl, row_struct
from jaxrl.xla.attempts import with_fallback
from jaxrl.xla.equations import Code, Equation, Step, arrays, bind, body_of_call, read, run, scan_counts, walk_equation

DEVICES = "envs"
"""Mesh axis over which shards are distributed."""
COLLECTIVES = frozenset({"all_gather", "axis_index"})
"""Primitives that depend on other shards or on the index of the shard."""
PARTS = frozenset({"dynamic_slice", "gather", "dynamic_update_slice", "scatter", "scatter-max", "scatter_max"})
"""Primitives that read or write a part of their first input."""
FORMS = frozenset({"reshape", "squeeze", "broadcast_in_dim", "bitcast_convert_type", "expand_dims", "copy"})
"""Primitives that only change the shape of their input."""


class Spread(NamedTuple):
    """Values, each with a flag: per shard, `[V, ...]` for the shards of this device, or replicated."""

    values: list[Any]
    each: list[bool]


def run_shards(
    function: Callable[..., PyTree],
    shards: int,
    args: Sequence[PyTree],
    each: Sequence[PyTree],
    own: Callable[[PyTree], PyTree],
) -> Any:
    """Run `function(*args)` for all shards of this device; return its result, and a tree of flags: which leaves are per
    shard.

    Args:
      function: the computation of one shard, with the axis `shards`.
      shards: number of shards on all devices.
      args: arguments; those per shard are `[V, ...]` for the shards of this device.
      each: trees of bools like `args`: whether a leaf is per shard.
      own: `(result) -> bools`: the same for the result, used if the program cannot be analysed.
    """
    leaves, form = jax.tree.flatten(tuple(args))
    given = Spread(leaves, jax.tree.leaves(tuple(each)))
    flat = lambda *leaves: function(*jax.tree.unflatten(form, leaves))
    return with_fallback(
        "shards one by one",
        lambda: _run_one_by_one(flat, shards, given),
        lambda: _run_in_one_batch(flat, shards, given, own),
    )


def _run_in_one_batch(
    flat: Callable[..., PyTree], shards: int, given: Spread, own: Callable[[PyTree], PyTree]
) -> tuple[PyTree, PyTree]:
    """Run a function for all shards of this device in one batch; its rounding then depends on their number."""
    # The axis of shards is divided: its outer part is the mesh's, and `shards_of_run` reduces over both.
    axes = [0 if own else None for own in given.each]
    with shards_of_run.outer_axis(DEVICES if _devices() > 1 else None):
        made = jax.vmap(flat, in_axes=axes, axis_name=AXIS, axis_size=_here(shards))(*given.values)
    flags = own(made)
    return jax.tree.map(lambda x, own: x if own else x[0], made, flags), flags


def _run_one_by_one(flat: Callable[..., PyTree], shards: int, given: Spread) -> tuple[PyTree, PyTree]:
    # Traced for one shard, with the shapes of one, on an axis of all shards.
    local = [row_struct(x) if own else _like(x) for x, own in zip(given.values, given.each, strict=True)]
    traced, shape = jax.make_jaxpr(flat, axis_env=[(AXIS, shards)], return_shape=True)(*local)
    made = _interpret(_inline(read(traced)), given, shards)
    result = jax.tree.structure(shape)
    return jax.tree.unflatten(result, made.values), jax.tree.unflatten(result, made.each)


def replicate(tree: PyTree, each: PyTree, shards: int) -> PyTree:
    """Return `tree` with a copy of each replicated leaf for every shard of this device."""
    here = _here(shards)
    return jax.tree.map(lambda x, own: x if own else jnp.broadcast_to(x, (here, *x.shape)), tree, each)


def _here(shards: int) -> int:
    """Return the number of shards on this device."""
    return shards // _devices()


def _devices() -> int:
    return axis_size(DEVICES) or 1


def _like(x: Any) -> jax.ShapeDtypeStruct:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# --- analysis ---------------------------------------------------------------------------------------------------


def _inline(code: Code) -> Code:
    """Replace every call by its equations."""
    plain = Code(list(code.ins), list(code.outs), [], dict(code.given), code.avals, code.numbers)
    renamed: dict[int, int] = {}
    for equation in code.equations:
        ins = tuple(renamed.get(i, i) for i in equation.ins)
        inner = body_of_call(equation)
        if inner is None:
            plain.equations.append(equation._replace(ins=ins))
            continue
        inner = _inline(inner)
        # The function's inputs are the call's; all its other values get new numbers.
        place = dict(zip(inner.ins, ins, strict=True))
        for number, aval in inner.avals.items():
            place.setdefault(number, -1)
            if place[number] == -1:
                place[number] = plain.add(aval)
        plain.given.update({place[i]: value for i, value in inner.given.items()})
        for e in inner.equations:
            plain.equations.append(e._replace(ins=tuple(place[i] for i in e.ins), outs=tuple(place[i] for i in e.outs)))
        renamed.update(zip(equation.outs, (place[i] for i in inner.outs), strict=True))
    return plain._replace(outs=[renamed.get(i, i) for i in plain.outs])


def _has_collective(equation: Equation) -> bool:
    """Return whether an equation is or contains a collective over shards."""
    return any(eqn.primitive.name in COLLECTIVES and AXIS in _axes(eqn) for eqn in walk_equation(equation.eqn))


def _axes(eqn: Any) -> tuple[Any, ...]:
    name = eqn.params["axis_name"]
    return name if isinstance(name, tuple) else (name,)


def _find_per_shard(code: Code, each: Sequence[bool]) -> list[bool]:
    """Return whether each result of a function is per shard, given the same for the inputs."""
    kinds = dict.fromkeys(code.given, False) | dict(zip(code.ins, each, strict=True))
    for equation in code.equations:
        ins = [kinds[i] for i in equation.ins]
        if equation.name in COLLECTIVES and _has_collective(equation):
            # A gathered value is the same for all shards, while the index differs.
            outs = [equation.name == "axis_index"]
        elif equation.name == "scan":
            outs = _scan_per_shard(equation, ins)
        elif equation.name == "while" and _has_collective(equation):
            outs = _while_per_shard(equation, ins)
        elif equation.name == "cond" and _has_collective(equation):
            outs = _cond_per_shard(equation, ins)
        else:
            outs = [any(ins)] * len(equation.outs)
        kinds.update(zip(equation.outs, outs, strict=True))
    return [kinds[i] for i in code.outs]


def _body(equation: Equation, name: str = "jaxpr") -> Code:
    return _inline(read(equation.eqn.params[name]))


def _scan_per_shard(equation: Equation, ins: list[bool]) -> list[bool]:
    if not _has_collective(equation):
        return [any(ins)] * len(equation.outs)
    return _fixpoint(_body(equation), ins, *scan_counts(equation))


def _while_per_shard(equation: Equation, ins: list[bool]) -> list[bool]:
    consts = equation.eqn.params["cond_nconsts"]
    return _fixpoint(
        _body(equation, "body_jaxpr"),
        ins[consts:],
        equation.eqn.params["body_nconsts"],
        len(equation.outs),
    )


def _branches(equation: Equation) -> list[Code]:
    return [_inline(read(branch)) for branch in equation.eqn.params["branches"]]


def _cond_per_shard(equation: Equation, ins: list[bool]) -> list[bool]:
    """Return whether each result is per shard: if it is in any branch."""
    return [
        any(outs) for outs in zip(*(_find_per_shard(branch, ins[1:]) for branch in _branches(equation)), strict=True)
    ]


def _sources(equation: Equation) -> set[int]:
    """Return the inputs of which an equation reads or writes a part, or changes the shape; none if it computes floats.

    It is one of `PARTS` or `FORMS`, or has a form of these for each platform, as a gather from a large ring.
    """
    if equation.name in PARTS | FORMS:
        return set(equation.ins[:1])
    if "branches_platforms" not in equation.eqn.params:
        return set()
    found = set[int]()
    for branch in _branches(equation):
        outside = dict(zip(branch.ins, equation.ins[1:], strict=True))
        # A branch that computes would round, in a batch that depends on the number of devices.
        for inner in branch.equations:
            if _computes_floats(inner):
                return set()
            if inner.name in PARTS and inner.ins[0] in outside:
                found.add(outside[inner.ins[0]])
    return found


def _computes_floats(equation: Equation) -> bool:
    floats = any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.eqn.outvars)
    return floats and equation.name not in PARTS | FORMS | {"slice", "optimization_barrier"}


def _fixpoint(body: Code, ins: list[bool], consts: int, carry: int) -> list[bool]:
    """Return whether each result of a loop is per shard; a carried value is, once it is in any iteration."""
    ins = list(ins)
    while True:
        outs = _find_per_shard(body, ins)
        carried = [a or b for a, b in zip(ins[consts : consts + carry], outs, strict=False)]
        if carried == ins[consts : consts + carry]:
            return [*carried, *outs[carry:]]
        ins[consts : consts + carry] = carried


# --- running ----------------------------------------------------------------------------------------------------


def _interpret(code: Code, given: Spread, shards: int) -> Spread:
    """Run a function for all shards of this device."""
    stage = _Interpreter(code, given, shards)
    for place, equation in enumerate(code.equations):
        stage.take(place, equation)
    stage.finish()
    return Spread(arrays(code, stage.values, code.outs), [i in stage.each for i in code.outs])


class _Interpreter:
    """Values computed so far, and the pending equations.

    Pending equations are compiled together: one group runs in a loop over shards, the other once.
    """

    def __init__(self, code: Code, given: Spread, shards: int) -> None:
        self.code, self.shards = code, shards
        self.values = {**code.given, **dict(zip(code.ins, given.values, strict=True))}
        self.each = {i for i, own in zip(code.ins, given.each, strict=True) if own}
        self.waiting: dict[bool, list[Equation]] = {True: [], False: []}
        # Index of the last equation that reads each value; results of the function are needed to the end.
        self.last = {i: place for place, equation in enumerate(code.equations) for i in equation.ins}
        self.last.update(dict.fromkeys(code.outs, len(code.equations)))

    def take(self, place: int, equation: Equation) -> None:
        """Run an equation, or add it to the pending ones."""
        own = [i in self.each for i in equation.ins]
        # Shards communicate: all inputs of the collective are computed first, for every shard.
        if _has_collective(equation):
            self._settle(place, equation.ins)
            self._put(equation, *_run_collective(equation, self._spread(equation), self.shards))
        elif equation.name == "platform_index":  # pending, it would cut the group of replicated equations in two
            self._put(equation, bind(equation), [False])
        # Moving numbers rounds nothing, so all shards of this device may do it in one batch.
        elif self._is_in_place(equation):
            self._settle(place, equation.ins)
            batched = jax.vmap(partial(bind, equation), in_axes=[0 if x else None for x in own])
            made = batched(*(self.values[i] for i in equation.ins))
            self._put(equation, list(made), [True] * len(equation.outs))
        else:
            self.waiting[any(own)].append(equation)
            self.each.update(equation.outs if any(own) else ())

    def finish(self) -> None:
        """Run all pending equations."""
        self._settle(len(self.code.equations), self.code.outs)

    def _is_in_place(self, equation: Equation) -> bool:
        """Return whether an equation moves parts of arrays that are per shard and not pending."""
        sources = _sources(equation)
        return bool(sources) and self.each.issuperset(sources) and not self._waits(True, sources)

    def _waits(self, each: bool, numbers: Iterable[int]) -> bool:
        """Return whether some of these values are pending."""
        return not {i for equation in self.waiting[each] for i in equation.outs}.isdisjoint(numbers)

    def _settle(self, place: int, numbers: Sequence[int]) -> None:
        """Compute these values before equation number `place`."""
        # The group per shard may read replicated values that are pending; the reverse cannot be, as it would make these
        # per shard.
        if self._waits(True, numbers):
            if self._waits(False, [i for equation in self.waiting[True] for i in equation.ins]):
                self._flush(place, False)
            self._flush(place, True)
        if self._waits(False, numbers):
            self._flush(place, False)

    def _spread(self, equation: Equation) -> Spread:
        return Spread(arrays(self.code, self.values, equation.ins), [i in self.each for i in equation.ins])

    def _put(self, equation: Equation, made: Iterable[Any], own: Sequence[bool]) -> None:
        self.values.update(zip(equation.outs, made, strict=True))
        self.each.update(i for i, x in zip(equation.outs, own, strict=True) if x)

    def _flush(self, place: int, each: bool) -> None:
        """Run the pending equations per shard (`each`) or the others; keep values needed from equation `place` on."""
        equations, self.waiting[each] = self.waiting[each], []
        steps = [Step(partial(bind, equation), equation.ins, equation.outs) for equation in equations]
        made = {i for equation in equations for i in equation.outs}
        others = [i for equation in self.waiting[not each] for i in equation.ins]
        # Keep values that are read from `place` on or by the other group.
        kept = [i for i in dict.fromkeys(i for e in equations for i in e.outs) if self.last.get(i, -1) >= place]
        kept += [i for i in made.intersection(others) if i not in kept]
        # Inputs from outside the group: `rows` are sliced for each shard, `same` are the same for all.
        needed = [i for equation in equations for i in equation.ins if i not in made and i not in self.code.given]
        rows, same = (list(dict.fromkeys(i for i in needed if (i in self.each) == own)) for own in (True, False))

        def function(same_values: list[Any], row: list[Any]) -> list[Any]:
            values = {**self.code.given, **dict(zip((*same, *rows), (*same_values, *row), strict=True))}
            run(steps, values)
            return arrays(self.code, values, kept)

        alone = partial(_compile_alone(function), [self.values[i] for i in same])
        given = [self.values[i] for i in rows]
        self.values.update(
            zip(kept, _loop_over_shards(alone, given, _here(self.shards)) if each else alone([]), strict=True)
        )


def _compile_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled by XLA without its surroundings.

    Inlined, it would be fused with them and round differently: the surroundings depend on the number of devices, while
    the result must not.
    """
    from jax.experimental.xla_metadata import set_xla_metadata

    inside = jax.jit(lambda *args: set_xla_metadata(inlineable=None)(function)(*args))
    return set_xla_metadata(inlineable="false")(inside)


def _loop_over_shards(function: Callable[[list[Any]], list[Any]], rows: list[Any], shards: int) -> list[Any]:
    """Run a function for one shard after the other; inputs and outputs are rows of shards."""
    # XLA would unroll a loop over a single shard, and choose another layout for the inputs. So the number of iterations
    # is hidden by a barrier, and a second row is added that is never run.
    add = (lambda x: jnp.concatenate([x, x])) if shards == 1 else lambda x: x
    rows, turns = [add(x) for x in rows], jax.lax.optimization_barrier(jnp.int32(shards))

    def turn(i: Array, made: list[Any]) -> list[Any]:
        row = function([jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in rows])
        return [jax.lax.dynamic_update_index_in_dim(m, x, i, 0) for m, x in zip(made, row, strict=True)]

    blank = [add(_blank(x, shards)) for x in jax.eval_shape(function, row_struct(rows))]
    return [x[:shards] for x in jax.lax.fori_loop(0, turns, turn, blank)]


def _blank(like: Any, rows: int) -> Array:
    if not is_key(like):
        return jnp.zeros((rows, *like.shape), like.dtype)
    data = jax.eval_shape(jax.random.key_data, like)
    return jax.random.wrap_key_data(jnp.zeros((rows, *data.shape), data.dtype), impl=key_impl(like))


def _run_collective(equation: Equation, given: Spread, shards: int) -> tuple[list[Any], list[bool]]:
    """Run an equation that is or contains a collective."""
    if equation.name == "all_gather":
        return [_gather(given.values[0], given.each[0], shards)], [False]
    if equation.name == "axis_index":
        # A device holds consecutive shards.
        first = jax.lax.axis_index(DEVICES) * _here(shards) if _devices() > 1 else jnp.int32(0)
        return [first + jnp.arange(_here(shards), dtype=jnp.int32)], [True]
    if equation.name == "scan":
        return _scan(equation, given, shards)
    if equation.name == "while":
        return _while(equation, given, shards)
    if equation.name == "cond":
        return _cond(equation, given, shards)
    raise NotImplementedError(f"shards cannot meet inside of {equation.name}")


def _gather(x: Array, own: bool, shards: int) -> Array:
    if not own:
        return jnp.broadcast_to(x, (shards, *x.shape))
    return jax.lax.all_gather(x, DEVICES, tiled=True) if _devices() > 1 else x


def _scan(equation: Equation, given: Spread, shards: int) -> tuple[list[Any], list[bool]]:
    (consts, carry), body = scan_counts(equation), _body(equation)
    # A carried value that any iteration makes per shard is so from the start, since a carry keeps its shape.
    own = _scan_per_shard(equation, given.each)
    begun = Spread(given.values[consts : consts + carry], given.each[consts : consts + carry])
    first = _replicate_to(begun, own[:carry], shards)
    fixed, kinds = given.values[:consts], [*given.each[:consts], *own[:carry], *given.each[consts + carry :]]
    # A scan slices the first axis, so the axis of shards is moved behind it.
    turn = lambda xs, flags: [jnp.moveaxis(x, 0, 1) if f else x for x, f in zip(xs, flags, strict=True)]
    rows = turn(given.values[consts + carry :], given.each[consts + carry :])

    def one(carried: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        made = _interpret(body, Spread([*fixed, *carried, *row], kinds), shards)
        whole = _replicate_to(made, own, shards)
        return whole[:carry], whole[carry:]

    params = {name: equation.eqn.params[name] for name in ("length", "reverse", "unroll")}
    end, made = jax.lax.scan(one, first, rows, **params)
    return [*end, *turn(made, own[carry:])], own


def _while(equation: Equation, given: Spread, shards: int) -> tuple[list[Any], list[bool]]:
    params = equation.eqn.params
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    own, body, test = (
        _while_per_shard(equation, given.each),
        _body(equation, "body_jaxpr"),
        _body(equation, "cond_jaxpr"),
    )
    tested, fixed = (Spread(given.values[a:b], given.each[a:b]) for a, b in ((0, tests), (tests, tests + consts)))
    first = _replicate_to(Spread(given.values[tests + consts :], given.each[tests + consts :]), own, shards)

    def goes_on(carried: Any) -> Array:
        # All shards leave the loop together, so the condition must be replicated.
        made = _interpret(test, Spread([*tested.values, *carried], [*tested.each, *own]), shards)
        if made.each[0]:
            raise SettingsError("shards cannot meet in a loop that each of them ends at a time of its own")
        return jnp.asarray(made.values[0])

    def one(carried: Any) -> Any:
        made = _interpret(body, Spread([*fixed.values, *carried], [*fixed.each, *own]), shards)
        return _replicate_to(made, own, shards)

    return list(jax.lax.while_loop(goes_on, one, first)), own


def _cond(equation: Equation, given: Spread, shards: int) -> tuple[list[Any], list[bool]]:
    if given.each[0]:
        raise SettingsError("shards cannot meet where each of them chooses by itself what to do")
    own = _cond_per_shard(equation, given.each)

    def taken(branch: Code, *values: Any) -> list[Any]:
        return _replicate_to(_interpret(branch, Spread(list(values), given.each[1:]), shards), own, shards)

    branches = [partial(taken, branch) for branch in _branches(equation)]
    return list(jax.lax.switch(given.values[0], branches, *given.values[1:])), own


def _replicate_to(given: Spread, own: Sequence[bool], shards: int) -> list[Any]:
    """Return values with copies per shard where `own` requires them."""
    wanted = zip(given.values, given.each, own, strict=True)
    return [replicate(x, has or not wants, shards) for x, has, wants in wanted]
