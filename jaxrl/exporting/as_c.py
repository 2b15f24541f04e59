"""Export to C99: one header and one source file that need only libm, for controllers, robots and games."""

import itertools
import math
import operator
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxrl.exporting.c_loops import TYPES, Array, Body, View, c_type, literal, row_major, shift, stored_array, workspace
from jaxrl.exporting.function import Function, Part
from jaxrl.exporting.operations import ELEMENTWISE, Operation, refuse, require_plain_convolution, trace
from jaxrl.masks import MASK

INTEGERS = {"rem": "{} % {}", "not": "~{}", "abs": "({t})fabs({})", "integer_pow": "({t})pow({}, {y}.0f)"}
"""Forms of elementwise operations that differ if the result is an integer."""
HELPERS = {
    "maximum": "static {t} maximum_{t}({t} a, {t} b) {{ return {a_nan} || a > b ? a : b; }}",
    "minimum": "static {t} minimum_{t}({t} a, {t} b) {{ return {a_nan} || a < b ? a : b; }}",
    "is_above": "static bool is_above_{t}({t} a, {t} b) {{ return !{b_nan} && ({a_nan} || a > b); }}",
    "is_below": "static bool is_below_{t}({t} a, {t} b) {{ return !{b_nan} && ({a_nan} || a < b); }}",
    "sign": "static {t} sign_{t}({t} a) {{ return {a_nan} || a == 0 ? a : a > 0 ? 1 : -1; }}",
    "square": "static {t} square_{t}({t} a) {{ return a * a; }}",
}
"""Functions that the source includes if it calls them; they propagate NaN, as in JAX."""
HEADER = """/* A policy trained with jaxrl: its greedy action for one observation at a time.
 *
 *     policy_state state;
 *     policy_init(&state);  // before an episode
 *     policy_act(&state, {arguments});  // at each of its steps
 *
 * C99; link with libm (-lm). Nothing is allocated, and the only globals are constants. Threads may call these functions
 * at the same time, each with a policy_state of its own; so may episodes that take turns.
 */
#ifndef POLICY_H
#define POLICY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

{sizes}

/* What lasts from one step to the next, and room for intermediate results. Only policy_init and policy_act use it. */
typedef struct {{
    bool begun; /* whether the episode has had a step */
{fields}
}} policy_state;

/* Begin an episode. */
void policy_init(policy_state *state);

/* Write the greedy action for an observation. Arrays of several axes are flat, with the last axis innermost; their
 * shapes stand above, the spaces of their numbers in policy.json.{notes}
 */
{act};

#ifdef __cplusplus
}}
#endif

#endif
"""
SOURCE = """/* The policy that policy.h declares. */
#include "policy.h"

#include <tgmath.h>

{parts}

void policy_init(policy_state *state)
{{
    state->begun = false;
}}

{act}
{{
{body}
    state->begun = true;
}}
"""
_refuse = partial(refuse, language="C")
Rule = Callable[..., Any]
"""`(body of the function, equation, *operands) -> result`, or a list of several results."""


# --- operations ---------------------------------------------------------------------------------------------------


def _write(body: Body, operation: Operation, given: Sequence[Array]) -> list[Array]:
    """Return the results of an operation."""
    name, eqn = operation.name, operation.eqn
    for x in eqn.outvars:
        c_type(x.aval.dtype)
    rule = RULES.get(name)
    if name in INTEGERS and np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        rule = _expression(INTEGERS[name])
    elif name in ELEMENTWISE:
        rule = _expression(ELEMENTWISE[name].c)
    made = rule(body, eqn, *given) if rule else _refuse(name)
    return made if isinstance(made, list) else [made]


def _expression(form: str) -> Rule:
    return lambda body, eqn, *given: _elementwise(body, eqn, form.replace("{y}", str(eqn.params.get("y"))), given)


def _select(body: Body, eqn: Any, *given: Array) -> Array:
    return _elementwise(body, eqn, "{0} ? {2} : {1}", given) if len(given) == 3 else _refuse("select_n")


