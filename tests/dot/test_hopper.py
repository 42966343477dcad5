"""The "hopper" backend around its kernels: prepared operands, noise, and Explicit meshes.

Quantizers run interpreted. Interpreting the product takes seconds, and Pallas does it on one device only, so here it is
XLA's; ``tests/kernels`` compares the two.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import kernels
from fp4jax.dot import hopper
from fp4jax.estimators import Estimator
from fp4jax.exact import as_float32, multiply

MATMUL = (((1,), (0,)), ((), ()))
MARKS = ("fprop", "dgrad", "wgrad")
TOKENS = (((2,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
X = RNG.standard_t(3, (16, 32)).astype(jnp.bfloat16)
W = (0.1 * RNG.normal(size=(32, 24))).astype(np.float32)
G = RNG.normal(size=(16, 24)).astype(jnp.bfloat16)


FUSED = []  # estimators whose factor a product was asked for


def scaled(lhs, rhs, lhs_scale, rhs_scale, *, out_dtype, factor=None):
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    out = jnp.einsum("...mk,...nk->...mn", lhs, rhs, precision="highest")
    out = out * (lhs_scale[..., None] if lhs_scale.ndim else lhs_scale)
    out = out * (rhs_scale[..., None, :] if rhs_scale.ndim else rhs_scale)
    if factor is not None:
        FUSED.append(factor.estimator)
        r = factor.reciprocal
        u = multiply(as_float32(factor.weight), r[..., None, :] if r.ndim else r)
        out = out * factor.estimator.factor(u, factor.format)
    return out.astype(out_dtype)


@pytest.fixture(autouse=True)
def _products_by_xla(monkeypatch):
    hopper._marked.cache_clear()
    FUSED.clear()
    monkeypatch.setattr(kernels, "scaled_matmul", scaled)
    yield
    hopper._marked.cache_clear()


# layout: lhs, rhs and y on a mesh of data × tensor; and what may be gathered
LAYOUTS = {
    "data": (P("data", None), P(None, None), P("data", None)),
    "column-parallel": (P("data", None), P(None, "tensor"), P("data", "tensor")),
    "row-parallel": (P("data", "tensor"), P("tensor", None), P("data", None)),
    "fully sharded": (P("data", None), P("data", "tensor"), P("data", "tensor")),
}


def value_and_gradients(x, w, g, backend, recipe, dims=MATMUL, out_sharding=None, key=None):
    product = functools.partial(
        fp4jax.dot_general, dimension_numbers=dims, recipe=recipe, backend=backend, out_sharding=out_sharding, key=key
    )
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(g)


@functools.cache
def one_device(recipe):
    return jax.jit(value_and_gradients, static_argnums=(3, 4))(X, W, G, "xla", recipe)


STOCHASTIC = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
NOISY_E5M2 = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor(), rounding=fp4jax.STOCHASTIC)
POWERS = fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("rceil"), rounding=fp4jax.TIES_UP)


def recipe_of(operand, gradient):
    return fp4jax.Recipe(
        "test",
        fp4jax.Gemm(operand, operand),
        fp4jax.Gemm(gradient, fp4jax.REUSE),
        fp4jax.Gemm(fp4jax.REUSE, gradient),
        weight_estimator=fp4jax.DGE(),
    )


def both(f, *args):
    """Results of ``f(*args, backend)`` for either backend."""
    with kernels.interpret():
        return [jax.jit(functools.partial(f, backend=b))(*args) for b in ("hopper", "xla")]


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_noise_is_that_of_the_xla_backend_under_vmap_too():
    """A matrix of a batch draws noise of its own, although the key is one."""

    def layers(x, w, g, backend):
        run = lambda x, g: value_and_gradients(
            x, w, g, backend, recipe_of(STOCHASTIC, NOISY_E5M2), key=jax.random.key(3)
        )
        return jax.vmap(run)(x, g)

    x, g = jnp.stack([X, X]), jnp.stack([G, G])
    got, want = both(layers, x, W, g)
    assert_same(got, want)
    assert not np.array_equal(np.asarray(got[0][0]), np.asarray(got[0][1]))


def test_noise_of_a_gradient_is_that_of_the_xla_backend_where_only_what_is_folded_in_is_mapped():
    """As in a gradient under ``vmap`` over weights, whose dY comes from a sum: ones, and the same in all."""

    def layers(x, ws, g, backend):
        key = jax.random.PRNGKey(3)  # of the old kind, which has an axis itself
        run = lambda w: value_and_gradients(x, w, g, backend, recipe_of(STOCHASTIC, NOISY_E5M2), key=key)
        return jax.vmap(jax.vmap(run))(ws)

    got, want = both(layers, X[:, :16], jnp.stack([W[:16]] * 4).reshape(2, 2, 16, 24), G)
    assert_same(got, want)
    assert len({np.asarray(dx).tobytes() for dx in got[1].reshape(4, -1)}) == 4


def test_the_result_of_forward_alone_is_kept_from_what_stores_it():
    """XLA would have the product write a scan's stack, and run it again for all who read the result at once."""
    with kernels.interpret():
        traced = jax.make_jaxpr(lambda x, w, g: value_and_gradients(x, w, g, "hopper", fp4jax.recipes.fp4_vector()))
        program = str(traced(X, W, G))
    results = {mark: re.findall(rf"(\w+):\w+\[[\d,]+\] = jit\[\s*name=fp4jax_{mark}", program) for mark in MARKS}
    kept = {mark: [f"optimization_barrier {name}\n" in program for name in names] for mark, names in results.items()}
    assert kept == {"fprop": [True], "dgrad": [False], "wgrad": [False]}


