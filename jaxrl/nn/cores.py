"""Recurrent cores: stacks of recurrent cells, evaluated step by step or over whole sequences.

A cell has a memory and two equivalent functions: a step, `cell(memory, x) -> (memory, y)`, and a sequence,
`cell.sequence(memory, xs, is_first) -> (memories, ys)`. Memories are zeros at the start of every episode.

Cells differ in the cost of a sequence. In the GRU and the LSTM the next memory depends on the last through matrices, so
a sequence is a loop over its steps. Most others are linear in their memory, `h_t = a_t * h_{t-1} + b_t`, with `a_t` and
`b_t` functions of the inputs alone. Two such steps compose to one of the same form, so a sequence of `T` steps is an
associative scan of depth about `log2(T)` (Blelloch 1990; Martin and Cundy 2018, https://arxiv.org/abs/1709.04057).
Transformer-XL and GTrXL store past inputs and attend to them, for all steps in parallel.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, suggest
from jaxrl.nn.custom import from_nnx
from jaxrl.nn.layers import dense, kernel_init
from jaxrl.trees import Array, Key, PyTree, tree_where

LONGEST = 1_000.0
"""Longest initial time scale, in steps, of cells with input-dependent decay."""
HEADS = 4
"""Number of heads of `gla`, `trxl` and `gtrxl`."""


def forget(memory: PyTree, is_first: Array) -> PyTree:
    """Reset `memory` `[B, ...]` to zeros where `is_first` `[B]`."""
    return tree_where(is_first, jax.tree.map(jnp.zeros_like, memory), memory)


def memories_before(memory: PyTree, memories: PyTree, is_first: Array) -> PyTree:
    """Return the memory before each of the steps `[T, B]`.

    Args:
      memory: memory before the first step, `[B, ...]`.
      memories: memories after each step, `[T, B, ...]`.
      is_first: `[T, B]`, true at the first step of an episode, whose memory is zeros.
    """
    shifted = jax.tree.map(lambda first, after: jnp.concatenate([first[None], after[:-1]]), memory, memories)
    return forget(shifted, is_first)


class Cell(nn.Module):
    """Base class of recurrent cells; `register_core` makes a custom one available by name.

    Subclasses define `initial` and `__call__`, and `sequence` if it can cost less than one step at a time.
    """

    fixed_width: ClassVar[bool] = False
    """Whether inputs must be as wide as outputs, as in residual cells."""

    def initial(self) -> PyTree:
        """Return the memory of one environment at the start of an episode: zeros."""
        raise NotImplementedError

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step with the inputs `[B, F]`; return the next memory `[B, ...]` and the outputs `[B, features]`."""
        raise NotImplementedError

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take the steps `xs` `[T, B, F]` from `memory` `[B, ...]`; return the memory and outputs after each step.

        The memory is reset before steps where `is_first` `[T, B]`.
        """
        cell, variables = self.unbind()

        def step(memory: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, tuple[PyTree, Array]]:
            x, is_first = row
            made: tuple[PyTree, Array] = cast(Any, cell.apply)(variables, forget(memory, is_first), x)
            return made[0], made

        return jax.lax.scan(step, memory, (xs, is_first))[1]


def _blank_carry(cell: nn.RNNCellBase) -> PyTree:
    """Return zeros in the shape of the carry of one environment."""
    like = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), (1,)))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)


class FlaxCell(Cell):
    """A Flax Linen cell; sequences are a loop over steps."""

    cell: nn.RNNCellBase

    def initial(self) -> PyTree:
        """Return zeros in the shape of the cell's carry."""
        return _blank_carry(self.cell)

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        after, y = self.cell(memory, x)
        return after, y


class NNXCell(Cell):
    """A `flax.nnx` cell; sequences are a loop over steps. Inputs are first projected to width `features`."""

    features: int
    make: Callable[[Any], Any]
    """Function from `nnx.Rngs` to the cell, with `features` inputs and outputs."""
    fixed_width: ClassVar[bool] = True

    def setup(self) -> None:
        self.network = from_nnx(self.make)
        self.cell = self.param("cell", lambda key: self.network.init(key)["params"])

    def initial(self) -> PyTree:
        """Return zeros in the shape of the cell's carry."""
        from flax import nnx

        carry = lambda: self.make(nnx.Rngs(0)).initialize_carry((1, self.features), nnx.Rngs(0))
        return jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), jax.eval_shape(carry))

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        after, y = self.network.apply({"params": self.cell}, memory, x)
        return after, y


