"""The switch between forms, and that nothing but speed hangs on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys_beside import QUIET
from toys_trainer import counting, small_dqn

import jaxrl
from jaxrl import xla
from jaxrl.nn import MLP, QNetwork
from jaxrl.training.program import jit_run, program_cache, state_shapes
from jaxrl.xla import carry, options
from jaxrl.xla.packing import make_gather

ROOT = Path(__file__).parents[2]


def network():
    module = QNetwork(jaxrl.Box(-1.0, 1.0, (5,)), 3, features=(16, 8))
    obs = jax.random.normal(jax.random.key(0), (7, 5))
    return module, module.init(jax.random.key(1), obs), obs


@pytest.mark.parametrize(("found", "forms"), [("cuda", "cuda"), ("rocm", "plain")])
def test_a_gpu_that_is_not_of_nvidia_gets_plain_forms_and_no_options(
    found: str, forms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices(platform: str) -> list[str]:
        if platform != found:
            raise RuntimeError(f"Unknown backend {platform}")
        return ["a GPU"]

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", devices)
    assert xla.current_forms() == forms
    if found == "rocm":
        assert options.compiler_options() is options.graph_options() is options.once_options() is None
        assert options.product_options(lambda: 1) == {}


@pytest.mark.every_day("plain")
@pytest.mark.parametrize("other", ["plain", "tpu"])
def test_programs_hold_no_form_of_another_platform(other: str) -> None:
    """Seen in the program of a whole run: small leaves are tied by bit-casts, gradients kept apart by barriers."""
    texts, count = {}, jax.ShapeDtypeStruct((), jnp.uint32)
    for which in ("cpu", other):
        strategy = small_dqn.__wrapped__()
        with xla.forms(which):
            texts[which] = jit_run(strategy).lower(*state_shapes(strategy), count, count).as_text()
    assert "optimization_barrier" in texts["cpu"]
    assert other == "tpu" or "optimization_barrier" not in texts["plain"]
    assert texts[other].count("bitcast_convert") < texts["cpu"].count("bitcast_convert")


@pytest.mark.every_day("plain-False")
@pytest.mark.parametrize(("which", "tied"), [("plain", False), ("cpu", True)])
def test_a_run_is_traced_with_the_forms_that_it_is_begun_with(
    which: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the threads that compile, too."""
    calls, bundle = [], carry.bundle
    monkeypatch.setattr(carry, "bundle", lambda *args: calls.append(1) or bundle(*args))
    strategy = counting.__wrapped__()
    with xla.forms(which):
        jaxrl.Trainer(strategy, max_opts=2, **QUIET).train()
        assert "run" in program_cache(strategy)
    assert bool(calls) is tied
    assert "run" not in program_cache(strategy) or which == xla.current_forms()


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "forms"), [("dqn", "cpu"), ("dqn", "cuda"), ("ppo", "cpu"), ("ppo", "cuda")])
def test_plain_forms_train_alike(algo: str, forms: str) -> None:
    """The same random numbers and the same equations: all whole numbers are equal, all others to rounding."""

    def trained(which: str) -> object:
        env = jaxrl.make_env("Catch-bsuite")
        if algo == "dqn":
            buffer = jaxrl.uniform(96, batch_size=8)
            strategy = jaxrl.off_policy(env, jaxrl.dqn(features=(8,)), buffer=buffer, num_envs=4, opt_interval=8)
        else:
            strategy = jaxrl.on_policy(env, jaxrl.ppo(features=(8,)), num_envs=4, rollout=8, epochs=2, minibatches=2)
        with xla.forms(which):
            return jaxrl.Trainer(strategy, max_opts=8, eval_episodes=0, eval_interval=0, quiet=True).train().state

    one, other = (jax.tree.leaves_with_path(trained(which)) for which in (forms, "plain"))
    for (path, a), (_, b) in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key) and algo == "ppo":
            assert np.array_equal(a, b), path


@pytest.mark.slow
def test_networks_can_be_differentiated_in_every_way() -> None:
    module, params, obs = network()
    value = jax.jit(lambda x: module.apply(params, x[None])[0, 1])
    by_hand = jnp.stack([(value(obs[0] + e) - value(obs[0] - e)) / 2e-2 for e in 1e-2 * jnp.eye(5)])
    forwards, backwards = (jax.jit(way(value))(obs[0]) for way in (jax.jacfwd, jax.grad))
    np.testing.assert_allclose(forwards, by_hand, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(forwards, backwards, rtol=1e-5, atol=1e-6)
    smooth = MLP((8, 1), "tanh")
    weights = smooth.init(jax.random.key(2), obs)
    curved = lambda x: smooth.apply(weights, x[None]).sum()
    there_and_back = jax.jit(jax.jacrev(jax.jacrev(curved)))(obs[0])
    np.testing.assert_allclose(jax.jit(jax.hessian(curved))(obs[0]), there_and_back, rtol=1e-4, atol=1e-5)
    assert jnp.abs(there_and_back).max() > 1e-3
    together = jax.jit(jax.vmap(jax.grad(value)))(obs)
    np.testing.assert_allclose(together[0], backwards, rtol=1e-5, atol=1e-6)


def test_precision_and_the_type_of_sums_reach_the_product() -> None:
    from jaxrl.xla.products import dot_general

    x, kernel = jnp.ones((4, 3)), jnp.ones((3, 2))
    text = str(jax.make_jaxpr(lambda x, k: dot_general(x, k, (((1,), (0,)), ((), ())), precision="highest"))(x, kernel))
    assert "HIGHEST" in text
    summed = dot_general(
        x.astype("bfloat16"), kernel.astype("bfloat16"), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    assert summed.dtype == jnp.float32


@pytest.mark.parametrize("which", ["cpu", "plain"])
def test_items_are_taken_alike(which: str) -> None:
    items = {"a": jnp.arange(12.0).reshape(6, 2), "b": jnp.arange(6) > 2}
    with xla.forms(which):
        taken = make_gather(items)(jnp.array([4, 0]))
    assert taken["a"].tolist() == [[8.0, 9.0], [0.0, 1.0]]
    assert taken["b"].tolist() == [True, False]


def test_unknown_forms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(jaxrl.SettingsError, match=r"unknown forms 'plane'; did you mean plain"), xla.forms("plane"):
        pass
    monkeypatch.setenv("JAXRL_FORMS", "fast")
    with pytest.raises(jaxrl.SettingsError, match=r"unknown forms 'fast'"):
        xla.current_forms()
    monkeypatch.setenv("JAXRL_FORMS", "tpu")
    assert xla.current_forms() == "tpu"
    with xla.forms("plain"):
        assert xla.current_forms() == "plain"
    assert xla.current_forms() == "tpu"


def test_only_this_room_names_a_platform() -> None:
    named = re.compile(r"""platform_dependent|default_backend|["'](cpu|gpu|cuda|tpu)["']""")
    files = [f for f in (ROOT / "jaxrl").rglob("*.py") if "xla" not in f.parts]
    assert len(files) > 50
    assert [str(f) for f in files if named.search(f.read_text())] == []


@pytest.mark.slow
@pytest.mark.parametrize("tests", ["strategies/test_closed_form.py", "strategies/test_closed_form_on_policy.py"])
def test_closed_forms_hold_in_plain(tests: str) -> None:
    env = {**os.environ, "JAXRL_FORMS": "plain"}
    done = subprocess.run([sys.executable, "-m", "pytest", f"tests/{tests}"], cwd=ROOT, env=env, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:]
