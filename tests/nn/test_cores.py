"""Cells of recurrent cores, each beside its equations in NumPy, step by step; and cores of one's own."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.nn import CORES, Cell, Core, FlaxCell, NNXCell, initial_memory, register_core
from jaxrl.nn.cores import hippo_eigenvalues

T, B, F, WIDTH, WINDOW = 17, 3, 6, 8, 4
KEY = jax.random.key(0)
XS = np.random.default_rng(0).normal(size=(T, B, F)).astype(np.float32)
FIRST = np.random.default_rng(1).random((T, B)) < 0.2
ATTENTION = ("trxl", "gtrxl")
"""Cores whose memory is their last inputs."""


def blank_of(name: str, features: int = WIDTH, layers: int = 1, rows: int = B) -> Any:
    """Return the memory of `rows` episodes that begin."""
    memory = initial_memory(name, features, layers, WINDOW)
    return jax.tree.map(lambda x: np.zeros((rows, *x.shape), x.dtype), memory)


@functools.cache
def core_of(name: str, layers: int = 1) -> tuple[Core, Any]:
    """Return a core, and parameters of which none is zero, drawn by NumPy."""
    core = Core(name, WIDTH, layers, WINDOW)
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(core.init, KEY, blank_of(name, layers=layers), XS[0])
    return core, jax.tree.map(lambda x: rng.normal(0, 0.4, x.shape).astype(x.dtype), shapes)


@functools.cache
def step_of(core: Core) -> Any:
    """Return the compiled step, `(variables, memory, x) -> (memory, out)`."""
    return jax.jit(core.apply)


@functools.cache
def scan_of(core: Core) -> Any:
    """Return the compiled sequence, `(variables, memory, xs, first) -> (memories, outs)`."""
    return jax.jit(functools.partial(core.apply, method="sequence"))


def forgotten(memory: Any, is_first: Any) -> Any:
    keeps = lambda x: np.where(is_first.reshape(-1, *[1] * (x.ndim - 1)), np.zeros_like(x), x)
    return jax.tree.map(keeps, memory)


def sequence_of(core: Core, variables: Any, memory: Any, xs: Any = XS, first: Any = FIRST) -> Any:
    return jax.tree.map(np.asarray, scan_of(core)(variables, memory, xs, first))


@pytest.mark.parametrize("name", CORES)
def test_a_sequence_is_its_steps(name: str) -> None:
    """Of two layers, with episodes that begin at random places, from the memory that some steps have left."""
    core, variables = core_of(name, layers=2)
    memory = blank_of(name, layers=2)
    for x in XS[:6]:
        memory = step_of(core)(variables, memory, 0.7 * x)[0]
    memories, outs = sequence_of(core, variables, memory)
    for t in range(T):
        if name in ATTENTION and t > 0:  # rows that are no steps of the episode may differ: none reads them
            led = forgotten(jax.tree.map(lambda x, t=t: x[t - 1], memories), FIRST[t])
            np.testing.assert_allclose(step_of(core)(variables, led, XS[t])[1], outs[t], rtol=1e-4, atol=1e-5)
        memory, out = step_of(core)(variables, forgotten(memory, FIRST[t]), XS[t])
        np.testing.assert_allclose(outs[t], out, rtol=1e-4, atol=1e-5)
        if name not in ATTENTION:
            jax.tree.map(lambda a, b, t=t: np.testing.assert_allclose(a[t], b, rtol=1e-4, atol=1e-5), memories, memory)
    assert np.abs(outs).max() > 0.1


@pytest.mark.parametrize("name", CORES)
def test_parameters_memories_and_outputs_are_of_32_bits_in_x64_too(name: str) -> None:
    core, memory = Core(name, WIDTH, 2, WINDOW), blank_of(name, layers=2)
    with jax.enable_x64(True):
        variables = jax.eval_shape(core.init, KEY, memory, XS[0])
        made = jax.eval_shape(functools.partial(core.apply, method="sequence"), variables, memory, XS, FIRST)
    assert {x.dtype.name for x in jax.tree.leaves((variables, made))} <= {"float32", "int32"}


@pytest.mark.every_day("gru", "s5", "gtrxl")
@pytest.mark.parametrize("name", CORES)
def test_the_gradient_of_an_output_reaches_back_to_the_first_step_of_its_episode_and_no_further(name: str) -> None:
    core, variables = core_of(name)
    steps, first = 6, np.zeros((6, 1), bool)
    first[2] = first[3] = True  # an episode of a single step between two others
    memory = jax.tree.map(np.ones_like, blank_of(name, rows=1))
    outs = lambda xs: core.apply(variables, memory, xs, first, method="sequence")[1].sum(axis=(1, 2))
    slopes = np.abs(jax.jit(jax.jacobian(outs))(XS[:steps, :1])).max(axis=(2, 3)) > 0
    episode = first[:, 0].cumsum()
    wanted = np.tril(episode[:, None] == episode[None])
    np.testing.assert_array_equal(slopes, wanted)


# --- against the papers -------------------------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def dense(x: Any, layer: Any) -> Any:
    return x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer.get("bias", 0.0), np.float64)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mingru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    z = sigmoid(dense(x, p["update"]))
    h = (1 - z) * h + z * dense(x, p["candidate"])
    return h, h


def minlstm(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    f, i = sigmoid(dense(x, p["forget_gate"])), sigmoid(dense(x, p["input_gate"]))
    h = f / (f + i) * h + i / (f + i) * dense(x, p["candidate"])
    return h, h


def both(x: Any, p: Any, name: str) -> Any:
    """Return a complex product: the kernels of the real and the imaginary part."""
    return dense(x, p[f"{name}_0"]) + 1j * dense(x, p[f"{name}_1"])


def lru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    decay = np.exp(-np.exp(np.float64(p["nu"])) + 1j * np.exp(np.float64(p["theta"])))
    h = decay * h + np.exp(np.float64(p["gamma"])) * both(x, p, "into")
    matrix = np.float64(p["out_0"]["kernel"]) + 1j * np.float64(p["out_1"]["kernel"])
    return h, (h @ matrix).real + p["skip"] * x


def s5(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    pole, step = np.minimum(p["real"], -1e-4) + 1j * np.float64(p["imag"]), np.exp(np.float64(p["log_step"]))
    h = np.exp(pole * step) * h + (np.exp(pole * step) - 1) / pole * both(x, p, "into")
    matrix = np.float64(p["out_0"]["kernel"]) + 1j * np.float64(p["out_1"]["kernel"])
    return h, 2 * (h @ matrix).real + p["skip"] * x


def gla(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    heads = lambda layer: dense(x, p[layer]).reshape(len(x), 4, -1)
    write = sigmoid(heads("key"))
    h = (1 - write)[..., None] * h + np.einsum("bhk,bhv->bhkv", write, heads("content"))
    return h, np.einsum("bhk,bhkv->bhv", heads("query"), h).reshape(len(x), -1)


@pytest.mark.parametrize("recurrence", [mingru, minlstm, lru, s5, gla], ids=lambda function: function.__name__)
def test_a_scan_is_the_recurrence_of_its_paper(recurrence: Any) -> None:
    """In double precision: inputs are normalised, what is read passes a gated unit, and the inputs are added."""
    core, variables = core_of(recurrence.__name__)
    _, outs = sequence_of(core, variables, blank_of(recurrence.__name__))
    p = jax.tree.map(np.asarray, variables["params"])
    cell, h = p["cells_0"], 0.0
    for t in range(T):
        shape = (B, *[1] * (np.ndim(h) - 1))
        h = np.where(FIRST[t].reshape(shape), 0.0, h) if np.ndim(h) else h
        u = dense(XS[t], p["embed"])
        v = (u - u.mean(-1, keepdims=True)) / np.sqrt(u.var(-1, keepdims=True) + 1e-6)
        h, read = recurrence(cell, v * cell["norm"]["scale"] + cell["norm"]["bias"], h)
        g = gelu(read)
        np.testing.assert_allclose(
            outs[t], u + dense(g, cell["value"]) * sigmoid(dense(g, cell["gate"])), rtol=1e-3, atol=1e-4
        )


def gru(p: Any, x: Any, h: Any) -> tuple[Any, Any]:
    r, z = (sigmoid(dense(x, p[f"i{gate}"]) + dense(h, p[f"h{gate}"])) for gate in "rz")
    h = (1 - z) * np.tanh(dense(x, p["in"]) + r * dense(h, p["hn"])) + z * h
    return h, h


def lstm(p: Any, x: Any, memory: Any) -> tuple[Any, Any]:
    c, h = memory
    i, f, g, o = (dense(x, p[f"i{gate}"]) + dense(h, p[f"h{gate}"]) for gate in "ifgo")
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return (c, h), h


@pytest.mark.parametrize("recurrence", [gru, lstm], ids=lambda function: function.__name__)
def test_a_cell_with_gates_is_the_recurrence_of_its_paper(recurrence: Any) -> None:
    """In double precision (Cho et al. 2014, with the second reset gate of cuDNN; Hochreiter and Schmidhuber 1997)."""
    core, variables = core_of(recurrence.__name__)
    blank = blank_of(recurrence.__name__)
    _, outs = sequence_of(core, variables, blank)
    (memory,) = blank
    for t in range(T):
        memory, out = recurrence(variables["params"]["cells_0"]["cell"], XS[t], forgotten(memory, FIRST[t]))
        np.testing.assert_allclose(outs[t], out, rtol=1e-4, atol=1e-5)


def test_the_matrices_of_lru_begin_as_large_as_in_the_paper() -> None:
    """Complex entries have the variance `1 / H` on the way in, `2 / N` on the way out (Orvieto et al., appendix A)."""
    core, width = Core("lru", 400), 400
    memory = jax.tree.map(lambda x: np.ones((1, *x.shape), np.float32), initial_memory("lru", width))
    params = jax.jit(core.init)(KEY, memory, np.zeros((1, F), np.float32))["params"]["cells_0"]
    variance = lambda layer: width * sum(np.var(params[f"{layer}_{part}"]["kernel"]) for part in range(2))
    np.testing.assert_allclose([variance("into"), variance("out")], [1, 2], rtol=0.03)


def test_eigenvalues_of_hippo() -> None:
    """Of two states the normal part is -1/2 and sqrt(3) / 2 beside the diagonal; of more they lie further apart."""
    np.testing.assert_allclose(hippo_eigenvalues(2), [-0.5 + 0.5j * np.sqrt(3)])
    many = hippo_eigenvalues(16)
    assert many.shape == (8,)
    np.testing.assert_allclose(many.real, -0.5)
    assert many.imag.min() > 0


@pytest.mark.parametrize("name", ["mingru", "minlstm", "gla"])
def test_a_new_gate_keeps_for_one_to_a_thousand_steps(name: str) -> None:
    """At inputs of zero, where biases alone count."""
    core = Core(name, 400)
    memory = jax.tree.map(lambda x: np.ones((1, *x.shape), np.float32), initial_memory(name, 400))
    blank = np.zeros((1, F), np.float32)
    kept = np.asarray(jax.jit(lambda key: core.apply(core.init(key, memory, blank), memory, blank)[0][0])(KEY))
    kept = kept[..., 0] if name == "gla" else kept
    # A gate of bias `-u` keeps `sigmoid(u)`; of minlstm, whose other gate has no bias, `f / i` is `(1 + exp(u)) / 2`.
    odds = kept / (1 - kept)
    u = np.log(2 * odds - 1 if name == "minlstm" else odds)
    assert 0 <= u.min() < 0.5
    assert np.log(1000) - 0.5 < u.max() < np.log(1000) + 0.01


def new_cell(name: str, width: int) -> tuple[Core, Any]:
    """Return a core of one layer, and new parameters."""
    core = Core(name, width)
    return core, jax.jit(core.init)(KEY, blank_of(name, width, rows=1), np.zeros((1, F), np.float32))


@pytest.mark.parametrize(("name", "layer"), [("gru", "iz"), ("lstm", "hf")])
def test_a_new_gru_or_lstm_keeps_for_one_to_a_thousand_steps(name: str, layer: str) -> None:
    """Biases of the gate that keeps are logarithms of time scales; they are uniform. All others are zeros."""
    params = new_cell(name, 400)[1]["params"]["cells_0"]["cell"]
    logs = np.asarray(params[layer]["bias"])
    assert logs.min() >= 0
    assert logs.max() <= np.log(1_000)
    assert scipy.stats.kstest(logs, "uniform", (0, np.log(1_000))).pvalue > 0.01
    if name == "lstm":
        np.testing.assert_array_equal(params["hi"]["bias"], -logs)
    others = {key: of["bias"] for key, of in params.items() if "bias" in of and key not in (layer, "hi")}
    assert len(others) == (3 if name == "gru" else 2)
    assert all(not np.any(bias) for bias in others.values())


@pytest.mark.parametrize(("name", "cell"), [("gru", nn.GRUCell), ("lstm", nn.OptimizedLSTMCell)])
def test_a_new_gru_or_lstm_remembers_its_first_input_for_a_hundred_steps(name: str, cell: Any) -> None:
    """By the slope of the last output by the first input, beside that of the first; Flax's own cells have forgotten."""
    xs, none = np.zeros((101, 1, F), np.float32), np.zeros((101, 1), bool)
    (blank,) = blank_of(name, 64, rows=1)

    def share(core: Cell | Core, variables: Any, memory: Any) -> float:
        outs = lambda x: core.apply(variables, memory, jnp.asarray(xs).at[0].set(x), none, method="sequence")[1][:, 0]
        slopes = np.asarray(jax.jit(jax.jacfwd(outs))(xs[0]))
        return float(np.linalg.norm(slopes[-1]) / np.linalg.norm(slopes[0]))

    old = FlaxCell(cell(64))
    assert share(old, jax.jit(old.init)(KEY, blank, xs[0]), blank) < 1e-9
    assert 5e-3 < share(*new_cell(name, 64), (blank,)) < 1


