"""What the "xla" backend does otherwise on a GPU, interpreted on the CPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import kernels, outliers
from fp4jax.dot import xla_operands

OCC = fp4jax.OCC(0.9)


@pytest.fixture
def counting(monkeypatch):
    """As on one GPU; the arrays that the kernel was asked for, by shape."""
    asked, count = [], kernels.order_statistics

    def counted(x, ranks):
        asked.append((x.shape, x.dtype))
        return count(x, ranks)

    monkeypatch.setattr(xla_operands, "_on_one_gpu", lambda: True)
    monkeypatch.setattr(kernels, "order_statistics", counted)
    with kernels.interpret():
        yield asked


def values(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).standard_t(2, shape), jnp.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(1, 1), (40, 129), (3, 8, 5)], ids=str)
def test_thresholds_of_16_bits_are_counted_by_the_kernel(counting, shape, dtype):
    x = values(shape, dtype)
    got = jax.jit(lambda x: xla_operands._thresholds(x, OCC, (-1,)))(x)
    want = outliers.thresholds(x, OCC, (-1,))
    assert [(v.shape, v.dtype) for v in got] == [((1,) * x.ndim, jnp.float32)] * 2
    assert [v.item() for v in got] == [v.item() for v in want]
    assert counting == [(shape, dtype)]


@pytest.mark.parametrize(
    ("occ", "shape", "dtype"),
    [
        (OCC, (40, 129), jnp.float32),
        (OCC, (0, 129), jnp.bfloat16),
        (fp4jax.OCC(0.9, scope="vector"), (40, 129), jnp.bfloat16),
        (fp4jax.OCC(0.9, quantile="sampled"), (40, 129), jnp.bfloat16),
    ],
    ids=str,
)
def test_all_others_by_the_reference(counting, occ, shape, dtype):
    x = values(shape, dtype)
    got, want = xla_operands._thresholds(x, occ, (-1,)), outliers.thresholds(x, occ, (-1,))
    assert all((a == b).all() for a, b in zip(got, want, strict=True))
    assert not counting


@pytest.mark.parametrize(
    ("capability", "count", "has"),
    [("9.0", 1, True), ("10.0", 1, True), ("9.0", 2, False), ("8.0", 1, False), ("gfx942", 1, False)],
)
def test_the_kernel_is_for_one_gpu_with_its_instructions(monkeypatch, capability, count, has):
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * count)
    assert xla_operands._on_one_gpu() == has


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_beside_a_gpu_the_cpu_has_the_reference(monkeypatch):
    x = values((80, 129), jnp.bfloat16)
    monkeypatch.setattr(xla_operands, "_on_one_gpu", lambda: True)
    found = jax.jit(lambda x: xla_operands._thresholds(x, OCC, (-1,)))
    assert [v.item() for v in found(x)] == [v.item() for v in outliers.thresholds(x, OCC, (-1,))]
    with kernels.lowering_for():
        lowered = found.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "fp4jax_quantile_survey" in lowered


def test_a_batch_is_counted_by_the_reference_and_each_has_thresholds_of_its_own(counting):
    x = values((3, 40, 8), jnp.bfloat16)
    lo, hi = jax.vmap(lambda x: jnp.stack(xla_operands._thresholds(x, OCC, (-1,))))(x).swapaxes(0, 1)
    for i in range(3):
        want = outliers.thresholds(x[i], OCC, (-1,))
        assert (lo[i].item(), hi[i].item()) == tuple(v.item() for v in want)


def test_a_layer_and_its_gradients_are_those_of_the_reference(counting, monkeypatch):
    x, w = values((16, 24), jnp.bfloat16), values((24, 8), jnp.float32)
    recipe = fp4jax.recipes.fp4(alpha=0.9)

    def gradients(x, w):
        def loss(x, w):
            y = fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, backend="xla")
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1))(x, w)

    by_kernel = gradients(x, w)
    assert counting
    monkeypatch.setattr(xla_operands, "_on_one_gpu", lambda: False)
    jax.tree.map(np.testing.assert_array_equal, by_kernel, gradients(x, w))