def test_several_contracted_axes_and_scales_that_are_powers_of_two():
    gradient = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor(), fp4jax.PowerOfTwo("rceil"))
    recipe, dims = recipe_of(POWERS, gradient), (((2, 3), (0, 1)), ((), ()))
    x, w, g = X.reshape(2, 8, 4, 8), W.reshape(4, 8, 24), G.reshape(2, 8, 24)
    assert_same(*both(lambda x, w, g, backend: value_and_gradients(x, w, g, backend, recipe, dims), x, w, g))


@dataclasses.dataclass(frozen=True)
class Tent(Estimator):
    """No form for kernels."""

    def factor(self, u, format):
        return jnp.maximum(1 - jnp.abs(u), 0)


@pytest.mark.parametrize("estimator", [fp4jax.STE(), fp4jax.DGE(), fp4jax.ClippedSTE(), Tent()], ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_product_takes_the_factor_of_an_estimator_with_a_form_for_kernels(estimator, dtype):
    recipe = dataclasses.replace(fp4jax.recipes.fp4_vector(), weight_estimator=estimator)
    assert_same(*both(functools.partial(value_and_gradients, recipe=recipe), X, W.astype(dtype), G))
    assert [estimator] * estimator.has_kernel_form == FUSED


BATCHED = (((3,), (2,)), ((0, 1), (0, 1)))


@pytest.mark.parametrize(
    "recipe", [fp4jax.recipes.fp4(alpha=0.9, quantile="sampled"), fp4jax.recipes.fp4_direct()], ids=lambda r: r.name
)
def test_matrices_of_a_batch_share_scales_and_quantiles_of_the_tensor(recipe):
    """As in attention, or in experts side by side: [2, 2] products of [4, 16] · [16, 24]."""
    x, w, g = 10 * X.reshape(2, 2, 8, 16), W.reshape(2, 2, 8, 24), G.reshape(2, 2, 4, 24)
    x, w = x[:, :, :4], jnp.concatenate([w, -2 * w], axis=2)
    f = functools.partial(value_and_gradients, recipe=recipe, dims=BATCHED)
    assert_same(*both(f, x, w, g))
    with kernels.interpret():
        products = fp4jax.explain(functools.partial(f, backend="hopper"), x, w, g).check(backend="hopper").products
    sizes = [(p.kind, p.b, p.m, p.n, p.k) for p in products]
    assert sizes == [("fprop", 4, 4, 24, 16), ("dgrad", 4, 4, 16, 24), ("wgrad", 4, 16, 24, 4)]


def test_prepared_operands_give_the_numbers_of_plain_ones():
    """Query, key and value share an activation; three microbatches share the weights."""
    recipe, batches = fp4jax.recipes.fp4(alpha=0.9, quantile="sampled"), jnp.stack([X, X[::-1]])

    def step(ws, batches, backend, prepare):
        dot = fp4jax.DotGeneral(recipe, backend)
        prepared = [dot.prepare_rhs(w) for w in ws] if prepare else ws

        def loss(ws, x):
            rhs = [p.with_array(w) if prepare else w for p, w in zip(prepared, ws, strict=True)]
            lhs = dot.prepare_lhs(x) if prepare else x
            return sum(jnp.sum(jnp.square(dot(lhs, w, MATMUL).astype(jnp.float32))) for w in rhs)

        def add(sums, x):
            gradients = jax.grad(loss, (0, 1))(ws, x)
            return jax.tree.map(jnp.add, sums, gradients[0]), gradients[1]

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, ws), batches)

    ws = [W, 2 * W[:, :8]]
    with kernels.interpret():
        got = jax.jit(functools.partial(step, backend="hopper", prepare=True))(ws, batches)
    want = jax.jit(functools.partial(step, backend="xla", prepare=False))(ws, batches)
    assert_same(got, want)