def test_lru_begins_as_the_paper_has_it_for_long_sequences() -> None:
    core = Core("lru", 400)
    p = jax.jit(core.init)(KEY, blank_of("lru", 400, rows=1), np.zeros((1, F), np.float32))["params"]["cells_0"]
    modulus, phase = np.exp(-np.exp(p["nu"])), np.exp(p["theta"])
    assert 0.9 <= modulus.min() < 0.91
    assert 0.99 < modulus.max() <= 0.9991
    assert 0.0 < phase.min() < 0.01
    assert 0.3 < phase.max() <= np.pi / 10 + 1e-6
    np.testing.assert_allclose(np.exp(p["gamma"]), np.sqrt(1 - modulus**2), rtol=1e-4)


# --- attention ----------------------------------------------------------------------------------------------------


def layer_norm(x: Any, p: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def gru_gate(p: Any, x: Any, y: Any) -> Any:
    """Return the gated sum of the stream `x` and the branch `y` (GTrXL, section 3.2)."""
    r = sigmoid(dense(y, p["reset_y"]) + dense(x, p["reset_x"]))
    z = sigmoid(dense(y, p["update_y"]) + dense(x, p["update_x"]) - p["bias"])
    return (1 - z) * x + z * np.tanh(dense(y, p["new_y"]) + dense(r * x, p["new_x"]))


def attention(p: Any, past: Any) -> Any:
    """Return what the last of the normalised inputs `past` `[n, F]` reads of them, by content and by distance."""
    heads = lambda x: x.reshape(len(x), 4, -1)
    angles = np.arange(len(past))[::-1, None] / 10_000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    places = heads(dense(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), p["places"]))
    query, keys = heads(dense(past[-1:], p["queries"])), heads(dense(past, p["keys"]))
    values = heads(dense(past, p["values"]))
    score = ((query + p["by_content"]) * keys + (query + p["by_distance"]) * places).sum(-1) / np.sqrt(WIDTH / 4)
    share = np.exp(score) / np.exp(score).sum(0)
    return dense((share[..., None] * values).sum(0).ravel(), p["out"])


