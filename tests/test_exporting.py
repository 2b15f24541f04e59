"""Exported policies: each computes what the policy does, over whole episodes, for observations of all kinds."""

import ctypes
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_agents import begun
from toys_composite import marksman
from toys_masks import minefield

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.exporting import as_c, as_numpy, onnx, stablehlo
from jaxrl.exporting.card import EvalOptions, portable, repeat
from jaxrl.exporting.formats import files_of, write
from jaxrl.exporting.function import Function, function_of as traced
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete
from jaxrl.strategies.base import Policy
from jaxrl.training.policy import GreedyPolicy

STEPS, ROWS = 5, 200
function_of = cache(traced)


def compile_c(folder: Path, *args: str) -> None:
    """Compile C99 in `folder` with all warnings as errors; skip the test where there is no compiler.

    Args:
      folder: where the sources are.
      args: sources and further arguments of the compiler.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc")
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", *args, "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def off(env: Any, agent: Any, processor: Any = None) -> Any:
    return jaxrl.off_policy(env, agent, processor=processor, buffer=jaxrl.uniform(capacity=200, batch_size=8))


CASES: dict[str, Callable[[], Any]] = {
    "values": lambda: off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,), dueling=True)),
    "rescaled values": lambda: off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,), value_rescaling=True)),
    "distributions of values": lambda: off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,), values="c51")),
    "masks": lambda: off(minefield(), jaxrl.dqn(features=(16,))),
    "several choices": lambda: jaxrl.on_policy(minefield(MultiDiscrete((2, 3, 4))), jaxrl.ppo(features=(16,))),
    "continuous": lambda: off(jaxrl.make_env("Pendulum-v1"), jaxrl.sac(features=(16,))),
    "batch normalisation": lambda: off(
        jaxrl.make_env("Pendulum-v1"), jaxrl.xqc(features=(8, 8), critic_features=(8,)), jaxrl.one_step()
    ),
    "residual blocks": lambda: off(jaxrl.make_env("Pendulum-v1"), jaxrl.sac(features=(8, 8), torso="simba")),
    "other residual blocks": lambda: jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8, 8), torso="bro")
    ),
    "pictures": lambda: off(jaxrl.make_env("Breakout-MinAtar"), jaxrl.dqn(features=(16,), channels=(4,))),
    "stacked": lambda: off(
        jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,)), jaxrl.chain(jaxrl.frame_stack(3), jaxrl.one_step())
    ),
    "memory": lambda: jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,), core="gru")),
    "complex memory": lambda: jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.ppo(features=(8,), core="s5", core_features=8)
    ),
    "attention": lambda: jaxrl.on_policy(
        jaxrl.make_env("CartPole-v1"), jaxrl.pqn(features=(8,), core="gtrxl", core_features=8, core_window=4)
    ),
    "memory beside critics": lambda: off(
        jaxrl.make_env("Pendulum-v1"), jaxrl.sac(features=(8,), core="gru", core_features=8), jaxrl.one_step()
    ),
    "parts": lambda: jaxrl.on_policy(marksman(masked=True), jaxrl.ppo(features=(8,))),
    "normalised": lambda: jaxrl.on_policy(
        jaxrl.make_env("Pendulum-v1"),
        jaxrl.ppo(features=(8,)),
        processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
    ),
}


@cache
def begins(case: str) -> GreedyPolicy:
    """Return a policy as it begins, but for how its kernels are drawn."""
    strategy = CASES[case]()
    return GreedyPolicy(strategy.policy, begun(lambda key: strategy.policy.params(strategy.init(key))))


@pytest.fixture(scope="module", params=CASES)
def policy(request: pytest.FixtureRequest) -> GreedyPolicy:
    """A policy whose parameters are far from those that it begins with, so that each of them matters."""
    policy, params = begins(request.param).policy, begins(request.param).params
    leaves, form = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [
        x + (0.2 * rng.normal(size=x.shape)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in map(np.asarray, leaves)
    ]
    return GreedyPolicy(policy, form.unflatten(moved))


def observations(function: Function) -> list[list[np.ndarray]]:
    """Return observations of `STEPS` steps of `ROWS` environments, each as a list of its parts."""
    rng = np.random.default_rng(1)

    def part(like: Any, space: Any) -> np.ndarray:
        shape = (ROWS, *like.shape)
        if isinstance(space, Discrete):
            return rng.integers(space.n, size=shape).astype(like.dtype)
        if like.dtype != bool:
            return rng.normal(size=shape).astype(like.dtype)
        allowed = rng.random(shape) < 0.5
        allowed[:, 0] |= ~allowed.any(axis=-1)  # a mask allows something
        return allowed

    space = jaxrl.spaces.space_from_plain(function.spaces["observation"])
    leaves = jax.tree.leaves(space, is_leaf=jaxrl.spaces.is_leaf)
    return [list(map(part, function.obs, leaves)) for _ in range(STEPS)]


def answers(policy: GreedyPolicy, seen: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Return the parts of the actions of each step."""
    form: Any = jax.tree.structure(jaxrl.spaces.space_struct(policy.policy.spec.observation_space))
    policy.reset()
    return [list(map(np.asarray, jax.tree.leaves(policy(form.unflatten(parts))))) for parts in seen]