class ChronoCell(Cell):
    """A Flax Linen cell with gates whose initial time scales differ; sequences are a loop over steps.

    As in the chrono initialisation (Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188, section 3), biases of
    the gate that keeps the memory are the logarithms of time scales, and those of the gate that writes, if it is
    another, are their negatives. The paper draws the time scales uniformly. Here they are log-uniform from 1 to
    `LONGEST`, so that half of the units begin with less than about 32 steps.
    """

    features: int
    make: Callable[..., nn.RNNCellBase]
    """Class of the cell."""
    keep: str
    """Layer of the cell with the bias of the gate that keeps the memory."""
    write: str | None = None
    """Layer with the bias of the gate that writes to the memory; `None`: the gate that keeps, subtracted from 1."""

    def initial(self) -> PyTree:
        """Return zeros in the shape of the cell's carry."""
        return _blank_carry(self._cell())

    @nn.compact
    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        params = self.param("cell", self._parameters, memory, x)
        after, y = cast(Any, self._cell()).apply({"params": params}, memory, x)
        return after, y

    def _cell(self) -> nn.RNNCellBase:
        return self.make(self.features, recurrent_kernel_init=kernel_init(True, 1.0), parent=None)

    def _parameters(self, key: Key, memory: PyTree, x: Array) -> PyTree:
        """Draw the parameters of the cell."""
        of_cell, of_gates = jax.random.split(key)
        params = cast(Any, self._cell()).init(of_cell, memory, x)["params"]
        bias = slow_gate(of_gates, (self.features,))
        params[self.keep]["bias"] = -bias
        if self.write is not None:
            params[self.write]["bias"] = bias
        return params


# --- cells that are associative scans ---------------------------------------------------------------------------


Number = Array | tuple[Array, Array]
"""Real numbers, or real and imaginary parts of complex ones: arrays are stored, exported and compiled for any device,
so none has a complex type."""


class ScanCell(Cell):
    """A residual block around a recurrence that is linear in its memory; `features` is its width.

    As in S5 and LRU, the recurrence reads normalised inputs, a gated linear unit follows, and the inputs are added:
    `y = x + W_1 g * sigmoid(W_2 g)` with `g = gelu(readout)`. Subclasses define the decay, the increment and the
    readout.
    """

    features: int
    fixed_width: ClassVar[bool] = True

    def setup(self) -> None:
        self.norm = nn.LayerNorm()
        self.value, self.gate = dense(self.features), dense(self.features)
        self.set_up_recurrence()

    def set_up_recurrence(self) -> None:
        """Create the layers and parameters of the recurrence."""
        raise NotImplementedError

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `a` and `b` of `h_t = a_t * h_{t-1} + b_t` for inputs `[..., F]`."""
        raise NotImplementedError

    def readout(self, h: Any, x: Array) -> Array:
        """Return the output `[..., F]` of the recurrence for memory `h` and inputs `x` `[..., F]`."""
        raise NotImplementedError

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        normed = self.norm(x)
        decay, increment = self.coefficients(normed)
        h = plus(times(decay, memory), increment)
        return h, self._output(x, normed, h)

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take all steps with an associative scan."""
        normed = self.norm(xs)
        decay, increment = self.coefficients(normed)
        # A decay of 0 resets the memory, which is finite, so the scan itself needs no episode boundaries.
        decay = tree_where(is_first, jax.tree.map(jnp.zeros_like, decay), decay)
        # The initial memory contributes through the first increment.
        brought = times(jax.tree.map(lambda x: x[0], decay), memory)
        increment = jax.tree.map(lambda x, y: x.at[0].add(y), increment, brought)
        _, h = jax.lax.associative_scan(_compose, (decay, increment))
        return h, self._output(xs, normed, h)

    def _output(self, x: Array, normed: Array, h: Number) -> Array:
        hidden = nn.gelu(self.readout(h, normed))
        return x + self.value(hidden) * nn.sigmoid(self.gate(hidden))


