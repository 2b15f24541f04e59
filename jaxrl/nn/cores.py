"""Recurrent cores: what an agent remembers from step to step, and how a whole sequence is worked through at once.

A core is a stack of cells. A cell has a memory, and two functions that give the same numbers: one step,
`cell(memory, x) -> (memory, y)`, and a sequence, `cell.sequence(memory, xs, is_first) -> (memories, ys)`. Every memory
begins with zeros, and is zero again where an episode begins.

Cells of two kinds differ in what a sequence costs. The GRU and the LSTM depend on their last memory through matrices,
so that a sequence is a loop of as many steps. The others are linear in their memory, `h_t = a_t * h_{t-1} + b_t` with
`a_t` and `b_t` of the inputs alone. Two such steps are one of the same form, so that a sequence of `T` steps is an
associative scan of about `log2(T)` (Blelloch 1990; Martin and Cundy 2018, https://arxiv.org/abs/1709.04057). GTrXL
remembers the inputs themselves and attends to them, all steps at once.
"""

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
"""Steps of the longest time scale of a new cell whose decay depends on the input."""
HEADS = 4
"""Heads of cells with several: `gla` and `gtrxl`."""


def forget(memory: PyTree, is_first: Array) -> PyTree:
    """Return `memory` `[B, ...]` with zeros where `is_first` `[B]`."""
    return tree_where(is_first, jax.tree.map(jnp.zeros_like, memory), memory)


def memories_before(memory: PyTree, memories: PyTree, is_first: Array) -> PyTree:
    """Return the memories with which steps `[T, B]` were taken.

    Args:
      memory: that before the first step, `[B, ...]`.
      memories: those after each step, `[T, B, ...]`.
      is_first: `[T, B]`; where it is true an episode begins, with zeros.
    """
    shifted = jax.tree.map(lambda first, after: jnp.concatenate([first[None], after[:-1]]), memory, memories)
    return forget(shifted, is_first)


class Cell(nn.Module):
    """A recurrent cell; a cell of one's own derives from it, and is made known by `register_core`.

    It defines `initial` and `__call__`, and where a sequence can be had for less than its steps one by one, `sequence`.
    """

    fixed_width: ClassVar[bool] = False
    """Whether its inputs must have the width of its outputs, as where it adds to them."""

    def initial(self) -> PyTree:
        """Return the memory at the beginning of an episode, of one environment: zeros."""
        raise NotImplementedError

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step with the inputs `[B, F]`; return the next memory `[B, ...]` and the outputs `[B, features]`."""
        raise NotImplementedError

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take the steps `xs` `[T, B, F]` from `memory` `[B, ...]`; return the memory and outputs after each step.

        Where `is_first` `[T, B]` an episode begins, and the step sees nothing of what was before.
        """
        cell, variables = self.unbind()

        def step(memory: PyTree, row: tuple[Array, Array]) -> tuple[PyTree, tuple[PyTree, Array]]:
            x, is_first = row
            made: tuple[PyTree, Array] = cast(Any, cell.apply)(variables, forget(memory, is_first), x)
            return made[0], made

        return jax.lax.scan(step, memory, (xs, is_first))[1]


class FlaxCell(Cell):
    """A cell of Flax, which is worked through step by step."""

    cell: nn.RNNCellBase

    def initial(self) -> PyTree:
        """Return zeros in the shape of the cell's carry."""
        like = jax.eval_shape(lambda: self.cell.initialize_carry(jax.random.key(0), (1,)))
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        after, y = self.cell(memory, x)
        return after, y


class NNXCell(Cell):
    """A cell of `flax.nnx`, which is worked through step by step; its inputs are first brought to `features`."""

    features: int
    make: Callable[[Any], Any]
    """Function from `nnx.Rngs` to the cell, of `features` inputs and outputs."""
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


# --- cells that are associative scans ---------------------------------------------------------------------------


Number = Array | tuple[Array, Array]
"""Real numbers, or the real and the imaginary parts of complex ones: what is stored, exported and compiled for any
device has no complex type."""