@pytest.mark.every_day("parts", "memory")
def test_stablehlo_comes_to_the_same_bits(policy: GreedyPolicy) -> None:
    function = function_of(policy)
    call = jax.export.deserialize(bytearray(stablehlo.files(function)["policy.jax"])).call
    seen, memory = observations(function), [np.zeros((ROWS, *x.shape), x.dtype) for x in function.memory]
    wanted, count = answers(policy, seen), len(function.actions)
    for i, parts in enumerate(seen):
        # What was remembered of an episode before counts for nothing where the next one begins.
        kept = [np.full_like(x, 7) for x in memory] if i == 0 else memory
        made = call(*parts, *kept, *([np.full(ROWS, i == 0)] if kept else []))
        memory = list(made[count:])
        for action, want in zip(made[:count], wanted[i], strict=True):
            np.testing.assert_array_equal(action, want)
    assert all(len(np.unique(np.stack(part))) > 1 for part in zip(*wanted, strict=True))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("jax_traceback_in_locations_limit", 100), ("jax_include_full_tracebacks_in_locations", False)],
)
def test_no_file_of_a_program_names_a_path_of_this_machine(setting: str, value: object) -> None:
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        files = files_of(begins("normalised"), "stablehlo")
        assert getattr(jax.config, setting) == value
    finally:
        jax.config.update(setting, before)
    named = {name: re.findall(rb"[\w/.-]+\.py\b", content) for name, content in files.items()}
    assert named == {name: [] for name in files}


Act = Callable[[list[np.ndarray]], Any]
"""From the parts of one observation to the action; a call is a step of the same episode."""