def _compose(one: tuple[Number, Number], two: tuple[Number, Number]) -> tuple[Number, Number]:
    """Compose two steps, `one` first: `a_2 (a_1 h + b_1) + b_2`."""
    (a1, b1), (a2, b2) = one, two
    return times(a2, a1), plus(times(a2, b1), b2)


def times(x: Number, y: Number) -> Number:
    """Multiply two real or two complex numbers."""
    if isinstance(x, tuple):
        (a, b), (c, d) = x, y
        return a * c - b * d, a * d + b * c
    return x * cast(Array, y)


def plus(x: Number, y: Number) -> Number:
    """Add two real or two complex numbers."""
    return jax.tree.map(jnp.add, x, y)


def _per_feature(parameter: Array, x: Array) -> Array:
    """Reshape a parameter `[F]` to the rank of `x` `[..., F]`."""
    return parameter.reshape((1,) * (x.ndim - 1) + parameter.shape)


def _exp(real: Array, imag: Array) -> tuple[Array, Array]:
    """Return the exponential of complex numbers."""
    return jnp.exp(real) * jnp.cos(imag), jnp.exp(real) * jnp.sin(imag)


def _real_product(matrices: Any, h: tuple[Array, Array]) -> Array:
    """Return the real part of a complex matrix, given as two layers, times `h`."""
    return matrices[0](h[0]) - matrices[1](h[1])


def slow_gate(key: Key, shape: Any, dtype: Any = jnp.float32) -> Array:
    """Draw biases of a gate `z` with `1 / z - 1` log-uniform from 1 to `LONGEST`; `1 / z` is a time scale in steps.

    After the chrono initialisation (Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188), whose time scales are
    uniform.
    """
    return -jax.random.uniform(key, shape, dtype, 0.0, np.log(LONGEST))


class MinGRU(ScanCell):
    """A GRU whose gate ignores the memory: `h_t = (1 - z_t) h_{t-1} + z_t W x_t` (Feng et al. 2024, section 3.1).

    https://arxiv.org/abs/2410.01201
    """

    def initial(self) -> PyTree:
        """Return zeros."""
        return np.zeros(self.features, np.float32)

    def set_up_recurrence(self) -> None:
        """Create the gate and the candidate."""
        self.update = nn.Dense(self.features, bias_init=slow_gate)
        self.candidate = dense(self.features)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `1 - z` and `z W x`."""
        gate = self.update(x)
        return nn.sigmoid(-gate), nn.sigmoid(gate) * self.candidate(x)

    def readout(self, h: Any, x: Array) -> Array:
        """Return the memory."""
        return h


class MinLSTM(MinGRU):
    """An LSTM with normalised gates that ignore the memory: `h_t = f' h_{t-1} + i' W x_t` (Feng et al., section 3.2).

    `f' = f / (f + i)` and `i' = i / (f + i)` with `f` and `i` sigmoids of linear functions of `x_t`.
    """

    def set_up_recurrence(self) -> None:
        """Create the gates and the candidate."""
        self.forget_gate, self.input_gate = nn.Dense(self.features), nn.Dense(self.features, bias_init=slow_gate)
        self.candidate = dense(self.features)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `f'` and `i' W x`."""
        # `f / (f + i)` is the sigmoid of `log f - log i`, which avoids 0 / 0 for two tiny gates.
        ratio = nn.log_sigmoid(self.forget_gate(x)) - nn.log_sigmoid(self.input_gate(x))
        return nn.sigmoid(ratio), nn.sigmoid(-ratio) * self.candidate(x)