# --- meshes ----------------------------------------------------------------------------------------------------------


def on_mesh(recipe, layout, arrays=(X, W, G), dims=MATMUL, backend="hopper"):
    """Results, and the compiled text."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    with jax.set_mesh(mesh), kernels.interpret():
        operands = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, layout, strict=True)]
        f = jax.jit(value_and_gradients, static_argnums=(3, 4, 5, 6))
        compiled = f.lower(*operands, backend, recipe, dims, layout[2]).compile()
        return compiled(*operands), compiled.as_text()


def gathered(text):
    """Types of the matrices that devices exchange; the quantile exchanges vectors, its sample."""
    exchange = re.compile(r"= (\w+)\[\d+,[\d,]+\]\S* (?:all-gather|all-to-all|collective-permute)\(")
    return exchange.findall(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_xla_backend_runs_the_same_layouts(layout):
    """It gathers a fully sharded weight after it is quantized too, in bfloat16."""
    recipe = fp4jax.recipes.fp4(alpha=None)
    results, text = on_mesh(recipe, LAYOUTS[layout], backend="xla")
    for got, want, spec in zip(results, one_device(recipe), (LAYOUTS[layout][2], *LAYOUTS[layout][:2]), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(got.sharding.mesh, spec), 2)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert gathered(text) == (["u16", "u16"] if layout == "fully sharded" else [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_sums_are_those_of_one_device(layout):
    # The exact quantile takes long to interpret. The row-parallel layout is split over all devices, rows and columns.
    recipe = fp4jax.recipes.fp4(alpha=0.9 if layout == "row-parallel" else None)
    results, text = on_mesh(recipe, LAYOUTS[layout])
    assert not FUSED  # sums over devices come first
    for got, want, spec in zip(results, one_device(recipe), (LAYOUTS[layout][2], *LAYOUTS[layout][:2]), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(got.sharding.mesh, spec), 2)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert gathered(text) == (["u8", "u8"] if layout == "fully sharded" else [])  # the weight, forward and backward


def test_one_scale_a_tensor_is_shared_by_all_devices():
    recipe = fp4jax.recipes.fp4_direct()
    results, text = on_mesh(recipe, LAYOUTS["row-parallel"])
    for got, want in zip(results, one_device(recipe), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert not gathered(text)


@pytest.mark.parametrize("recipe", [fp4jax.recipes.fp4(alpha=None), fp4jax.recipes.fp4_direct()], ids=lambda r: r.name)
def test_kernels_quantize_every_operand_of_every_layout(recipe):
    """None is left to XLA, whose maxima would be of float32 matrices."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    for layout in LAYOUTS.values():
        operands = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s))
            for a, s in zip((X, W, G), layout, strict=True)
        ]
        with jax.set_mesh(mesh), kernels.interpret():
            f = functools.partial(value_and_gradients, backend="hopper", recipe=recipe, out_sharding=layout[2])
            text = str(jax.make_jaxpr(f)(*operands))
        assert len(re.findall(r"name=fp4jax_quantize\w+", text)) == 4  # X, W, and dY for either gradient
        assert not re.search(r"f32\[\d*\] = reduce_max", text)


def test_several_axes_of_tokens_may_be_split():
    x, g = X.reshape(4, 4, 32), G.reshape(4, 4, 24)
    recipe = fp4jax.recipes.fp4_vector()
    results, text = on_mesh(recipe, (P("data", "tensor"), P(), P("data", "tensor")), (x, W, g), TOKENS)
    for got, want in zip(results, one_device(recipe), strict=True):
        np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), np.asarray(want))
    assert not gathered(text)


def test_prepared_operands_keep_their_sharding():
    recipe, mesh = fp4jax.recipes.fp4_vector(), jax.make_mesh((2, 2), ("data", "tensor"))
    dot = fp4jax.DotGeneral(recipe, backend="hopper")
    with jax.set_mesh(mesh), kernels.interpret():
        x, w = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((X, W), LAYOUTS["row-parallel"][:2]))
        y = jax.jit(lambda x, w: dot(dot.prepare_lhs(x), dot.prepare_rhs(w), MATMUL))(x, w)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(one_device(recipe)[0]))