def require_blocks(name: str, block: Callable[[Any, Any, Any], Any]) -> None:
    """Assert that outputs are those of `block(parameters, x, past)` in double precision, `past` up to `x`."""
    core, variables = core_of(name)
    outs = sequence_of(core, variables, blank_of(name))[1]
    p = jax.tree.map(np.float64, variables["params"])
    inputs = dense(np.float64(XS), p["embed"])
    for b in range(B):
        start = 0
        for t in range(T):
            start = t if FIRST[t, b] else start
            out = block(p["cells_0"], inputs[t, b], inputs[max(start, t - WINDOW) : t + 1, b])
            np.testing.assert_allclose(outs[t, b], out, rtol=1e-3, atol=1e-4)


def two_layers(cell: Any, x: Any) -> Any:
    return dense(np.maximum(dense(x, cell["wide"]), 0), cell["narrow"])


def test_trxl_is_the_block_of_its_paper() -> None:
    """Relative attention, then two dense layers, each added to its inputs and then normalised."""

    def block(cell: Any, x: Any, past: Any) -> Any:
        hidden = layer_norm(x + attention(cell, past), cell["norm"])
        return layer_norm(hidden + two_layers(cell, hidden), cell["norm_mlp"])

    require_blocks("trxl", block)


def test_gtrxl_is_the_block_of_its_paper() -> None:
    """Relative attention, then two dense layers, each after a norm and before a gate."""

    def block(cell: Any, x: Any, past: Any) -> Any:
        read = attention(cell, layer_norm(past, cell["norm"]))
        hidden = gru_gate(cell["attended"], x, np.maximum(read, 0))
        out = two_layers(cell, layer_norm(hidden, cell["norm_mlp"]))
        return gru_gate(cell["transformed"], hidden, np.maximum(out, 0))

    require_blocks("gtrxl", block)