class LRU(ScanCell):
    """The linear recurrent unit: a complex diagonal recurrence (Orvieto et al. 2023, https://arxiv.org/abs/2303.06349).

    `h_t = lambda * h_{t-1} + gamma * B x_t`, with the readout `Re(C h_t) + D * x_t`. The moduli of `lambda` are drawn
    from 0.9 to 0.999 and its phases from 0 to pi / 10, the paper's values for long sequences.
    """

    moduli: ClassVar[tuple[float, float]] = (0.9, 0.999)
    phase: ClassVar[float] = np.pi / 10

    def initial(self) -> PyTree:
        """Return zeros: real and imaginary parts."""
        return (np.zeros(self.features, np.float32),) * 2

    def set_up_recurrence(self) -> None:
        """Draw the parameters as in section 3.4 of the paper."""
        low, high = self.moduli
        size = (self.features,)
        # `|lambda|^2` is uniform, so that eigenvalues are uniform on the ring.
        ring = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low**2, high**2)
        self.nu = self.param("nu", lambda key, shape: jnp.log(-0.5 * jnp.log(ring(key, shape))), size)
        turn = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, 1e-4, self.phase)
        self.theta = self.param("theta", lambda key, shape: jnp.log(turn(key, shape)), size)
        self.gamma = self.param("gamma", lambda key, shape: 0.5 * jnp.log(1 - jnp.exp(-2 * jnp.exp(self.nu))), size)
        # The variance of complex entries, `1 / features`, is shared by real and imaginary parts.
        halved = nn.initializers.variance_scaling(0.5, "fan_in", "truncated_normal")
        self.into = [nn.Dense(self.features, use_bias=False, kernel_init=halved) for _ in range(2)]
        self.out = [nn.Dense(self.features, use_bias=False) for _ in range(2)]
        self.skip = self.param("skip", nn.initializers.normal(1.0), size, jnp.float32)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `lambda` and `gamma B x`."""
        # `|lambda| = exp(-exp(nu))` is below 1 for all parameters.
        decay = _exp(-jnp.exp(self.nu), jnp.exp(self.theta))
        real, imag = (matrix(x) * _per_feature(jnp.exp(self.gamma), x) for matrix in self.into)
        return jax.tree.map(lambda part: jnp.broadcast_to(_per_feature(part, x), x.shape), decay), (real, imag)

    def readout(self, h: Any, x: Array) -> Array:
        """Return `Re(C h) + D x`."""
        return _real_product(self.out, h) + _per_feature(self.skip, x) * x


class S5(ScanCell):
    """A diagonal state space model, discretised with learnt step sizes (Smith et al. 2023).

    https://arxiv.org/abs/2208.04933, used as in Lu et al. 2023, https://arxiv.org/abs/2303.03982, for reinforcement
    learning. Eigenvalues are initialised to those of HiPPO-N. One of each conjugate pair is kept, so there are half as
    many states as `features`.
    """

    def initial(self) -> PyTree:
        """Return zeros: real and imaginary parts."""
        return (np.zeros(self._states, np.float32),) * 2

    @property
    def _states(self) -> int:
        return max(self.features // 2, 1)

    def set_up_recurrence(self) -> None:
        """Draw the parameters; eigenvalues are those of HiPPO-N."""
        eigenvalues = hippo_eigenvalues(2 * self._states)
        size = (self._states,)
        self.real = self.param("real", lambda key: jnp.asarray(eigenvalues.real, jnp.float32))
        self.imag = self.param("imag", lambda key: jnp.asarray(eigenvalues.imag, jnp.float32))
        # Step sizes are log-uniform, so that the states cover a range of time scales.
        steps = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, np.log(1e-3), np.log(1e-1))
        self.log_step = self.param("log_step", steps, size)
        # The authors' are smaller by a factor of the square root of 2, with which PPO recalls a symbol much later.
        self.into = [nn.Dense(self._states, use_bias=False) for _ in range(2)]
        self.out = [nn.Dense(self.features, use_bias=False) for _ in range(2)]
        self.skip = self.param("skip", nn.initializers.normal(1.0), (self.features,), jnp.float32)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return the decay and the increment under a zero-order hold (equation 6 of the paper)."""
        # A positive real part would make the state diverge; the paper clips it too.
        real, imag, step = jnp.minimum(self.real, -1e-4), self.imag, jnp.exp(self.log_step)
        decay = _exp(real * step, imag * step)
        into = self.into[0](x), self.into[1](x)
        # `(decay - 1) / pole`, where division is multiplication by the conjugate over the squared modulus.
        square = real**2 + imag**2
        scale = times((decay[0] - 1, decay[1]), (real / square, -imag / square))
        spread = lambda part: jnp.broadcast_to(_per_feature(part, into[0]), into[0].shape)
        return jax.tree.map(spread, decay), times(jax.tree.map(spread, scale), into)

    def readout(self, h: Any, x: Array) -> Array:
        """Return `2 Re(C h) + D x`; the factor 2 stands for the conjugate states."""
        return 2 * _real_product(self.out, h) + _per_feature(self.skip, x) * x