def _elementwise(body: Body, eqn: Any, form: str, given: Sequence[Array]) -> Array:
    aval = eqn.outvars[0].aval
    kind, is_call = c_type(aval.dtype), re.match(r"\w+\(", form.replace("{t}", "t")) is not None
    words: list[str] = []
    views: list[View] = []
    # Scalars and axes of size 1 are broadcast.
    for x in (x if x.shape == aval.shape else _spread(body, x, aval.shape, range(len(x.shape))) for x in given):
        word = shift(x.text, len(views), len(x.views))
        words.append(f"({word})" if x.is_compound and not is_call else word)
        views += x.views
    text = form.format(*words, t=kind)
    if np.issubdtype(aval.dtype, np.integer) and aval.dtype.itemsize < 4:
        text, is_call = f"({kind})({text})", False  # C computes in `int`
    return Array(text, tuple(views), aval.shape, aval.dtype, not is_call)


def _broadcast(body: Body, eqn: Any, x: Array) -> Array:
    return _spread(body, x, eqn.params["shape"], eqn.params["broadcast_dimensions"])


def _spread(body: Body, x: Array, shape: Sequence[int], onto: Sequence[int]) -> Array:
    """Broadcast `x` to `shape`, of which its axes become those `onto`."""
    if x.views and math.prod(shape) > math.prod(x.shape):
        x = body.evaluate(x)  # once rather than for each repetition
    of = {axis: i for i, axis in enumerate(onto) if x.shape[i] != 1}
    return x.move(shape, lambda strides: (strides[of[axis]] if axis in of else 0 for axis in range(len(shape))))


def _reshape(body: Body, eqn: Any, x: Array) -> Array:
    shape = eqn.outvars[0].aval.shape
    axes = [i for i, size in enumerate(x.shape) if size != 1]
    if [x.shape[i] for i in axes] == [size for size in shape if size != 1]:
        left = iter(axes)
        order = [next(left) if size != 1 else None for size in shape]
        return x.move(shape, lambda strides: (0 if i is None else strides[i] for i in order))
    dense = row_major([x.shape[i] for i in axes])
    is_dense = all(tuple(view.strides[i] for i in axes) == dense for view in x.views)
    return (x if is_dense else body.evaluate(x, again=True)).move(shape, lambda _: row_major(shape))


def _transpose(body: Body, eqn: Any, x: Array) -> Array:
    order = eqn.params["permutation"]
    return x.move([x.shape[i] for i in order], lambda strides: (strides[i] for i in order))


def _slice(body: Body, eqn: Any, x: Array) -> Array:
    begin, steps = eqn.params["start_indices"], eqn.params["strides"] or (1,) * len(x.shape)
    return x.move(eqn.outvars[0].aval.shape, lambda strides: map(operator.mul, strides, steps), begin)


def _split(body: Body, eqn: Any, x: Array) -> list[Array]:
    starts = itertools.accumulate(map(int, eqn.params["sizes"]), initial=0)
    begin = lambda start: [start * (axis == eqn.params["axis"]) for axis in range(len(x.shape))]
    return [x.move(out.aval.shape, tuple, begin(start)) for out, start in zip(eqn.outvars, starts, strict=False)]


def _concatenate(body: Body, eqn: Any, *given: Array) -> Array:
    out, begin = eqn.outvars[0].aval, [0] * len(eqn.outvars[0].aval.shape)
    made, axis = body.new(out.shape, out.dtype), eqn.params.get("dimension", eqn.params.get("axis"))
    for x in given:
        if len(x.shape) < len(out.shape):  # `stack` makes the axis
            x = x.move((*x.shape[:axis], 1, *x.shape[axis:]), lambda strides: (*strides[:axis], 0, *strides[axis:]))
        body.assign(made.move(x.shape, tuple, begin), x)
        begin[axis] += x.shape[axis]
    return made