def act_in_numpy(function: Function, folder: Path) -> Callable[[], Act]:
    """Return what begins an episode on the page of NumPy."""
    for name, content in as_numpy.files(function).items():
        (folder / name).write_bytes(content)
    source = (folder / "policy.py").read_text()
    assert set(re.findall(r"^import (\w+)", source, re.MULTILINE)) == {"pathlib", "numpy"}
    spec = importlib.util.spec_from_file_location("exported", folder / "policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def begin() -> Act:
        memory: list[Any] = []

        def act(parts: list[np.ndarray]) -> Any:
            # As the entries say where each part belongs: `obs['a']` is that of the dict.
            made = module.act(jax.tree.unflatten(jax.tree.structure(struct), parts), *memory)
            action, memory[:] = (made[0], [made[1]]) if function.memory else (made, [])
            assert jax.tree.structure(action) == nested
            return action

        return act

    struct_of = lambda what: jaxrl.spaces.space_struct(jaxrl.spaces.space_from_plain(function.spaces[what]))
    struct, nested = struct_of("observation"), jax.tree.structure(struct_of("action"))
    return begin


def act_in_c(function: Function, folder: Path) -> Callable[[], Act]:
    """Return what begins an episode in C; state that is not set up by `policy_init` is noise."""
    for name, content in as_c.files(function).items():
        (folder / name).write_bytes(content)
    size = "#include <stddef.h>\nextern const size_t size;\nconst size_t size = sizeof(policy_state);\n"
    (folder / "size.c").write_text(f'#include "policy.h"\n{size}')
    compile_c(folder, "-shared", "-fPIC", "policy.c", "size.c", "-o", "policy.so")
    library = ctypes.CDLL(str(folder / "policy.so"))
    inputs, outputs = as_c.signature(function)
    # The mask of actions is the last argument, whatever its place among the parts.
    order = sorted(range(len(inputs)), key=lambda i: function.names[i] == "obs_action_mask")
    assert [inputs[i].shape for i in range(len(order))] == [function.obs[i].shape for i in order]

    def begin() -> Act:
        count = ctypes.c_size_t.in_dll(library, "size").value
        state = ctypes.create_string_buffer(b"\xa5" * count, count)
        library.policy_init(state)

        def act(parts: list[np.ndarray]) -> Any:
            given = [np.ascontiguousarray(parts[i]) for i in order]
            action = [np.zeros(output.shape, output.dtype) for output in outputs]
            library.policy_act(state, *(ctypes.c_void_p(x.ctypes.data) for x in (*given, *action)))
            return action if len(action) > 1 else action[0]

        return act

    return begin


SOURCES = {"numpy": (act_in_numpy, 3), "c": (act_in_c, ROWS)}
"""Formats that are source code, with the number of environments to ask: NumPy is slow."""


DAILY = ("masks", "normalised", "memory", "pictures", "batch normalisation", "parts")
"""Policies that differ in what they take and keep; operations are tried one by one as well."""


@pytest.mark.every_day(*(f"{name}-{form}" for name in DAILY for form in SOURCES))
@pytest.mark.parametrize("form", SOURCES)
def test_source_code_comes_to_the_same_numbers(form: str, policy: GreedyPolicy, tmp_path: Path) -> None:
    function, (begin, rows) = function_of(policy), SOURCES[form]
    begun = begin(function, tmp_path)
    seen, episodes = observations(function), [begun() for _ in range(rows)]
    # Episodes take turns, so whatever one of them left in common would show in the others.
    for parts, want in zip(seen, answers(policy, seen), strict=True):
        made = [jax.tree.leaves(act([part[row] for part in parts])) for row, act in enumerate(episodes)]
        for one, other in zip(zip(*made, strict=True), want, strict=True):
            np.testing.assert_allclose(np.stack(one), other[:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_onnx_comes_to_the_same_numbers(policy: GreedyPolicy) -> None:
    pytest.importorskip("jax2onnx", reason=f"needs jax2onnx: {onnx.INSTALL}")
    runtime = pytest.importorskip("onnxruntime")
    function = function_of(policy)
    with jax.numpy_rank_promotion("allow"):  # the converter relies on it
        session = runtime.InferenceSession(onnx.files(function)["policy.onnx"])
    seen, memory = observations(function), [np.zeros((ROWS, *x.shape), x.dtype) for x in function.memory]
    for i, (parts, want) in enumerate(zip(seen, answers(policy, seen), strict=True)):
        given = [*parts, *memory, *([np.full(ROWS, i == 0)] if memory else [])]
        made = session.run(function.results, dict(zip(function.names, given, strict=True)))
        memory = made[len(want) :]
        for action, part in zip(made, want, strict=False):
            np.testing.assert_allclose(action, part, rtol=1e-5, atol=1e-5)


def compute(call: Callable[[Any], Any], *shape: int) -> GreedyPolicy:
    """Return a policy of which the action is `call` of the observation, `[B, *shape]`."""
    made = jax.eval_shape(call, jax.ShapeDtypeStruct((1, *shape), jnp.float32))
    return computing(Box(-np.inf, np.inf, shape), made.shape[1:], call)


def computing(seen: Any, action: tuple[int, ...], call: Callable[[Any], Any]) -> GreedyPolicy:
    """Return a policy in a space of observations `seen`, of which the action `[B, *action]` is `call` of them."""
    policy = Policy(
        spec=EnvSpec("x", seen, Box(-np.inf, np.inf, action)),
        params=lambda state: state,
        begin=lambda params, obs: obs,
        act=lambda params, carry: (carry, call(carry)),
        observe=lambda params, carry, step: step.obs,
    )
    return GreedyPolicy(policy, ())


def signs(x: Any) -> Any:
    unlike, whole = x + 0.25, jnp.floor(4 * x)
    made = [
        jnp.sign(whole),
        jnp.abs(x),
        jnp.negative(-x),
        jax.lax.rem(x, unlike),
        x**3,
        unlike**-2,
        jnp.abs(x) ** unlike,
    ]
    return jnp.stack([*made, jnp.where(whole > 0, x, 2), jnp.clip(x, -0.5, whole)], -1)


def transcendental(x: Any) -> Any:
    y = jnp.abs(x) + 0.1
    made = [jnp.exp(x), jnp.expm1(x), jnp.log(y), jnp.log1p(y), jnp.sqrt(y), jax.lax.rsqrt(y), jnp.sin(x), jnp.cos(x)]
    return jnp.stack([*made, jnp.tanh(x), jax.nn.sigmoid(x), jnp.square(x), jax.nn.softplus(x)], 1)


def integers(x: Any) -> Any:
    n = (10 * x).astype(jnp.int32)
    small = jnp.abs(n).astype(jnp.uint8)
    made = [n // 3, n % 3, jax.lax.rem(n, 3), jax.lax.div(n, 3), n**2, ~n, n & 6, n | 1, jnp.minimum(n, 2), jnp.sign(n)]
    # 8 bits wrap around, also in the middle of an expression.
    return jnp.stack([*made, ((small * 100).astype(jnp.int32)), n.astype(bool).astype(jnp.int32)], -1).astype(x.dtype)


def comparisons(x: Any) -> Any:
    y, z = jnp.floor(2 * x), jnp.floor(x)
    made = [y == z, y != z, y < z, y <= z, y > z, (y >= z) & ~(y == 0), (y == 0) | (z == 0)]
    return jnp.stack(made, -1).astype(jnp.float32)


def reductions(x: Any) -> Any:
    low, high = x.argmin(2), x.argmax(1)  # of axes of different lengths
    made = [x.max((1, 2)), x.min(2).sum(1), (x * x).sum((1, 2)), (x > -2).all((1, 2)), (x > 1).any(2).all(1)]
    return jnp.concatenate([*(m[:, None].astype(x.dtype) for m in made), low.astype(x.dtype), high.astype(x.dtype)], 1)


def moves(x: Any) -> Any:
    """Move entries of `[B, 4, 6]` in ways that strides can say, and in ways that they cannot."""
    turned = jnp.transpose(x, (0, 2, 1))
    strided = x[:, 1:4:2, ::3]
    left, middle, _ = jnp.split(turned, [1, 3], axis=1)
    parts = [turned.reshape(-1, 24), strided.reshape(-1, 4), left.reshape(-1, 4), middle.reshape(-1, 8)]
    spread = jnp.broadcast_to((x[:, :, :1] + 1) * x[:, :1, :], x.shape)
    return jnp.concatenate([*parts, (spread * 2).transpose(0, 2, 1).reshape(-1, 24)], 1)


def products(x: Any) -> Any:
    left, right = x, jnp.transpose(x, (0, 2, 1)) * 2
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(5, 6)), x.dtype)
    made = [jnp.einsum("bij,bjk->bik", left, right), jnp.einsum("bij,bkj->bki", left, left)]
    made += [jnp.einsum("bij,kj->bki", x + 1, weights), jnp.einsum("bij,j->bi", x, weights[0])[:, None]]
    return jnp.concatenate([m.reshape(m.shape[0], -1) for m in made], 1)


def convolution(x: Any) -> Any:
    kernel = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2, 3, 5)), x.dtype)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(jnp.tanh(x), kernel, (2, 1), ((1, 2), (0, 1)), dimension_numbers=layout)