def hippo_eigenvalues(size: int) -> np.ndarray:
    """Return the eigenvalues of HiPPO-N of `size` with positive imaginary part.

    HiPPO-N is the normal part of HiPPO-LegS (Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 2.3).
    """
    n = np.arange(size)
    root = np.sqrt(2 * n + 1)
    # LegS plus its rank-one correction is skew-symmetric except for -1/2 on the diagonal.
    skew = np.outer(root, root) * 0.5
    skew = np.triu(skew, 1) - np.tril(skew, -1)
    imag = np.linalg.eigvalsh(-1j * skew)
    return -0.5 + 1j * imag[imag > 0]


class GLA(ScanCell):
    """Gated linear attention: keys write values into a decaying matrix (Yang et al. 2024).

    https://arxiv.org/abs/2312.06635, equation 3: `S_t = a_t S_{t-1} + k_t v_t^T` with the readout `S_t^T q_t`, in
    `HEADS` heads of width `features / HEADS`. As in HGRN2 (Qin et al. 2024, https://arxiv.org/abs/2404.07904) the key
    is `1 - a_t`, so that a matrix stays bounded: it is written to as much as it decays.
    """

    @property
    def _width(self) -> int:
        return self.features // HEADS

    def initial(self) -> PyTree:
        """Return zeros: one matrix per head."""
        if self.features % HEADS:
            raise SettingsError(f"agent.core_features is {self.features}; gla needs a multiple of {HEADS}")
        return np.zeros((HEADS, self._width, self._width), np.float32)

    def set_up_recurrence(self) -> None:
        """Create keys, values and queries."""
        self.key = nn.Dense(self.features, bias_init=slow_gate)
        self.content, self.query = dense(self.features), dense(self.features)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return the decay of each matrix row, and the increments."""
        gate = self._heads(self.key(x))[..., None]
        return nn.sigmoid(-gate), nn.sigmoid(gate) * self._heads(self.content(x))[..., None, :]

    def readout(self, h: Any, x: Array) -> Array:
        """Return the matrices applied to the queries."""
        query = self._heads(self.query(x))
        return jnp.sum(h * query[..., None], axis=-2).reshape(x.shape)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], HEADS, self._width)


# --- attention over the past ------------------------------------------------------------------------------------


class TrXL(Cell):
    """A Transformer-XL block, whose memory is its last `window` inputs (Dai et al. 2019).

    https://arxiv.org/abs/1901.02860, section 3: attention with relative positions, and two dense layers, each added to
    its inputs and then normalised. A step attends to itself and to the previous `window` steps of its episode.
    """

    features: int
    window: int = 32
    fixed_width: ClassVar[bool] = True

    def initial(self) -> PyTree:
        """Return an empty window: `window` rows of zeros, and the number of rows that are valid."""
        if self.features % HEADS:
            core = type(self).__name__.lower()
            raise SettingsError(f"agent.core_features is {self.features}; {core} needs a multiple of {HEADS}")
        return np.zeros((self.window, self.features), np.float32), np.zeros((), np.int32)

    def setup(self) -> None:
        self.norm, self.norm_mlp = nn.LayerNorm(), nn.LayerNorm()
        make = lambda width=self.features: dense(width)
        self.queries, self.keys, self.values, self.out = make(), make(), make(), make()
        self.places = nn.Dense(self.features, use_bias=False)
        width = (HEADS, self.features // HEADS)
        # `u` and `v` of Dai et al.: query-independent attention to content and to distance.
        self.by_content = self.param("by_content", nn.initializers.zeros, width, jnp.float32)
        self.by_distance = self.param("by_distance", nn.initializers.zeros, width, jnp.float32)
        self.wide, self.narrow = make(4 * self.features), make()

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        memories, ys = self.sequence(memory, x[None], jnp.zeros((1, x.shape[0]), bool))
        return jax.tree.map(lambda m: m[0], memories), ys[0]

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take all steps in parallel: each attends to stored inputs and earlier steps."""
        rows, age = memory
        steps, window = xs.shape[0], self.window
        ages = _ages(age, is_first, window)
        # `[B, M + T, F]`: step `t` is at position `t + M`, and its window is the `M` positions before.
        past = jnp.concatenate([rows, jnp.moveaxis(xs, 0, 1)], axis=1)
        x = past[:, window:]
        distance = jnp.arange(steps)[:, None] + window - jnp.arange(window + steps)[None]  # `[T, M + T]`
        seen = (distance >= 0)[None] & (distance[None] <= ages.T[:, :, None])  # `[B, T, M + T]`
        y = self._block(x, past, seen)
        # The memory after step `t` is positions `t + 1` to `t + M`; `[T, B, M, F]`. A single step, as in an exported
        # policy, needs no gather.
        places = jnp.arange(1, steps + 1)[:, None] + jnp.arange(window)[None]
        kept = past[None, :, 1:] if steps == 1 else jnp.moveaxis(past[:, places], 0, 1)
        memories = kept, jnp.minimum(ages + 1, window)
        return memories, jnp.moveaxis(y, 0, 1)

    def _block(self, x: Array, past: Array, seen: Array) -> Array:
        """Return the outputs `[B, T, F]` of steps `x`, which attend to `past` `[B, P, F]` where `seen` `[B, T, P]`."""
        hidden = self.norm(x + self._attend(x, past, seen))
        return self.norm_mlp(hidden + self._transform(hidden))

    def _transform(self, x: Array) -> Array:
        return self.narrow(nn.relu(self.wide(x)))

    def _attend(self, x: Array, past: Array, seen: Array) -> Array:
        """Return the attention of steps `x` `[B, T, F]` to `past` `[B, P, F]` where `seen` `[B, T, P]`."""
        heads = lambda z: z.reshape(*z.shape[:-1], HEADS, -1)
        query, key, value = heads(self.queries(x)), heads(self.keys(past)), heads(self.values(past))
        by_content = jnp.einsum("bthd,bphd->bhtp", query + self.by_content[None, None], key)
        # Distances from `M` to 0, in the order of positions in a window.
        place = heads(self.places(_sinusoids(self.window + 1, self.features)[::-1]))
        by_distance = jnp.einsum("bthd,mhd->bhtm", query + self.by_distance[None, None], place)
        score = by_content + _shift_rows(by_distance)
        score = jnp.where(seen[:, None], score / math.sqrt(value.shape[-1]), -1e30)
        read = jnp.einsum("bhtp,bphd->bthd", jax.nn.softmax(score), value)
        return self.out(read.reshape(x.shape))