def test_attention_sees_its_window_and_nothing_before_it() -> None:
    """One layer of a window of four: a step depends on itself and the four steps before it."""
    core, variables = core_of("gtrxl")
    blank = blank_of("gtrxl")
    others = np.tile(XS, (T, 1, 1, 1))
    others[range(T), T - 1 - np.arange(T)] = np.random.default_rng(2).normal(size=(B, F))  # so many steps back
    run = lambda xs: core.apply(variables, blank, xs, np.zeros((T, B), bool), method="sequence")[1][-1]
    whole, *last = np.asarray(jax.jit(lambda several: jax.lax.map(run, several))(np.stack([XS, *others])))
    changed = np.abs(last - whole).max(axis=(1, 2)) > 0
    np.testing.assert_array_equal(changed, np.arange(T) <= WINDOW)


def test_attention_tells_distances_apart() -> None:
    """The same steps in another order are another past."""
    core, variables = core_of("gtrxl")
    blank = blank_of("gtrxl")
    none = np.zeros((3, B), bool)
    forth = sequence_of(core, variables, blank, XS[[0, 1, 2]], none)[1][-1]
    back = sequence_of(core, variables, blank, XS[[1, 0, 2]], none)[1][-1]
    assert np.abs(forth - back).max() > 1e-3