def emptiness(x: Any) -> Any:
    """Return `x` behind nothing, as networks see what stands beside images where nothing does."""
    return jnp.concatenate([jnp.zeros((x.shape[0], 0), x.dtype), 2 * x], -1)


COMPUTED: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "signs": (signs, (4, 6)), "transcendental": (transcendental, (3,)), "integers": (integers, (4, 6)),
    "comparisons": (comparisons, (40,)), "reductions": (reductions, (4, 6)), "moves": (moves, (4, 6)),
    "products": (products, (4, 6)), "convolution": (convolution, (6, 5, 3)), "emptiness": (emptiness, (3,)),
}  # fmt: skip


@cache
def computed(what: str) -> GreedyPolicy:
    return compute(COMPUTED[what][0], *COMPUTED[what][1])


@pytest.mark.parametrize("form", SOURCES)
@pytest.mark.parametrize("what", COMPUTED)
def test_source_code_has_the_operations_of_networks_of_ones_own(form: str, what: str, tmp_path: Path) -> None:
    policy = computed(what)
    act = SOURCES[form][0](function_of(policy), tmp_path)()
    for obs in 2 * np.random.default_rng(0).normal(size=(20, *COMPUTED[what][1])).astype(np.float32):
        np.testing.assert_allclose(act([obs]), policy(obs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", SOURCES)
def test_what_is_no_number_decides_in_source_code_as_in_jax(form: str, tmp_path: Path) -> None:
    """It is the largest and the smallest entry, and it goes through ReLU."""
    rows = lambda x: [x.argmax(1), x.argmin(1), x.max(1), x.min(1), jnp.isfinite(x).sum(1)]
    decide = lambda x: jnp.concatenate([jnp.stack([y.astype(x.dtype) for y in rows(x)], 1), jax.nn.relu(x)], 1)
    policy = compute(decide, 4)
    act = SOURCES[form][0](function_of(policy), tmp_path)()
    for obs in ([1, 2, 3, np.nan], [1, np.nan, 3, np.nan], [np.nan, 1, -1, 2], [np.inf, 3, 4, -np.inf]):
        row = np.asarray(obs, np.float32)
        np.testing.assert_array_equal(act([row]), policy(row))


@pytest.mark.parametrize("form", SOURCES)
def test_parts_of_a_memory_may_change_places_in_source_code(form: str, tmp_path: Path) -> None:
    policy = Policy(
        spec=EnvSpec("x", Box(-1, 1, (2,)), Box(-9, 9, (2,))),
        params=lambda state: state,
        begin=lambda params, obs: (obs, 10 * obs),
        act=lambda params, carry: (carry, carry[0]),
        observe=lambda params, carry, step: (carry[1], 2 * carry[0] + step.obs),
    )
    greedy = GreedyPolicy(policy, ())
    act = SOURCES[form][0](function_of(greedy), tmp_path)()
    for obs in np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32):
        np.testing.assert_allclose(act([obs]), greedy(obs), rtol=1e-5, atol=1e-5)


def test_both_kinds_of_source_code_have_the_same_operations() -> None:
    assert {*as_c.RULES} - {"split"} == {*as_numpy.RULES}


def test_c_has_no_variables_but_those_of_a_state(tmp_path: Path) -> None:
    """So threads may run it side by side."""
    for name, content in as_c.files(function_of(begins("memory"))).items():
        (tmp_path / name).write_bytes(content)
    compile_c(tmp_path, "-c", "policy.c")
    listed = subprocess.run(["nm", "policy.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1]: line.split()[-2] for line in listed.splitlines()}
    assert {name for name, kind in symbols.items() if kind == "T"} == {"policy_init", "policy_act"}
    assert {*symbols.values()} <= {"T", "t", "r", "R", "U"}
    assert {name for name, kind in symbols.items() if kind == "U"} <= {"tanhf", "_GLOBAL_OFFSET_TABLE_"}


def test_parts_of_an_observation_are_arguments_in_c(tmp_path: Path) -> None:
    """Also under names that are none in C, and those that decide nothing."""
    sizes: dict[str, tuple[int, ...]] = {"Größe": (), "a": (2,), "A": (3,), "int": (2,)}
    spaces = {name: Box(-1, 1, shape) for name, shape in sizes.items()}
    policy = computing(spaces, (2,), lambda obs: obs["a"] + obs["A"][:, 1:] + obs["Größe"][:, None])
    made = files_of(policy, "c")
    told = json.loads(made["policy.json"])
    assert [(x["name"], x["shape"]) for x in told["inputs"]] == [
        ("obs_A", [3]), ("obs_Gr_xf6_xdfe", []), ("obs_a_2", [2]), ("obs_int", [2]),
    ]  # fmt: skip
    assert [(x["name"], x["shape"], x["dtype"]) for x in told["outputs"]] == [("action", [2], "float32")]
    assert b"No action depends on obs_int; it may be NULL." in made["policy.h"]
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "policy.h"\nint main(void) {\n'
        "    float a[POLICY_OBS_A_SIZE] = {1, 2, 3}, b[POLICY_OBS_A_2_SIZE] = {10, 20}, c[] = {100};\n"
        "    float action[POLICY_ACTION_SIZE];\n    policy_state state;\n    policy_init(&state);\n"
        '    policy_act(&state, a, c, b, 0, action);\n    printf("%g %g", action[0], action[1]);\n    return 0;\n}\n'
    )
    compile_c(tmp_path, "main.c", "policy.c", "-o", "main")
    assert subprocess.run([tmp_path / "main"], capture_output=True, text=True).stdout == "112 123"


def test_a_description_has_what_each_format_takes(tmp_path: Path) -> None:
    """An observation is a dict on the page of NumPy, whatever its order, and without the axis of a batch."""
    box, number = Box(-1, 1, (2, 3)), Box(-1, 1, ())
    add = lambda obs: obs["b b"].sum(1) + (obs["a"][0] + 2 * obs["a"][1]["c"])[:, None]
    policy = computing({"b b": box, "a": (number, {"c": number})}, (3,), add)
    made = {form: files_of(policy, form) for form in ("numpy", "stablehlo")}
    told = {form: json.loads(files["policy.json"]) for form, files in made.items()}
    shown = lambda form, what: [(x["name"], x["shape"], x["dtype"]) for x in told[form][what]]
    assert shown("numpy", "inputs") == [
        ("obs['a'][0]", [], "float32"), ("obs['a'][1]['c']", [], "float32"), ("obs['b b']", [2, 3], "float32"),
    ]  # fmt: skip
    assert shown("numpy", "outputs") == [("action", [3], "float32")]
    assert shown("stablehlo", "inputs") == [
        ("obs_a_0", ["B"], "float32"), ("obs_a_1_c", ["B"], "float32"), ("obs_b_b", ["B", 2, 3], "float32"),
    ]  # fmt: skip
    assert shown("stablehlo", "outputs") == [("action", ["B", 3], "float32")]
    for name, content in made["numpy"].items():
        (tmp_path / name).write_bytes(content)
    code = (
        f"import sys; sys.modules['jax'] = sys.modules['jaxrl'] = None; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import policy\n"
        "obs = {'b b': [[1, 2, 3], [10, 20, 30]], 'a': (100, {'c': 1000})}\n"
        "print(policy.act(obs).tolist())"
    )
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(alone.stdout) == [2111, 2122, 2133]


def test_numpy_takes_images_with_channels_first_as_the_policy_does_and_no_other_shape(tmp_path: Path) -> None:
    spaces = {"image": Box(0, 255, (8, 9, 3), "uint8"), "speed": Box(-1, 1, (2,))}
    policy = computing(spaces, (3,), lambda obs: obs["image"][:, 0, 1] + obs["speed"].sum(1, keepdims=True))
    act, image = act_in_numpy(traced(policy), tmp_path)(), np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    speed = np.float32([0.5, 0.5])
    for seen in (image, image.transpose(2, 0, 1)):
        assert act([seen, speed]).tolist() == np.asarray(policy({"image": seen, "speed": speed})).tolist() == [4, 5, 6]
    for wrong, shapes in (
        ([image[None], speed], r"obs\['image'\] has shape \(1, 8, 9, 3\); expected \(8, 9, 3\)"),
        ([image.transpose(1, 0, 2), speed], r"\(9, 8, 3\); expected \(8, 9, 3\)"),
        ([image, speed[:1]], r"obs\['speed'\] has shape \(1,\); expected \(2,\)"),
    ):
        with pytest.raises(ValueError, match=shapes):
            act(wrong)


def test_the_name_of_a_part_is_no_code(tmp_path: Path) -> None:
    """It comes with a run, perhaps from others: with it, text would end, and the rest be Python or C."""
    python, c = '"""+str(1/0)+"""', "*/ int x; /*\n"
    spaces = {python: Box(-1, 1, (2,)), c: Box(-1, 1, (2,))}
    function = traced(computing(spaces, (2,), lambda obs: obs[python] + obs[c]))
    act = act_in_numpy(function, tmp_path)()
    order = [np.array(x) for x in ((1, 2), (10, 20))]
    np.testing.assert_array_equal(act(order), [11, 22])
    assert b"int x" not in b"".join(as_c.files(function).values())


def test_only_what_decides_on_actions_is_remembered() -> None:
    function = function_of(begins("memory"))
    assert [x.shape for x in function.memory] == [(64,)]
    assert function.names == ["obs", "memory", "first"]
    assert function.results == ["action", "next_memory"]
    # On the page of NumPy it is described as it is returned.
    told = json.loads(files_of(begins("memory"), "numpy")["policy.json"])
    assert [(x["name"], x["shape"]) for x in told["inputs"]] == [("obs", [4]), ("memory[0]", [1, 64])]
    assert [(x["name"], x["shape"]) for x in told["outputs"]] == [("action", []), ("memory[0]", [1, 64])]


@pytest.mark.parametrize(("files", "language"), [(as_numpy.files, "NumPy"), (as_c.files, "C")])
def test_operations_and_numbers_that_source_code_does_not_have_are_named(files: Any, language: str) -> None:
    said = f"computes erf_inv, which is not written in {language} here; export it as stablehlo or onnx"
    with pytest.raises(SettingsError, match=said):
        files(function_of(compute(jax.lax.erf_inv, 3)))
    halved = lambda obs: (obs.astype(jnp.bfloat16) / 2).astype(jnp.float32)
    with pytest.raises(SettingsError, match="computes numbers of bfloat16"):
        files(function_of(compute(halved, 3)))


def test_no_library_but_jax_is_needed_to_export() -> None:
    # In a process of its own: tests beside this one use the converter where it is installed.
    code = "import sys, jaxrl.export; print({'onnx', 'jax2onnx', 'onnxruntime'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# --- what a card says of repeating ---------------------------------------------------------------------------------

RUN = {"algo": "dqn", "custom": [], "env": "CartPole-v1", "env_args": {}, "max_opts": 90, "init_from": None}
HOME = "/home/someone/things"


def card(settings: dict[str, Any] | None = None, changed: bool = False, best: bool = True, **asked: Any) -> str:
    asked_for = EvalOptions(**{"env": None, "env_args": (), "episodes": 5, "seed": 7, **asked})
    return repeat({**RUN, **(settings or {})}, 30, best, changed, asked_for)


JUDGE = "jaxrl.evaluate again --step latest --episodes 5 --seed 7"
CARDS: dict[str, tuple[str, list[str], list[str]]] = {
    "as trained": (
        card(), ["train dqn --config config.yaml --max-opts 30 --run-dir again\n", f"{JUDGE}\n", "same bits"], ["not"],
    ),
    "elsewhere": (card(env="Acrobot-v1", env_args=["x", "2"]), [f"{JUDGE} --env Acrobot-v1 --env-args x 2\n"], []),
    "own": (
        card({"env": "my.envs:make"}),
        ["config.yaml --env my.envs:make --max-opts", f"{JUDGE} --env my.envs:make\n", "`my.envs`, is not part"], [],
    ),
    "own, with a file": (
        card({"env": "my.envs:make", "env_args": {"level": f"{HOME}/1", "n": 2, "sizes": [1, True]}},
             env="my.envs:make", env_args=["level", f"{HOME}/1"]),
        ["--env-args level PATH n 2 sizes '[1,true]' --max", f"{JUDGE} --env my.envs:make --env-args level PATH\n"],
        [HOME],
    ),
    "made known in Python": (card({"env": "Mine-v9"}, env="CartPole-v1"), ["Mine-v9 was made known"], ["jaxrl.train"]),
    "from data": (
        card({"algo": "iql", "data": [f"{HOME}/a.npz", "minari:D4RL/x"], "env": "CartPole-v1"}),
        ["train iql --config config.yaml --data FILE minari:D4RL/x --max-opts", "same bits", "SHA-256"], [HOME],
    ),
    "with demonstrations": (card({"demos": [f"{HOME}/a.npz"]}), ["--demos FILE --max-opts", "same bits"], [HOME]),
    "from other networks": (
        card({"init_from": HOME}), ["--init-from RUN --max", "not to the same bits", "of another run"], [HOME],
    ),
    "from a teacher": (
        card({"teacher": HOME}), ["--teacher TEACHER --max", "this makes the same bits", "SHA-256"], [HOME],
    ),
    "changed on the way": (card(changed=True), ["not to the same bits", "changed on the way"], ["this makes"]),
    "by a session": (card({"custom": ["loop"]}, best=False), ["evaluate RUN --step 30 --episodes"], ["jaxrl.train"]),
    "with actors": (card({"actors": 2}), ["environments that do the same again, this makes the same bits"], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CARDS)
def test_a_card_says_how_to_repeat_what_can_be_repeated_and_no_more(case: str) -> None:
    said, parts, others = CARDS[case]
    assert [part for part in parts if part not in said] == []
    assert [part for part in others if part in said] == []


def test_another_environment_than_that_of_the_training_is_named() -> None:
    run = {**RUN, "env_args": {"gravity": 12.0}}
    where = lambda env, *args: EvalOptions(env, args, 5, 7).where(run)
    assert where(None) is where("CartPole-v1") is where(None, "gravity", "12.0") is None
    assert where(None, "gravity", "9") == "CartPole-v1, gravity 9"
    assert where("Acrobot-v1", "level", f"{HOME}/1") == "Acrobot-v1, level PATH"


def test_settings_are_published_without_paths() -> None:
    args = {"level": f"{HOME}/1", "n": 2, "levels": ["a", f"{HOME}/b"]}
    run = {**RUN, "env_args": args, "eval_env_args": args, "demos": [f"{HOME}/d.npz"], "init_from": HOME}
    run["teacher"] = f"{HOME}/teacher"
    kept = portable({**run, "data": ["minari:D4RL/x", f"{HOME}/a.npz"]})
    assert HOME not in str(kept)
    assert kept == {**run, "env_args": {"n": 2}, "eval_env_args": {"n": 2}, "demos": [], "init_from": None,
                    "teacher": None, "data": ["minari:D4RL/x"]}  # fmt: skip


def test_an_export_that_is_replaced_is_there_whole_whatever_happens(tmp_path: Path) -> None:
    """Where the disk takes no more, and where an earlier process was killed between its two steps."""
    out, content = tmp_path / "policy", lambda value: {"policy.json": value * 5_000, "more/rest": value}
    there = lambda: {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    wanted = lambda value: {f"policy/{name}": found for name, found in content(value).items()}
    write(content(b"1"), out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for killed in (False, True):
        if killed:
            out.rename(tmp_path / ".policy.old")
            (tmp_path / f".policy.{2**22 + 1}.tmp").mkdir()  # of no living process
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))
        try:
            with pytest.raises(SettingsError, match=r"cannot write .*policy: File too large"):
                write(content(b"2"), out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert there() == wanted(b"1")
    (tmp_path / ".policy.notes.tmp").mkdir()  # the user's
    write(content(b"3"), out)
    assert there() == wanted(b"3")
    assert {path.name for path in tmp_path.iterdir()} == {"policy", ".policy.notes.tmp"}