class GTrXL(TrXL):
    """A gated Transformer-XL block (Parisotto et al. 2020).

    https://arxiv.org/abs/1910.06764, section 3: inputs of both parts are normalised instead of sums, and a GRU-like
    gate takes the place of each sum.
    """

    def setup(self) -> None:
        super().setup()
        self.attended, self.transformed = GRUGate(self.features), GRUGate(self.features)

    def _block(self, x: Array, past: Array, seen: Array) -> Array:
        hidden = self.attended(x, nn.relu(self._attend(self.norm(x), self.norm(past), seen)))
        return self.transformed(hidden, nn.relu(self._transform(self.norm_mlp(hidden))))


class GRUGate(nn.Module):
    """A GRU gate between the residual stream `x` and a branch `y`; initially close to `x` (GTrXL, section 3.2)."""

    features: int

    @nn.compact
    def __call__(self, x: Array, y: Array) -> Array:
        """Return `(1 - z) x + z h`, `[..., F]`, for `x` and `y` `[..., F]`."""
        linear = lambda name: nn.Dense(self.features, use_bias=False, name=name)
        reset = nn.sigmoid(linear("reset_y")(y) + linear("reset_x")(x))
        bias = self.param("bias", nn.initializers.constant(2.0), (self.features,), jnp.float32)
        update = nn.sigmoid(linear("update_y")(y) + linear("update_x")(x) - _per_feature(bias, x))
        new = jnp.tanh(linear("new_y")(y) + linear("new_x")(reset * x))
        return (1 - update) * x + update * new


