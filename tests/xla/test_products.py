"""Products of matrices and their gradients, in every form that shapes choose between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.agents.optimizers import accumulate
from jaxrl.xla import forms, reverse_mode
from jaxrl.xla.products import (
    CUTS,
    LONG,
    NARROW,
    PIECE,
    SMALL,
    THIN,
    TINY,
    convolve,
    multiply,
    num_pieces,
)

SHAPES = {
    "tiny": ((2, 3), 4),
    "tiny, with several leading axes": ((2, 3, 5), 4),
    "the last tiny one": ((2, TINY // 8), 4),
    "the first that is not": ((2, TINY // 8), 5),
    "few outputs": ((128, 64), 3),
    "one output": ((128, 64), 1),
    "one output, many rows": ((4, LONG // 4, 40), 1),
    "few outputs, with several leading axes": ((8, 16, 40), THIN),
    "few inputs": ((128, 4), 64),
    "square": ((32, 64), 64),
    "large": ((16, SMALL // 64), 65),
    "many rows": ((SMALL + 1, 3), 33),
    "in pieces": ((LONG, 64), 64),
    "in pieces, with several leading axes": ((LONG // 8, 24, 40), 33),
    "not in pieces": ((LONG + 1, 64), 64),
    "one row": ((1, 64), 64),
    "no row": ((0, 5), 3),
    "no row, with several leading axes": ((2, 0, 40), 40),
}


@pytest.fixture(autouse=True)
def in_a_loss():
    """Trace all as a loss is traced, which is only differentiated in reverse."""
    with reverse_mode():
        yield


def drawn(shape, outputs):
    normal = np.random.default_rng(0).standard_normal
    return [normal(sizes, np.float32) for sizes in (shape, (shape[-1], outputs), (*shape[:-1], outputs))]


def by_hand(x, kernel, slope):
    """The product, and how `sum(slope * product)` changes with either factor, in twice the precision."""
    x, kernel, slope = (np.asarray(array, np.float64) for array in (x, kernel, slope))
    by_kernel = np.einsum("bi,bo->io", x.reshape(-1, x.shape[-1]), slope.reshape(-1, slope.shape[-1]))
    return x @ kernel, slope @ kernel.T, by_kernel


@pytest.mark.every_day(
    "tiny, with several leading axes",
    "the last tiny one",
    "the first that is not",
    "one output, many rows",
    "few outputs, with several leading axes",
    "few inputs",
    "large",
    "in pieces, with several leading axes",
    "not in pieces",
    "no row, with several leading axes",
)
@pytest.mark.parametrize(("shape", "outputs"), SHAPES.values(), ids=SHAPES)
def test_a_product_and_its_gradients(shape, outputs):
    x, kernel, slope = drawn(shape, outputs)

    def ours(x, kernel, slope):
        y, back = jax.vjp(multiply, x, kernel)
        return y, *back(slope)

    @jax.jit
    def in_both_forms(*args):
        here = ours(*args)
        with forms("tpu"):
            return *here, *ours(*args)

    for found, expected in zip(in_both_forms(x, kernel, slope), by_hand(x, kernel, slope) * 2, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(initial=1.0))


@pytest.mark.every_day("tiny-both", "few outputs-batches", "few inputs-networks", "large-both", "in pieces-networks")
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["networks", "batches", "both"])
@pytest.mark.parametrize("name", ["tiny", "few outputs", "few inputs", "large", "in pieces"])
def test_products_of_several_networks_or_batches_are_those_of_each(name, axes):
    x, kernel, slope = drawn(*SHAPES[name])
    several = [np.stack([part, 2 * part, -part]) for part in (kernel, x)]
    given = [many if axis == 0 else one for many, one, axis in zip(several, (kernel, x), axes, strict=True)]
    gradient = jax.grad(lambda kernel, x: (multiply(x, kernel) * slope).sum(), argnums=(0, 1))

    @jax.jit
    def both(given):
        alone = lambda i: [part[i] if axis == 0 else part for part, axis in zip(given, axes, strict=True)]
        return jax.vmap(gradient, in_axes=axes)(*given), [gradient(*alone(i)) for i in range(3)]

    together, each = both(given)
    for i, one in enumerate(each):
        for found, expected in zip(together, one, strict=True):
            np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "few outputs", "few inputs", "large", "in pieces"])
def test_gradients_have_gradients(name):
    """Of `sum(y^2)`, `y = x k`, half the gradient by `k` is `x' x k`, and that of its square `2 x' x (x' x k)`."""
    x, kernel, _ = drawn(*SHAPES[name])
    x = x / np.float32(np.sqrt(x.shape[0]))
    slope = lambda kernel: jax.grad(lambda kernel: (multiply(x, kernel) ** 2).sum())(kernel) / 2
    found = jax.jit(jax.grad(lambda kernel: (slope(kernel) ** 2).sum()))(kernel)
    square = np.asarray(x, np.float64).T @ np.asarray(x, np.float64)
    expected = 2 * square @ (square @ np.asarray(kernel, np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    # Forwards over reverse, as of the product of a Hessian with a vector.
    _, along = jax.jit(lambda kernel: jax.jvp(slope, (kernel,), (kernel,)))(kernel)
    expected = square @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(along, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_gradients_have_the_dtypes_of_their_factors():
    x, kernel, _ = drawn((6, 40), 3)
    gradient = jax.grad(lambda x, kernel: multiply(x, kernel).sum(), argnums=(0, 1))
    by_x, by_kernel = jax.eval_shape(gradient, x.astype(jnp.bfloat16), kernel)
    assert (by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.float32)


ACROSS = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
"""How XLA calls a product over the first axes of both, for which it has the slower library."""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have products of their own")
@pytest.mark.parametrize("name", ["few outputs", "few inputs", "square", "in pieces"])
def test_no_gradient_is_left_to_the_slower_library(name):
    def text(by):
        gradient = jax.grad(lambda kernel, x, slope: (by(x, kernel) * slope).sum())
        x, kernel, slope = drawn(*SHAPES[name])
        return jax.jit(gradient).lower(kernel, x, slope).compile().as_text()

    assert ACROSS in text(jnp.matmul)
    assert ACROSS not in text(multiply)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have products of their own")
@pytest.mark.parametrize(("name", "cut"), [("in pieces", True), ("not in pieces", False)])
def test_a_long_batch_is_cut_where_its_rows_allow_it(name, cut):
    gradient = jax.grad(lambda kernel, x, slope: (multiply(x, kernel) * slope).sum())
    x, kernel, slope = drawn(*SHAPES[name])
    text = jax.jit(gradient).lower(kernel, x, slope).compile().as_text()
    assert (f"f32[{CUTS},64,64]" in text) is cut


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have products of their own")
def test_a_tiny_product_calls_no_library():
    text = lambda name: jax.jit(multiply).lower(*drawn(*SHAPES[name])[:2]).compile().as_text()
    assert " dot(" not in text("the last tiny one")
    assert " dot(" in text("the first that is not")


@pytest.mark.parametrize(
    ("height", "width", "stride", "padding"),
    [
        (2, 4, 1, "VALID"),
        (3, 3, 2, "VALID"),
        (3, 3, 1, "SAME"),
        pytest.param(3, 3, 1, "VALID", marks=pytest.mark.slow),
        pytest.param(1, 1, 1, "VALID", marks=pytest.mark.slow),
    ],
)
def test_a_convolution_and_its_gradients_are_those_of_jax(height, width, stride, padding):
    normal = np.random.default_rng(0).standard_normal
    x, kernel = normal((5, 9, 7, 4), np.float32), normal((height, width, 4, 6), np.float32)
    options = {"window_strides": (stride, stride), "padding": padding, "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    theirs = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, **options)
    slope = normal(jax.eval_shape(theirs, x, kernel).shape, np.float32)

    @jax.jit
    def both(x, kernel, slope):
        found = []
        for product in (lambda x, kernel: convolve(x, kernel, **options), theirs):
            y, back = jax.vjp(product, x, kernel)
            found.append((y, *back(slope)))
        return found

    for a, b in zip(*both(x, kernel, slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [(NARROW, 20), (20, NARROW), (3, 2), (20, NARROW + 1)])
def test_on_cuda_a_product_by_a_narrow_matrix_is_a_sum(inputs, outputs):
    x, kernel, slope = drawn((4, 5, inputs), outputs)

    def ours(x, kernel, slope):
        y, back = jax.vjp(multiply, x, kernel)
        return y, *back(slope)

    with forms("cuda"):
        made = jax.jit(lambda *args: ours(*args))(x, kernel, slope)
        text = str(jax.make_jaxpr(multiply)(x, kernel))
    for one, other in zip(made, by_hand(x, kernel, slope), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert ("dot_general" in text) is (min(inputs, outputs) > NARROW)


def test_on_cuda_a_long_batch_is_gathered_from_pieces():
    """The mean of `(w x)^2 / 2` and its gradient `mean(w x^2)`, of rows that tell pieces apart."""
    rows = LONG * 2
    x = jnp.linspace(0.0, 2.0, rows)
    loss = lambda w, x, key: (jnp.mean((w["w"] * x) ** 2) / 2, ({"x": x}, {}))
    with forms("cuda"):
        assert num_pieces(rows, 4) == rows // PIECE
        gather = jax.jit(lambda params, x: accumulate(loss, params, x, None, 1))
        value, aux, _, grads = gather({"w": jnp.float32(3.0)}, x)
    assert jax.tree.map(jnp.shape, aux) == {"x": (rows,)}
    assert np.array_equal(aux["x"], x)
    np.testing.assert_allclose(value, 4.5 * np.mean(np.square(x, dtype=np.float64)), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], 3.0 * np.mean(np.square(x, dtype=np.float64)), rtol=1e-5)


def test_a_batch_is_cut_where_it_divides_well():
    with forms("cuda"):
        assert [num_pieces(rows, 4) for rows in (LONG - 1, LONG, 1_000_003, 1_200, 100 * 101)] == [1, 4, 1, 5, 50]
        assert num_pieces(32_768, 1 << 20) == 128
        assert num_pieces(32_768, 2 << 20) == 1  # the gradients of all pieces would take 256 MB
    assert num_pieces(LONG, 4) == 1