class ScanCell(Cell):
    """A residual block around a recurrence that is linear in its memory; `features` is its width.

    As in S5 and LRU, the recurrence reads normalised inputs, a gated linear unit follows, and the inputs are added:
    `y = x + W_1 g * sigmoid(W_2 g)` with `g = gelu(readout)`. A subclass says what decays, what comes in, and what is
    read.
    """

    features: int
    fixed_width: ClassVar[bool] = True

    def setup(self) -> None:
        self.norm = nn.LayerNorm()
        self.value, self.gate = dense(self.features), dense(self.features)
        self.set_up_recurrence()

    def set_up_recurrence(self) -> None:
        """Make the layers and parameters of the recurrence."""
        raise NotImplementedError

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `a` and `b` of `h_t = a_t * h_{t-1} + b_t` for inputs `[..., F]`."""
        raise NotImplementedError

    def readout(self, h: Any, x: Array) -> Array:
        """Return what is read of `h` and the inputs `[..., F]`, `[..., F]`."""
        raise NotImplementedError

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        normed = self.norm(x)
        decay, increment = self.coefficients(normed)
        h = plus(times(decay, memory), increment)
        return h, self._output(x, normed, h)

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take all steps by an associative scan."""
        normed = self.norm(xs)
        decay, increment = self.coefficients(normed)
        # A decay of 0 forgets, since all that comes here is finite. The scan itself then knows nothing of episodes.
        decay = tree_where(is_first, jax.tree.map(jnp.zeros_like, decay), decay)
        # The memory from before enters with the first step.
        brought = times(jax.tree.map(lambda x: x[0], decay), memory)
        increment = jax.tree.map(lambda x, y: x.at[0].add(y), increment, brought)
        _, h = jax.lax.associative_scan(_compose, (decay, increment))
        return h, self._output(xs, normed, h)

    def _output(self, x: Array, normed: Array, h: Number) -> Array:
        hidden = nn.gelu(self.readout(h, normed))
        return x + self.value(hidden) * nn.sigmoid(self.gate(hidden))


def _compose(one: tuple[Number, Number], two: tuple[Number, Number]) -> tuple[Number, Number]:
    """Return the step that takes `one` and then `two`: `a_2 (a_1 h + b_1) + b_2`."""
    (a1, b1), (a2, b2) = one, two
    return times(a2, a1), plus(times(a2, b1), b2)


def times(x: Number, y: Number) -> Number:
    """Return the product of two real or two complex numbers."""
    if isinstance(x, tuple):
        (a, b), (c, d) = x, y
        return a * c - b * d, a * d + b * c
    return x * cast(Array, y)


def plus(x: Number, y: Number) -> Number:
    """Return the sum of two real or two complex numbers."""
    total: Number = jax.tree.map(jnp.add, x, y)
    return total


def _per_feature(parameter: Array, x: Array) -> Array:
    """Return a parameter `[F]` in as many axes as `x` `[..., F]` has."""
    return parameter.reshape((1,) * (x.ndim - 1) + parameter.shape)


def _exp(real: Array, imag: Array) -> tuple[Array, Array]:
    """Return the exponential of complex numbers."""
    return jnp.exp(real) * jnp.cos(imag), jnp.exp(real) * jnp.sin(imag)


def _real_product(matrices: Any, h: tuple[Array, Array]) -> Array:
    """Return the real part of complex matrices, given as two layers, times `h`."""
    product: Array = matrices[0](h[0]) - matrices[1](h[1])
    return product


def slow_gate(key: Key, shape: Any, dtype: Any = jnp.float32) -> Array:
    """Draw biases of a gate `z` with `1 / z` from 1 to `LONGEST` steps, uniform in its logarithm.

    After the chrono initialisation (Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188), which has time scales
    that are uniform themselves.
    """
    return -jax.random.uniform(key, shape, dtype, 0.0, np.log(LONGEST))