# --- cores of one's own -------------------------------------------------------------------------------------------


class Counter(Cell):
    """Counts the steps of an episode."""

    features: int

    def initial(self) -> np.ndarray:
        return np.zeros((), np.float32)

    def __call__(self, memory: Any, x: Any) -> tuple[Any, Any]:
        return memory + 1, jnp.broadcast_to(memory[:, None], (x.shape[0], self.features))


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the cores that a test registers."""
    monkeypatch.setattr("jaxrl.nn.cores.CORES", dict(CORES))
    monkeypatch.setattr("jaxrl.agents.fields.CORES", jaxrl.nn.cores.CORES)


@pytest.mark.usefixtures("own_registry")
def test_a_core_of_ones_own_is_taken_by_name() -> None:
    """Its sequence is made of its steps; an agent's iteration can be traced with it, and a name is given once."""
    register_core("counter", Counter)
    core = Core("counter", 2)
    outs = sequence_of(core, {}, blank_of("counter", 2))[1][..., 0]
    since = 0.0
    for t in range(T):
        since = np.where(FIRST[t], 0.0, since)
        np.testing.assert_array_equal(outs[t], since * np.ones(B))
        since = since + 1
    with pytest.raises(SettingsError, match="there is a core 'counter' already"):
        register_core("counter", Counter)
    env = jaxrl.make_env("memory:Recall", length=2)
    agent = jaxrl.ppo(core="counter", features=(4,))
    strategy = jaxrl.on_policy(env, agent, num_envs=4, rollout=4, epochs=1, minibatches=1)
    state = jax.eval_shape(strategy.init, KEY)
    after, metrics = jax.eval_shape(strategy.step, state, KEY, jnp.uint32(0))
    assert after == state
    assert "loss" in metrics