def _product(body: Body, eqn: Any, a: Array, b: Array) -> Array:
    (left, right), (left_rows, right_rows) = eqn.params["dimension_numbers"]
    a, b = body.evaluate(a), body.evaluate(b)
    out = body.new(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
    free = lambda x, *others: [i for i in range(len(x.shape)) if i not in itertools.chain(*others)]
    of_out, of_a, of_b = iter(out.views[0].strides), a.views[0].strides, b.views[0].strides
    # The innermost loop runs along rows of weights, which are contiguous.
    axes = [(a.shape[i], next(of_out), of_a[i], of_b[j]) for i, j in zip(left_rows, right_rows, strict=True)]
    axes += [(a.shape[i], next(of_out), of_a[i], 0) for i in free(a, left, left_rows)]
    axes += [(a.shape[i], 0, of_a[i], of_b[j]) for i, j in zip(left, right, strict=True)]
    axes += [(b.shape[j], next(of_out), 0, of_b[j]) for j in free(b, right, right_rows)]
    return body.accumulate(out, "0", "{0} += {1} * {2};", axes, *a.views, *b.views)


def _convolve(body: Body, eqn: Any, x: Array, kernel: Array) -> Array:
    require_plain_convolution(eqn.params, "C")
    (top, bottom), (left, right) = eqn.params["padding"]
    if top or bottom or left or right:
        n, h, w, c = x.shape
        padded = body.new((n, h + top + bottom, w + left + right, c), x.dtype)
        body.assign(padded, Array("0", (), padded.shape, x.dtype))
        body.assign(padded.move(x.shape, tuple, (0, top, left, 0)), x)
        x = padded
    x, kernel = body.evaluate(x), body.evaluate(kernel)
    out = body.new(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
    (n, h, w, c), (k_h, k_w, k_c, k_o), (o_n, o_h, o_w, o_c) = (array.views[0].strides for array in (x, kernel, out))
    down, across = eqn.params["window_strides"]
    sizes = [*out.shape[:3], *kernel.shape]
    of_out, of_x = (o_n, o_h, o_w, 0, 0, 0, o_c), (n, down * h, across * w, h, w, c, 0)
    axes = zip(sizes, of_out, of_x, (0, 0, 0, k_h, k_w, k_c, k_o), strict=True)
    return body.accumulate(out, "0", "{0} += {1} * {2};", [*axes], *x.views, *kernel.views)


def _reduce(start: Callable[[Any], str], step: str) -> Rule:
    def rule(body: Body, eqn: Any, x: Array) -> Array:
        out = body.new(eqn.outvars[0].aval.shape, x.dtype)
        of_out = iter(out.views[0].strides)
        kept = [0 if axis in eqn.params["axes"] else next(of_out) for axis in range(len(x.shape))]
        axes = [*zip(x.shape, kept, *(view.strides for view in x.views), strict=True)]
        statement = step.format(total="{0}", x=shift(x.text, 1, len(x.views)), t=c_type(x.dtype))
        return body.accumulate(out, start(x.dtype), statement, axes, *x.views)

    return rule


def _best(is_better: str) -> Rule:
    def rule(body: Body, eqn: Any, x: Array) -> Array:
        (along,), x = eqn.params["axes"], body.evaluate(x)
        out = body.new(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
        of_out, strides = iter(out.views[0].strides), x.views[0].strides
        # Strides of the result, of an entry of `x`, of the first one along the axis, and of its index.
        axes = [
            (n, 0, s, 0, 1) if i == along else (n, next(of_out), s, s, 0)
            for i, (n, s) in enumerate(zip(x.shape, strides, strict=True))
        ]
        best = "(&{2})[{0}]" if strides[along] == 1 else f"(&{{2}})[{strides[along]} * {{0}}]"
        statement = f"if ({is_better}_{c_type(x.dtype)}({{1}}, {best})) {{0}} = {{3}};"
        made = body.accumulate(out, "0", statement, axes, *x.views, *x.views, View("", ()))
        body.lines[-1] = re.sub(r"\(&(\w+)\[0\]\)", r"\1", str(body.lines[-1]))
        return made

    return rule


def _limit(sign: int, dtype: Any) -> str:
    """Return the largest value of a type, or the smallest if `sign` is negative; infinity for floats."""
    if np.issubdtype(dtype, np.floating):
        return literal(np.asarray(sign * np.inf, dtype)[()])
    if not np.issubdtype(dtype, np.integer):
        return literal(np.bool_(sign > 0))
    info = np.iinfo(dtype)
    return literal(np.asarray(info.max if sign > 0 else info.min, dtype)[()])


RULES: Mapping[str, Rule] = {
    "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _reshape, "expand_dims": _reshape,
    "transpose": _transpose, "slice": _slice, "split": _split, "concatenate": _concatenate, "stack": _concatenate,
    "dot_general": _product, "conv_general_dilated": _convolve, "select_n": _select, "div": _expression("{} / {}"),
    "convert_element_type": _expression("({t}){}"), "integer_pow": _expression("pow({}, {y}.0f)"),
    "reduce_sum": _reduce(lambda dtype: "0", "{total} += {x};"),
    "reduce_max": _reduce(partial(_limit, -1), "{total} = maximum_{t}({total}, {x});"),
    "reduce_min": _reduce(partial(_limit, 1), "{total} = minimum_{t}({total}, {x});"),
    "reduce_and": _reduce(lambda dtype: "true", "{total} &= {x};"),
    "reduce_or": _reduce(lambda dtype: "false", "{total} |= {x};"),
    "argmax": _best("is_above"), "argmin": _best("is_below"),
}  # fmt: skip


# --- files --------------------------------------------------------------------------------------------------------


def files(function: Function) -> dict[str, bytes]:
    """Return the files of an export by name.

    Raises:
      SettingsError: the policy has an operation that is not supported here, such as pooling.
    """
    given, made = signature(function)
    constants: dict[tuple[str, bytes], str] = {}
    # First and later steps of an episode are separate functions, so that a step computes only one of them.
    cases = {"begin": True, "follow": False} if function.memory else {"": False}
    bodies = {name: _body(function, constants, first).allocate() for name, first in cases.items()}
    arguments = [part.name for part in (*given, *made)]
    texts = {name: _function_body(lines, arguments) for name, (lines, _) in bodies.items()}
    source = "\n".join(texts.values())
    parameter = lambda part: f"{c_type(part.dtype)} {part.name}[{_macro(part)}]"
    types = ["policy_state *state", *(f"const {parameter(part)}" for part in given), *map(parameter, made)]
    parameters = ",".join(f"\n    {x}" for x in types)
    act, call = f"void policy_act({parameters})", f"(state, {', '.join(arguments)});"
    parts = [_helper(*found) for found in sorted(set(re.findall(rf"\b({'|'.join(HELPERS)})_(\w+)\(", source)))]
    parts += [_weights(name, *key) for key, name in constants.items()]
    parts += [f"static void {name}({parameters})\n{{\n{text}\n}}" for name, text in texts.items() if name]
    chosen = f"    if (state->begun)\n        follow{call}\n    else\n        begin{call}"
    room = {kind: max(needed[kind] for _, needed in bodies.values()) for kind in TYPES.values()}
    fields = [f"    {c_type(x.dtype)} {name}[{_size(x)}];" for name, x in _memory(function)]
    fields += [f"    {kind} {workspace(kind)}[{size}];" for kind, size in room.items() if size]
    sizes = [f"#define {_macro(part)} {_size(part)} /* {part.dtype} {list(part.shape)} */" for part in (*given, *made)]
    unread = [f"\n * No action depends on {x}; it may be NULL." for x in arguments if f"{x}[" not in source]
    header = HEADER.format(
        arguments=", ".join(arguments), sizes="\n".join(sizes), fields="\n".join(fields), notes="".join(unread), act=act
    )
    text = SOURCE.format(parts="\n\n".join(parts), act=act, body=chosen if function.memory else source)
    return {"policy.h": header.encode(), "policy.c": text.encode()}


def signature(function: Function) -> tuple[list[Part], list[Part]]:
    """Return the inputs of `policy_act` apart from the state, and its outputs; a mask of actions is the last input."""
    names = _arguments(function).values()
    inputs = [Part(name, x.shape, str(x.dtype)) for name, x in zip(names, function.obs, strict=True)]
    actions = zip(_results(function), function.actions, strict=True)
    outputs = [Part(name, x.shape, str(x.dtype)) for name, x in actions]
    return sorted(inputs, key=lambda part: part.name == MASK), outputs


def _arguments(function: Function) -> dict[str, str]:
    """Return the C names of the parts of an observation, by their names in `function.names`."""
    own, names = {"obs": "observation", f"obs_{MASK}": MASK}, function.names[: len(function.obs)]
    return dict(zip(names, _identifiers([own.get(name, name) for name in names]), strict=True))


def _results(function: Function) -> list[str]:
    """Return the C names of the parts of an action."""
    given = [*_arguments(function).values()]
    return _identifiers([*given, *function.results[: len(function.actions)]])[len(given) :]


def _identifiers(names: Sequence[str]) -> list[str]:
    """Return different C names, also in capitals, as macros have them."""
    made: list[str] = []
    for i, name in enumerate(names):
        word = re.sub(r"\W", "_", name.encode("ascii", "backslashreplace").decode())
        made.append(word if word.upper() not in map(str.upper, made) else f"{word}_{i}")
    return made


def _memory(function: Function) -> list[tuple[str, Any]]:
    return [*zip(function.names[len(function.obs) :], function.memory, strict=False)]


def _body(function: Function, constants: dict[tuple[str, bytes], str], first: bool) -> Body:
    """Write one step: the first of an episode, or a later one."""
    program, body, count = trace(function, first=np.asarray([first])), Body(constants), len(function.actions)
    row = lambda name, x: stored_array(name, (1, *x.shape), x.dtype)
    actions = [row(name, x) for name, x in zip(_results(function), function.actions, strict=True)]
    memory = {name: row(f"state->{name}", x) for name, x in _memory(function)}
    observed = zip(_arguments(function).items(), function.obs, strict=True)
    values = {**{name: row(argument, x) for (name, argument), x in observed}, **memory}
    read = itertools.chain(program.results, *(operation.ins for operation in program.operations))
    uses = Counter(x for x in read if isinstance(x, str))
    array = lambda x: values[x] if isinstance(x, str) else body.constant(x)
    for operation in program.operations:
        for name, x in zip(operation.outs, _write(body, operation, [*map(array, operation.ins)]), strict=True):
            values[name] = body.evaluate(x) if x.views and uses[name] > 1 else x
    results = [*map(array, program.results)]
    # Evaluate everything that reads the memory before any of it is overwritten.
    reads = lambda x: any(view.name.startswith("state->") for view in x.views)
    kept = [body.evaluate(x, again=True) if reads(x) else x for x in results[count:]]
    for to, x in zip([*actions, *memory.values()], [*results[:count], *kept], strict=True):
        body.assign(to, x)
    return body


# --- C ------------------------------------------------------------------------------------------------------------


def _function_body(lines: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the text of a function; unused arguments are cast to void, against compiler warnings."""
    text = "\n".join(lines)
    unused = [f"(void){name};\n" for name in arguments if f"{name}[" not in text]
    return textwrap.indent("".join(unused) + text, "    ")


def _size(x: Any) -> int:
    return max(1, math.prod(x.shape))


def _macro(part: Part) -> str:
    return f"POLICY_{part.name.upper()}_SIZE"


def _helper(name: str, kind: str) -> str:
    a_nan, b_nan = ("isnan(a)", "isnan(b)") if kind in ("float", "double") else ("false", "false")
    return HELPERS[name].format(t=kind, a_nan=a_nan, b_nan=b_nan)


def _weights(name: str, dtype: str, content: bytes) -> str:
    numbers = [literal(x) for x in np.frombuffer(content, dtype)]
    lines = [f"    {', '.join(numbers[i : i + 8])},\n" for i in range(0, len(numbers), 8)]
    return f"static const {c_type(dtype)} {name}[{len(numbers)}] = {{\n{''.join(lines)}}};"