class MinGRU(ScanCell):
    """A GRU whose gate does not see its memory: `h_t = (1 - z_t) h_{t-1} + z_t W x_t` (Feng et al. 2024, section 3.1).

    https://arxiv.org/abs/2410.01201
    """

    def initial(self) -> PyTree:
        """Return zeros."""
        return np.zeros(self.features, np.float32)

    def set_up_recurrence(self) -> None:
        """Make the gate and the candidate."""
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
    """An LSTM whose gates do not see its memory, normalised: `h_t = f' h_{t-1} + i' W x_t` (Feng et al., section 3.2).

    `f' = f / (f + i)` and `i' = i / (f + i)` with `f` and `i` sigmoids of linear functions of `x_t`.
    """

    def set_up_recurrence(self) -> None:
        """Make the gates and the candidate."""
        self.forget_gate, self.input_gate = nn.Dense(self.features), nn.Dense(self.features, bias_init=slow_gate)
        self.candidate = dense(self.features)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `f'` and `i' W x`."""
        # `f / (f + i)` is the sigmoid of `log f - log i`, which no pair of tiny gates divides by zero.
        ratio = nn.log_sigmoid(self.forget_gate(x)) - nn.log_sigmoid(self.input_gate(x))
        return nn.sigmoid(ratio), nn.sigmoid(-ratio) * self.candidate(x)


class LRU(ScanCell):
    """The linear recurrent unit: a complex diagonal recurrence (Orvieto et al. 2023, https://arxiv.org/abs/2303.06349).

    `h_t = lambda * h_{t-1} + gamma * B x_t`, and `Re(C h_t) + D * x_t` is read. The moduli of `lambda` are drawn from
    0.9 to 0.999 and its phases from 0 to pi / 10, as the paper has it for long sequences.
    """

    moduli: ClassVar[tuple[float, float]] = (0.9, 0.999)
    phase: ClassVar[float] = np.pi / 10

    def initial(self) -> PyTree:
        """Return zeros: real and imaginary parts."""
        return (np.zeros(self.features, np.float32),) * 2

    def set_up_recurrence(self) -> None:
        """Draw the parameters as section 3.4 of the paper does."""
        low, high = self.moduli
        size = (self.features,)
        # `|lambda|^2` is uniform between the squares, so that the ring is filled evenly.
        ring = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low**2, high**2)
        self.nu = self.param("nu", lambda key, shape: jnp.log(-0.5 * jnp.log(ring(key, shape))), size)
        turn = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, 1e-4, self.phase)
        self.theta = self.param("theta", lambda key, shape: jnp.log(turn(key, shape)), size)
        self.gamma = self.param("gamma", lambda key, shape: 0.5 * jnp.log(1 - jnp.exp(-2 * jnp.exp(self.nu))), size)
        self.into = [nn.Dense(self.features, use_bias=False) for _ in range(2)]
        self.out = [nn.Dense(self.features, use_bias=False) for _ in range(2)]
        self.skip = self.param("skip", nn.initializers.normal(1.0), size)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return `lambda` and `gamma B x`."""
        # Exponentials of exponentials keep the modulus below 1 whatever is learnt: `|lambda| = exp(-exp(nu))`.
        decay = _exp(-jnp.exp(self.nu), jnp.exp(self.theta))
        real, imag = (matrix(x) * _per_feature(jnp.exp(self.gamma), x) for matrix in self.into)
        return jax.tree.map(lambda part: jnp.broadcast_to(_per_feature(part, x), x.shape), decay), (real, imag)

    def readout(self, h: Any, x: Array) -> Array:
        """Return `Re(C h) + D x`."""
        return _real_product(self.out, h) + _per_feature(self.skip, x) * x


class S5(ScanCell):
    """A diagonal state space model, discretised with learnt step sizes (Smith et al. 2023).

    https://arxiv.org/abs/2208.04933, as Lu et al. 2023, https://arxiv.org/abs/2303.03982, use it for reinforcement
    learning. Its eigenvalues begin as those of HiPPO-N; of each conjugate pair one is kept, so that it has half as many
    states as `features`.
    """

    def initial(self) -> PyTree:
        """Return zeros: real and imaginary parts."""
        return (np.zeros(self._states, np.float32),) * 2

    @property
    def _states(self) -> int:
        return max(self.features // 2, 1)

    def set_up_recurrence(self) -> None:
        """Draw the parameters; the eigenvalues are those of HiPPO-N."""
        eigenvalues = hippo_eigenvalues(2 * self._states)
        size = (self._states,)
        self.real = self.param("real", lambda key: jnp.asarray(eigenvalues.real, jnp.float32))
        self.imag = self.param("imag", lambda key: jnp.asarray(eigenvalues.imag, jnp.float32))
        # Step sizes are log-uniform, so that states have time scales of their own.
        steps = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, np.log(1e-3), np.log(1e-1))
        self.log_step = self.param("log_step", steps, size)
        self.into = [nn.Dense(self._states, use_bias=False) for _ in range(2)]
        self.out = [nn.Dense(self.features, use_bias=False) for _ in range(2)]
        self.skip = self.param("skip", nn.initializers.normal(1.0), (self.features,))

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return the decay and the increment under a zero-order hold (equation 6 of the paper)."""
        # A positive real part would grow without bound; the paper clips it likewise.
        real, imag, step = jnp.minimum(self.real, -1e-4), self.imag, jnp.exp(self.log_step)
        decay = _exp(real * step, imag * step)
        into = self.into[0](x), self.into[1](x)
        # `(decay - 1) / pole`, the division as a product with the conjugate.
        square = real**2 + imag**2
        scale = times((decay[0] - 1, decay[1]), (real / square, -imag / square))
        spread = lambda part: jnp.broadcast_to(_per_feature(part, into[0]), into[0].shape)
        return jax.tree.map(spread, decay), times(jax.tree.map(spread, scale), into)

    def readout(self, h: Any, x: Array) -> Array:
        """Return `2 Re(C h) + D x`: the state and its conjugate."""
        return 2 * _real_product(self.out, h) + _per_feature(self.skip, x) * x


def hippo_eigenvalues(size: int) -> np.ndarray:
    """Return those eigenvalues of HiPPO-N of `size` whose imaginary part is positive.

    HiPPO-N is the normal part of HiPPO-LegS (Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 2.3).
    """
    n = np.arange(size)
    root = np.sqrt(2 * n + 1)
    # LegS plus its correction of rank one is skew-symmetric but for -1/2 on the diagonal.
    skew = np.outer(root, root) * 0.5
    skew = np.triu(skew, 1) - np.tril(skew, -1)
    imag = np.linalg.eigvalsh(-1j * skew)
    return -0.5 + 1j * imag[imag > 0]


class GLA(ScanCell):
    """Gated linear attention: keys write values into a matrix that decays (Yang et al. 2024).

    https://arxiv.org/abs/2312.06635, equation 3: `S_t = a_t S_{t-1} + k_t v_t^T`, and `S_t^T q_t` is read, in `HEADS`
    heads of width `features / HEADS`. As in HGRN2 (Qin et al. 2024, https://arxiv.org/abs/2404.07904) the key is
    `1 - a_t`: what is written is as much as what is forgotten, so that a matrix stays bounded.
    """

    @property
    def _width(self) -> int:
        return self.features // HEADS

    def initial(self) -> PyTree:
        """Return zeros: a matrix for each head."""
        if self.features % HEADS:
            raise SettingsError(f"agent.core_features is {self.features}; gla needs a multiple of {HEADS}")
        return np.zeros((HEADS, self._width, self._width), np.float32)

    def set_up_recurrence(self) -> None:
        """Make keys, values and queries."""
        self.key = nn.Dense(self.features, bias_init=slow_gate)
        self.content, self.query = dense(self.features), dense(self.features)

    def coefficients(self, x: Array) -> tuple[Number, Number]:
        """Return the decay of each row of the matrices, and what is written into them."""
        gate = self._heads(self.key(x))[..., None]
        return nn.sigmoid(-gate), nn.sigmoid(gate) * self._heads(self.content(x))[..., None, :]

    def readout(self, h: Any, x: Array) -> Array:
        """Return what the queries read of the matrices."""
        query = self._heads(self.query(x))
        return jnp.sum(h * query[..., None], axis=-2).reshape(x.shape)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], HEADS, self._width)


# --- attention over the past ------------------------------------------------------------------------------------


class GTrXL(Cell):
    """A gated block of Transformer-XL, which remembers its last `window` inputs (Parisotto et al. 2020).

    https://arxiv.org/abs/1910.06764, section 3: normalised inputs, attention with relative positions (Dai et al. 2019,
    https://arxiv.org/abs/1901.02860, section 3.3), and a gate like a GRU's in place of each sum. A step sees itself and
    at most `window` steps of its episode before it.
    """

    features: int
    window: int = 32
    fixed_width: ClassVar[bool] = True

    def initial(self) -> PyTree:
        """Return no steps: `window` rows of zeros, and how many of them are steps of the episode."""
        if self.features % HEADS:
            raise SettingsError(f"agent.core_features is {self.features}; gtrxl needs a multiple of {HEADS}")
        return np.zeros((self.window, self.features), np.float32), np.zeros((), np.int32)

    def setup(self) -> None:
        self.norm, self.norm_mlp = nn.LayerNorm(), nn.LayerNorm()
        make = lambda width=self.features: dense(width)
        self.queries, self.keys, self.values, self.out = make(), make(), make(), make()
        self.places = nn.Dense(self.features, use_bias=False)
        width = (HEADS, self.features // HEADS)
        # `u` and `v` of Dai et al.: what every query looks for, by content and by distance.
        self.by_content = self.param("by_content", nn.initializers.zeros, width)
        self.by_distance = self.param("by_distance", nn.initializers.zeros, width)
        self.attended, self.transformed = GRUGate(self.features), GRUGate(self.features)
        self.wide, self.narrow = make(4 * self.features), make()

    def __call__(self, memory: PyTree, x: Array) -> tuple[PyTree, Array]:
        """Take a step."""
        memories, ys = self.sequence(memory, x[None], jnp.zeros((1, x.shape[0]), bool))
        return jax.tree.map(lambda m: m[0], memories), ys[0]

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take all steps at once: each attends to the remembered inputs and to those before it."""
        rows, age = memory
        steps, window = xs.shape[0], self.window
        ages = _ages(age, is_first, window)
        # `[B, M + T, F]`: step `t` is at place `t + M`, and its window are the M places before it.
        past = jnp.concatenate([rows, jnp.moveaxis(xs, 0, 1)], axis=1)
        x = past[:, window:]
        distance = jnp.arange(steps)[:, None] + window - jnp.arange(window + steps)[None]  # `[T, M + T]`
        seen = (distance >= 0)[None] & (distance[None] <= ages.T[:, :, None])  # `[B, T, M + T]`
        attention = self._attend(self.norm(x), self.norm(past), seen)
        hidden = self.attended(x, nn.relu(attention))
        mlp = self.narrow(nn.relu(self.wide(self.norm_mlp(hidden))))
        y = self.transformed(hidden, nn.relu(mlp))
        # What is remembered after step `t` are places `t + 1` to `t + M`; `[T, B, M, F]`. Of one step, as an exported
        # policy takes it, that needs no gather.
        places = jnp.arange(1, steps + 1)[:, None] + jnp.arange(window)[None]
        kept = past[None, :, 1:] if steps == 1 else jnp.moveaxis(past[:, places], 0, 1)
        memories = kept, jnp.minimum(ages + 1, window)
        return memories, jnp.moveaxis(y, 0, 1)

    def _attend(self, x: Array, past: Array, seen: Array) -> Array:
        """Return what steps `x` `[B, T, F]` read of `past` `[B, P, F]` where `seen` `[B, T, P]`."""
        heads = lambda z: z.reshape(*z.shape[:-1], HEADS, -1)
        query, key, value = heads(self.queries(x)), heads(self.keys(past)), heads(self.values(past))
        by_content = jnp.einsum("bthd,bphd->bhtp", query + self.by_content[None, None], key)
        # Distances from M to 0, in the order of the places of a step's window.
        place = heads(self.places(_sinusoids(self.window + 1, self.features)[::-1]))
        by_distance = jnp.einsum("bthd,mhd->bhtm", query + self.by_distance[None, None], place)
        score = by_content + _shift_rows(by_distance)
        score = jnp.where(seen[:, None], score / np.sqrt(value.shape[-1]), -1e30)
        read = jnp.einsum("bhtp,bphd->bthd", jax.nn.softmax(score), value)
        return self.out(read.reshape(x.shape))


class GRUGate(nn.Module):
    """The gate of a GRU between what was, `x`, and what is new, `y`; it begins near `x` (GTrXL, section 3.2)."""

    features: int

    @nn.compact
    def __call__(self, x: Array, y: Array) -> Array:
        """Return `(1 - z) x + z h`, `[..., F]` as `x` and `y` are."""
        linear = lambda name: nn.Dense(self.features, use_bias=False, name=name)
        reset = nn.sigmoid(linear("reset_y")(y) + linear("reset_x")(x))
        bias = self.param("bias", nn.initializers.constant(2.0), (self.features,))
        update = nn.sigmoid(linear("update_y")(y) + linear("update_x")(x) - _per_feature(bias, x))
        new = jnp.tanh(linear("new_y")(y) + linear("new_x")(reset * x))
        return (1 - update) * x + update * new


def _ages(age: Array, is_first: Array, window: int) -> Array:
    """Return how many steps of its episode are before each step, `window` at most, `[T, B]`."""
    step = jnp.arange(is_first.shape[0], dtype=jnp.int32)[:, None]
    # An episode that was there before began `age` steps before the first step.
    begun = jnp.where(is_first, step, -age[None])
    return jnp.minimum(step - (begun if len(begun) == 1 else jax.lax.cummax(begun, axis=0)), window)


def _shift_rows(x: Array) -> Array:
    """Move row `t` of `[..., T, M + 1]` to the right by `t` places; `[..., T, M + T]`, zeros elsewhere.

    Padded by `T` and read in rows that are shorter by one, each row begins one place later than the one before (Dai et
    al. 2019, appendix B).
    """
    *batch, steps, width = x.shape
    padded = jnp.concatenate([x, jnp.zeros((*batch, steps, steps), x.dtype)], axis=-1)
    return padded.reshape(*batch, -1)[..., : steps * (width + steps - 1)].reshape(*batch, steps, width + steps - 1)


def _sinusoids(length: int, features: int) -> Array:
    """Return the encoding of distances `[length, features]` (Vaswani et al. 2017, section 3.5)."""
    angle = np.arange(length)[:, None] / 10_000 ** (np.arange(0, features, 2) / features)
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :features], jnp.float32)


