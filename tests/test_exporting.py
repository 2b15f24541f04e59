"""Exported policies: each computes what the policy does, over whole episodes, for observations of all kinds."""

import importlib.util
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_masks import minefield

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.exporting import as_numpy, stablehlo
from jaxrl.exporting.again import EvalOptions, portable, repeat
from jaxrl.exporting.formats import files_of
from jaxrl.exporting.function import Function, function_of
from jaxrl.exporting.writing import write
from jaxrl.spaces import Box, EnvSpec, MultiDiscrete
from jaxrl.strategies.base import Policy
from jaxrl.training.policy import GreedyPolicy

STEPS, ROWS = 5, 200


def off(env: Any, agent: Any, processor: Any = None) -> Any:
    return jaxrl.off_policy(env, agent, processor=processor, buffer=jaxrl.uniform(capacity=200, batch_size=8))


CASES: dict[str, Callable[[], Any]] = {
    "values": lambda: off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,), dueling=True)),
    "distributions of values": lambda: off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(16,), values="c51")),
    "masks": lambda: off(minefield(), jaxrl.dqn(features=(16,))),
    "several choices": lambda: jaxrl.on_policy(minefield(MultiDiscrete((2, 3, 4))), jaxrl.ppo(features=(16,))),
    "continuous": lambda: off(jaxrl.make_env("Pendulum-v1"), jaxrl.sac(features=(16,))),
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
    "normalised": lambda: jaxrl.on_policy(
        jaxrl.make_env("Pendulum-v1"),
        jaxrl.ppo(features=(8,)),
        processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def policy(request: pytest.FixtureRequest) -> GreedyPolicy:
    """A policy whose parameters are far from those that it begins with, so that each of them matters."""
    strategy = CASES[request.param]()
    params = jax.jit(lambda key: strategy.policy.params(strategy.init(key)))(jax.random.key(0))
    leaves, form = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = [
        x + 0.2 * jnp.asarray(rng.normal(size=x.shape), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in leaves
    ]
    return GreedyPolicy(strategy.policy, form.unflatten(moved))


def observations(function: Function) -> list[list[np.ndarray]]:
    """Return observations of `STEPS` steps of `ROWS` environments, each as a list of its parts."""
    rng = np.random.default_rng(1)

    def part(like: Any) -> np.ndarray:
        shape = (ROWS, *like.shape)
        if like.dtype != bool:
            return rng.normal(size=shape).astype(like.dtype)
        allowed = rng.random(shape) < 0.5
        allowed[:, 0] |= ~allowed.any(axis=-1)  # a mask allows something
        return allowed

    return [[part(like) for like in function.obs] for _ in range(STEPS)]


def answers(policy: GreedyPolicy, seen: list[list[np.ndarray]]) -> list[np.ndarray]:
    form: Any = jax.tree.structure(jaxrl.spaces.space_struct(policy.policy.spec.observation_space))
    policy.reset()
    return [np.asarray(policy(form.unflatten(parts))) for parts in seen]


@pytest.mark.every_day("normalised", "masks", "memory")
def test_stablehlo_comes_to_the_same_bits(policy: GreedyPolicy) -> None:
    function = function_of(policy)
    call = jax.export.deserialize(bytearray(stablehlo.files(function)["policy.jax"])).call
    seen, memory = observations(function), [jnp.zeros((ROWS, *x.shape), x.dtype) for x in function.memory]
    wanted = answers(policy, seen)
    for i, parts in enumerate(seen):
        # What was remembered of an episode before counts for nothing where the next one begins.
        kept = [jnp.full_like(x, 7) for x in memory] if i == 0 else memory
        action, *memory = call(*parts, *kept, *([np.full(ROWS, i == 0)] if kept else []))
        np.testing.assert_array_equal(action, wanted[i])
    assert len(np.unique(np.concatenate(wanted))) > 1


def test_numpy_comes_to_the_same_numbers(policy: GreedyPolicy, tmp_path: Path) -> None:
    function = function_of(policy)
    for name, content in as_numpy.files(function).items():
        (tmp_path / name).write_bytes(content)
    source = (tmp_path / "policy.py").read_text()
    assert set(re.findall(r"^import (\w+)", source, re.MULTILINE)) == {"pathlib", "numpy"}
    spec = importlib.util.spec_from_file_location("exported", tmp_path / "policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = observations(function)
    wanted = answers(policy, seen)
    form: Any = jax.tree.structure(jaxrl.spaces.space_struct(policy.policy.spec.observation_space))
    for row in range(3):
        given: list[Any] = []
        for parts, want in zip(seen, wanted, strict=True):
            made = module.act(form.unflatten([part[row] for part in parts]), *given)
            action, given = (made[0], [made[1]]) if function.memory else (made, [])
            np.testing.assert_allclose(action, want[row], rtol=1e-5, atol=1e-5)


def test_a_description_has_what_each_format_takes(tmp_path: Path) -> None:
    """An observation is a dict on the page of NumPy, whatever its order, and without the axis of a batch."""
    box, number = Box(-1, 1, (2, 3)), Box(-1, 1, ())
    spec = EnvSpec("x", {"b b": box, "a": (number, {"c": number})}, Box(-1, 1, (3,)))
    policy = Policy(
        spec=spec,
        params=lambda state: state,
        begin=lambda params, obs: obs,
        act=lambda params, obs: (obs, obs["b b"].sum(1) + (obs["a"][0] + 2 * obs["a"][1]["c"])[:, None]),
        observe=lambda params, carry, step: step.obs,
    )
    made = {form: files_of(GreedyPolicy(policy, ()), form) for form in ("numpy", "stablehlo")}
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


@pytest.mark.slow
def test_the_memory_of_the_page_of_numpy_is_described_as_it_returns_it() -> None:
    strategy = CASES["memory"]()
    policy = GreedyPolicy(strategy.policy, strategy.policy.params(strategy.init(jax.random.key(0))))
    told = json.loads(files_of(policy, "numpy")["policy.json"])
    assert [(x["name"], x["shape"]) for x in told["inputs"]] == [("obs", [4]), ("memory[0]", [1, 64])]
    assert [(x["name"], x["shape"]) for x in told["outputs"]] == [("action", []), ("memory[0]", [1, 64])]


def test_only_what_decides_on_actions_is_remembered() -> None:
    strategy = CASES["memory"]()
    function = function_of(GreedyPolicy(strategy.policy, strategy.policy.params(strategy.init(jax.random.key(0)))))
    assert [x.shape for x in function.memory] == [(64,)]
    assert function.names == ["obs", "memory", "first"]
    assert function.results == ["action", "next_memory"]


def test_what_numpy_has_no_line_for_is_named() -> None:
    policy = Policy(
        spec=EnvSpec("x", Box(-1, 1, (3,)), Box(-1, 1, (3,))),
        params=lambda state: state,
        begin=lambda params, obs: obs,
        act=lambda params, carry: (carry, jax.lax.erf_inv(carry)),
        observe=lambda params, carry, step: step.obs,
    )
    with pytest.raises(SettingsError, match=r"computes erf_inv, .* export it as stablehlo or onnx"):
        as_numpy.files(function_of(GreedyPolicy(policy, ())))


def test_numbers_that_numpy_does_not_have_are_named() -> None:
    strategy = off(jaxrl.make_env("CartPole-v1"), jaxrl.dqn(features=(8,), dtype="bfloat16"))
    params = jax.jit(lambda key: strategy.policy.params(strategy.init(key)))(jax.random.key(0))
    with pytest.raises(SettingsError, match="computes numbers of bfloat16"):
        as_numpy.files(function_of(GreedyPolicy(strategy.policy, params)))


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
    kept = portable({**run, "data": ["minari:D4RL/x", f"{HOME}/a.npz"]})
    assert HOME not in str(kept)
    assert kept == {**run, "env_args": {"n": 2}, "eval_env_args": {"n": 2}, "demos": [], "init_from": None,
                    "data": ["minari:D4RL/x"]}  # fmt: skip


def test_an_export_that_is_replaced_is_there_whole_whatever_happens(tmp_path: Path) -> None:
    """Where the disk takes no more, and where an earlier process was killed between its two steps."""
    out, content = tmp_path / "policy", lambda value: {"policy.json": value * 5_000, "more/rest": value}
    there = lambda: {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    wanted = lambda value: {f"policy/{name}": found for name, found in content(value).items()}
    write(content(b"1"), out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))
    try:
        with pytest.raises(SettingsError, match=r"cannot write .*policy: File too large"):
            write(content(b"2"), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert there() == wanted(b"1")
    out.rename(tmp_path / ".policy.old")
    (tmp_path / f".policy.{2**22 + 1}.tmp").mkdir()  # of no living process
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))
    try:
        with pytest.raises(SettingsError, match="File too large"):
            write(content(b"2"), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert there() == wanted(b"1")
    (tmp_path / ".policy.notes.tmp").mkdir()  # the user's
    write(content(b"3"), out)
    assert there() == wanted(b"3")
    assert {path.name for path in tmp_path.iterdir()} == {"policy", ".policy.notes.tmp"}