@pytest.mark.parametrize("backend", ["hopper", "xla"])
def test_a_prepared_weight_follows_its_array(backend):
    """A weight prepared in parts is gathered after that, a byte or two a value, where its array was gathered."""
    recipe, mesh = fp4jax.recipes.fp4(alpha=None), jax.make_mesh((2, 2), ("data", "tensor"))
    dot = fp4jax.DotGeneral(recipe, backend)

    def step(x, w, g):
        prepared = dot.prepare_rhs(w)
        whole = lambda w: jax.sharding.reshard(w, NamedSharding(mesh, P("tensor", None)))
        y, vjp = jax.vjp(lambda x, w: dot(x, prepared.with_array(whole(w)), MATMUL, out_sharding=P("data", None)), x, w)
        return y, *vjp(g)

    with jax.set_mesh(mesh), kernels.interpret():
        specs = P("data", "tensor"), P("tensor", "data"), P("data", None)
        operands = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((X, W, G), specs, strict=True))
        results = jax.jit(step)(*operands)
    for got, want in zip(results, one_device(recipe), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_sizes_and_backend_are_listed():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    recipe, (x_spec, w_spec, out) = fp4jax.recipes.fp4_vector(), LAYOUTS["row-parallel"]
    with jax.set_mesh(mesh), kernels.interpret():
        x, w, g = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((X, W, G), (x_spec, w_spec, out)))
        found = fp4jax.explain(
            lambda x, w, g: value_and_gradients(x, w, g, "hopper", recipe, out_sharding=out), x, w, g
        )
    assert [(p.kind, p.m, p.n, p.k, p.lhs, p.rhs) for p in found.check(backend="hopper").products] == [
        ("fprop", 16, 24, 32, "E2M1", "E2M1"),
        ("dgrad", 16, 32, 24, "E5M2", "E2M1"),
        ("wgrad", 32, 24, 16, "E2M1", "E5M2"),
    ]


# reason: shardings of lhs and rhs, and the mesh's kind
REFUSED = {
    r"the contraction is split over \('tensor',\) in lhs and \(\) in rhs": (P("data", "tensor"), P()),
    r"rhs is split along the contraction over \('tensor',\), which do not split": (P("data", None), P("tensor", None)),
    r"\['data'\] split both the rows of lhs and the columns of rhs": (P("data", None), P(None, "data")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_layouts_that_it_does_not_run_are_refused(reason):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)) for a, s in zip((X, W), REFUSED[reason])
    ]
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector(), backend="hopper")
    with jax.set_mesh(mesh), kernels.interpret(), pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda x, w: dot(x, w, MATMUL), *shapes)


@pytest.mark.parametrize(
    ("reason", "recipe"),
    [
        ("stochastic rounding on a mesh", recipe_of(STOCHASTIC, NOISY_E5M2)),
        ("a sampled quantile on a mesh", fp4jax.recipes.fp4(quantile="sampled")),
    ],
)
def test_what_would_depend_on_the_mesh_is_refused(reason, recipe):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    x, w = (jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P())) for a in (X, W))
    dot = fp4jax.DotGeneral(recipe, backend="hopper")
    with jax.set_mesh(mesh), kernels.interpret(), pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda x, w: dot(x, w, MATMUL, key=jax.random.key(0)), x, w)


def test_batch_axes_on_a_mesh_are_refused():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    shapes = [
        jax.ShapeDtypeStruct((1, *a.shape), a.dtype, sharding=NamedSharding(mesh, P(None, *s)))
        for a, s in zip((X, W), LAYOUTS["data"][:2], strict=True)
    ]
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector(), backend="hopper")
    with jax.set_mesh(mesh), kernels.interpret(), pytest.raises(ValueError, match="batch axes on a mesh"):
        jax.eval_shape(lambda x, w: dot(x, w, (((2,), (1,)), ((0,), (0,)))), *shapes)


def test_inside_shard_map_it_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector(), backend="hopper")
    inside = jax.shard_map(lambda x, w: dot(x, w, MATMUL), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with kernels.interpret(), pytest.raises(ValueError, match="inside a shard_map"):
        jax.eval_shape(inside, X, W)


def test_several_devices_without_an_explicit_mesh_are_refused(monkeypatch):
    monkeypatch.setattr(kernels, "is_hopper", lambda: True)
    dot = fp4jax.DotGeneral(fp4jax.recipes.fp4_vector(), backend="hopper")
    with pytest.raises(ValueError, match="there are several devices and no Explicit mesh"):
        jax.eval_shape(lambda x, w: dot(x, w, MATMUL), X, W)
