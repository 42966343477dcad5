"""QuantSpec and QTensor: containers, errors, and what passes through transformations."""

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), jnp.float32)
SPECS = [
    fp4jax.QuantSpec(fp4jax.E2M1),
    fp4jax.QuantSpec(fp4jax.E4M3, fp4jax.PerTensor()),
    fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32), fp4jax.PowerOfTwo("rceil")),
    fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel()),
    fp4jax.QuantSpec(fp4jax.E1M2, fp4jax.PerBlock2D(8, 3)),
]
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


def same(a, b):
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert p.dtype == q.dtype
        np.testing.assert_array_equal(np.asarray(p).view(np.uint8), np.asarray(q).view(np.uint8))


@specs
def test_a_qtensor_is_a_pytree_with_static_spec_and_axis(spec):
    q = fp4jax.quantize(X, spec, axis=1)
    assert q.shape == X.shape
    assert q.axis == (-1,)
    leaves, treedef = jax.tree.flatten(q)
    assert len(leaves) == (3 if isinstance(spec.scale, fp4jax.TwoLevel) else 2)
    again = jax.tree.unflatten(treedef, leaves)
    assert (again.spec, again.axis) == (spec, (-1,))
    same(jax.jit(lambda q: q)(q), q)


@specs
def test_vmap_scan_remat_and_donation_change_no_bit(spec):
    stack = jnp.stack([X, 3 * X, X * 0])
    f = lambda x: fp4jax.quantize(x, spec, axis=-1)
    one_by_one = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(f(x) for x in stack))
    same(jax.vmap(f)(stack), one_by_one)
    same(jax.lax.map(f, stack), one_by_one)
    same(jax.jit(jax.checkpoint(f))(X), f(X))
    back = jax.jit(lambda q: q.dequantize(), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        np.testing.assert_array_equal(back(f(X)), f(X).dequantize())


@specs
def test_dequantize_rounds_once_to_the_dtype_asked_for(spec):
    q = fp4jax.quantize(X, spec, axis=-1)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert q.dequantize(dtype).dtype == dtype
        np.testing.assert_array_equal(q.dequantize(dtype), q.dequantize().astype(dtype))
        np.testing.assert_array_equal(fp4jax.dequantize(q, dtype), q.dequantize(dtype))


def test_nbytes_counts_bits():
    q = fp4jax.quantize(X, fp4jax.QuantSpec(fp4jax.E2M1), axis=-1)
    assert q.values.dtype == ml_dtypes.float4_e2m1fn
    assert q.nbytes == 6 * 40 // 2 + 6 * 4
    nv = fp4jax.quantize(X, fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel()), axis=-1)
    assert nv.nbytes == 6 * 40 // 2 + 6 * 3 + 4


def test_numpy_and_python_input_is_taken():
    q = fp4jax.quantize(np.float32([[1, 2, 6]]), fp4jax.QuantSpec(fp4jax.E2M1), axis=-1)
    assert q.values.tolist() == [[1, 2, 6]]


def test_quantize_has_no_gradient():
    grad = jax.grad(lambda x: fp4jax.quantize(x, SPECS[0], axis=-1).dequantize().sum())(X)
    assert not grad.any()


@pytest.mark.parametrize(
    ("error", "make", "message"),
    [
        (TypeError, lambda: fp4jax.QuantSpec("e2m1"), "QuantSpec needs a FloatFormat as format, got format='e2m1'"),
        (TypeError, lambda: fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerVector), "needs a Granularity as granularity"),
        (TypeError, lambda: fp4jax.QuantSpec(fp4jax.E2M1, scale="absmax"), "needs a ScaleRule as scale"),
        (TypeError, lambda: fp4jax.QuantSpec(fp4jax.E2M1, rounding="up"), "needs a Rounding as rounding"),
        (ValueError, lambda: fp4jax.QuantSpec(fp4jax.E8M0), "format=E8M0 has no sign and no zero"),
        (ValueError, lambda: fp4jax.quantize(X, SPECS[0], axis=2), "axis=2 is out of range"),
        (TypeError, lambda: fp4jax.quantize(X.astype(jnp.int32), SPECS[0], axis=0), "x has dtype int32"),
        (
            ValueError,
            lambda: fp4jax.quantize(X, fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC), axis=0),
            "rounding=STOCHASTIC draws noise and key=None",
        ),
    ],
)
def test_errors_say_what_would_work(error, make, message):
    with pytest.raises(error, match=message):
        make()


def test_finite_input_dequantizes_to_finite_values():
    spec = fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("rceil"))
    for largest, dtype in ((3.4e38, jnp.float32), (57400.0, jnp.float16)):
        x = jnp.asarray([largest, -largest, 1], dtype)
        back = fp4jax.quantize(x, spec, axis=-1).dequantize(dtype)
        assert back[:2].tolist() == [jnp.finfo(dtype).max, jnp.finfo(dtype).min]


def test_nan_checks_do_not_see_the_nan_of_a_scale_that_is_not_used():
    with jax.debug_nans(True):
        for spec in SPECS:
            fp4jax.quantize(X, spec, axis=-1)


def test_spec_prints_on_one_line():
    assert repr(SPECS[3]) == "E2M1 PerBlock(size=16) TwoLevel() NEAREST_EVEN"
    assert repr(SPECS[0]) == "E2M1 PerVector() AbsMax() NEAREST_EVEN"


@pytest.mark.parametrize("function", [fp4jax.quantize, fp4jax.fake_quant])
def test_a_bare_format_is_no_spec(function):
    with pytest.raises(TypeError, match=r"spec=E2M1 must be a QuantSpec, such as fp4jax.QuantSpec\(fp4jax.E2M1\)"):
        function(jnp.ones(4), fp4jax.E2M1, axis=-1)


def test_an_operand_that_is_computed_is_computed_once():
    """The compiler may round what makes x differently in each loop that reads it, if it is allowed to copy it."""
    table = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32) * 0.1
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16))

    def normalized(table, tokens):
        x = table[tokens]
        return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)).reshape(-1, 32)

    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
    together = jax.jit(lambda t, i: dot.prepare_lhs(normalized(t, i)).quantized)(table, tokens)
    apart = jax.jit(lambda x: dot.prepare_lhs(x).quantized)(jax.jit(normalized)(table, tokens))
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