# --- cores by name ------------------------------------------------------------------------------------------------

CORES: dict[str, Callable[[int], Cell]] = {
    "gru": lambda features: FlaxCell(nn.GRUCell(features, recurrent_kernel_init=kernel_init(True, 1.0))),
    "lstm": lambda features: FlaxCell(nn.OptimizedLSTMCell(features, recurrent_kernel_init=kernel_init(True, 1.0))),
    "lru": LRU,
    "s5": S5,
    "mingru": MinGRU,
    "minlstm": MinLSTM,
    "gla": GLA,
    "gtrxl": GTrXL,
}


def register_core(name: str, make: Callable[[int], Cell]) -> None:
    """Make a cell of one's own known: `--agent.core name`, or `jaxrl.ppo(core=name)`, of any agent with a core.

    Args:
      name: what it is called.
      make: a function from the width of its outputs to the cell; `jaxrl.nn.FlaxCell` makes one of any cell of Flax, and
        `jaxrl.nn.NNXCell` of any of `flax.nnx`.

    Raises:
      SettingsError: a core of this name is there already.
    """
    if name in CORES or name == "none":
        raise SettingsError(f"there is a core {name!r} already; choose another name")
    CORES[name] = make


def make_cell(core: str, features: int, window: int) -> Cell:
    """Return a new cell.

    Raises:
      SettingsError: there is none of this name, with the nearest; or its width does not suit it.
    """
    if core not in CORES:
        raise SettingsError(f"unknown core {core!r}; {suggest(core, ('none', *CORES))}")
    return GTrXL(features, window) if core == "gtrxl" else CORES[core](features)


def initial_memory(core: str, features: int, layers: int = 1, window: int = 32) -> PyTree:
    """Return the memory of a `Core` at the beginning of an episode, of one environment; `None` for the core `none`."""
    return None if core == "none" else (make_cell(core, features, window).initial(),) * layers


class Core(nn.Module):
    """A stack of cells; each has a memory of its own. It has the two functions of a cell."""

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
        after, x = [], self._embedded(x)
        for cell, own in zip(self.cells, memory, strict=True):
            own, x = cell(own, x)
            after.append(own)
        return tuple(after), x

    def sequence(self, memory: PyTree, xs: Array, is_first: Array) -> tuple[PyTree, Array]:
        """Take the steps `xs` `[T, B, F]`; return memories and outputs after each, see `Cell.sequence`."""
        after, xs = [], self._embedded(xs)
        for cell, own in zip(self.cells, memory, strict=True):
            own, xs = cell.sequence(own, xs, is_first)
            after.append(own)
        return tuple(after), xs

    def _embedded(self, x: Array) -> Array:
        return self.embed(x) if self.cells[0].fixed_width else x