def test_a_cell_of_flax_is_a_core() -> None:
    """An Elman cell, `tanh(W x + U h)`, beside the same in NumPy."""
    cell = FlaxCell(nn.SimpleCell(WIDTH))
    blank = np.zeros((B, WIDTH), np.float32)
    variables = jax.jit(cell.init)(KEY, blank, XS[0])
    outs = sequence_of(cell, variables, blank)[1]
    p, h = variables["params"]["cell"], np.zeros((B, WIDTH))
    for t in range(T):
        h = np.tanh(dense(XS[t], p["i"]) + dense(np.where(FIRST[t][:, None], 0.0, h), p["h"]))
        np.testing.assert_allclose(outs[t], h, rtol=1e-4, atol=1e-5)


@pytest.mark.every_day("LSTMCell")
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell"])
def test_a_cell_of_nnx_is_a_core(kind: str) -> None:
    """Its numbers are those of the module, step by step, begun anew where an episode begins."""
    make = lambda rngs: getattr(nnx, kind)(WIDTH, WIDTH, rngs=rngs)
    register_core(kind, lambda features: NNXCell(features, make))
    memory = blank_of(kind)
    core = Core(kind, WIDTH)
    variables = jax.jit(core.init)(KEY, memory, XS[0])
    outs = sequence_of(core, variables, memory)[1]
    params = variables["params"]["cells_0"]["cell"]

    @jax.jit
    def step(params: Any, own: Any, x: Any) -> Any:
        module = make(nnx.Rngs(0))
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            leaf.set_value(params["/".join(path)])
        return module(own, x)

    (own,) = memory
    for t in range(T):
        own = jax.tree.map(lambda x, t=t: np.where(FIRST[t][:, None], np.float32(0.0), x), own)
        own, y = step(params, own, dense(XS[t], variables["params"]["embed"]).astype(np.float32))
        np.testing.assert_allclose(outs[t], y, rtol=1e-4, atol=1e-5)
    # Gradients pass through two layers of it.
    deep = Core(kind, WIDTH, 2)
    blank = blank_of(kind, layers=2)
    total = lambda variables: deep.apply(variables, blank, XS, FIRST, method="sequence")[1].sum()
    jax.eval_shape(lambda key: jax.grad(total)(deep.init(key, blank, XS[0])), KEY)