def _ages(age: Array, is_first: Array, window: int) -> Array:
    """Return the number of earlier steps of the same episode, at most `window`, for each step; `[T, B]`."""
    step = jnp.arange(is_first.shape[0], dtype=jnp.int32)[:, None]
    # An episode that is already in progress started `age` steps before the first step.
    begun = jnp.where(is_first, step, -age[None])
    return jnp.minimum(step - (begun if len(begun) == 1 else jax.lax.cummax(begun, axis=0)), window)


def _shift_rows(x: Array) -> Array:
    """Shift row `t` of `[..., T, M + 1]` right by `t` positions; `[..., T, M + T]`, zeros elsewhere.

    After padding by `T` and reshaping to rows that are shorter by one, each row starts one position later than the
    previous one (Dai et al. 2019, appendix B).
    """
    *batch, steps, width = x.shape
    padded = jnp.concatenate([x, jnp.zeros((*batch, steps, steps), x.dtype)], axis=-1)
    return padded.reshape(*batch, -1)[..., : steps * (width + steps - 1)].reshape(*batch, steps, width + steps - 1)


def _sinusoids(length: int, features: int) -> Array:
    """Return the sinusoidal encoding of distances, `[length, features]` (Vaswani et al. 2017, section 3.5)."""
    angle = np.arange(length)[:, None] / 10_000 ** (np.arange(0, features, 2) / features)
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :features], jnp.float32)


# --- cores by name ------------------------------------------------------------------------------------------------

CORES: dict[str, Callable[[int], Cell]] = {
    "gru": lambda features: ChronoCell(features, nn.GRUCell, keep="iz"),
    "lstm": lambda features: ChronoCell(features, nn.OptimizedLSTMCell, keep="hf", write="hi"),
    "lru": LRU,
    "s5": S5,
    "mingru": MinGRU,
    "minlstm": MinLSTM,
    "gla": GLA,
    "trxl": TrXL,
    "gtrxl": GTrXL,
}


WINDOWED = (TrXL, GTrXL)
"""Those that attend to a number of earlier steps, `window`."""


def register_core(name: str, make: Callable[[int], Cell]) -> None:
    """Register a custom cell for `--agent.core name` and `jaxrl.ppo(core=name)`, and all other agents with a core.

    Args:
      name: name of the core.
      make: function from the width of the outputs to the cell; for existing cells use `jaxrl.nn.FlaxCell` (Linen) or
        `jaxrl.nn.NNXCell` (`flax.nnx`).

    Raises:
      SettingsError: the name is taken.
    """
    if name in CORES or name == "none":
        raise SettingsError(f"there is a core {name!r} already; choose another name")
    CORES[name] = make


def make_cell(core: str, features: int, window: int) -> Cell:
    """Create a cell.

    Raises:
      SettingsError: the name is unknown (with the nearest), or the cell does not support the width.
    """
    if core not in CORES:
        raise SettingsError(f"unknown core {core!r}; {suggest(core, ('none', *CORES))}")
    make = CORES[core]
    return make(features, window) if make in WINDOWED else make(features)


def initial_memory(core: str, features: int, layers: int = 1, window: int = 32) -> PyTree:
    """Return the initial memory of a `Core` for one environment; `None` for the core `none`."""
    return None if core == "none" else (make_cell(core, features, window).initial(),) * layers


class Core(nn.Module):
    """A stack of cells, each with its own memory; it has the two functions of a cell."""

    core: str
    features: int
    layers: int = 1
    window: int = 32

    def setup(self) -> None:
        self.cells = [make_cell(self.core, self.features, self.window) for _ in range(self.layers)]
        if self.cells[0].fixed_width:
            self.embed = dense(self.features)

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step with the inputs `[B, F]`; return the next memory and the outputs `[B, features]`."""
        after, x = [], self._embed(x)
        for cell, own in zip(self.cells, memory, strict=True):
            own, x = cell(own, x)
            after.append(own)
        return tuple(after), x

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take the steps `xs` `[T, B, F]`; return memories and outputs after each, see `Cell.sequence`."""
        after, xs = [], self._embed(xs)
        for cell, own in zip(self.cells, memory, strict=True):
            own, xs = cell.sequence(own, xs, is_first)
            after.append(own)
        return tuple(after), xs

    def _embed(self, x: Array) -> Array:
        return self.embed(x) if self.cells[0].fixed_width else x
