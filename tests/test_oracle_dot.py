"""The oracle's dot_general, against ``lax.dot_general`` and naive loops."""

from types import SimpleNamespace

import jax
import numpy as np
import oracle
import oracle_dot
import pytest
from stand_ins import DGE, STE, Occ, PerBlock, PerTensor, Spec

F32 = np.float32


def recipe(lhs=None, rhs=None, *, dy=None, reuse="reuse", outliers=None, weights=STE()):
    gemm = lambda a, b: SimpleNamespace(lhs=a, rhs=b)
    return SimpleNamespace(
        fprop=gemm(lhs, rhs),
        dgrad=gemm(dy, reuse),
        wgrad=gemm(reuse, dy),
        outliers=outliers,
        weight_estimator=weights,
        activation_estimator=STE(),
    )


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "dims"),
    [
        ((3, 5), (5, 2), (((1,), (0,)), ((), ()))),
        ((2, 3, 5), (5, 4), (((2,), (0,)), ((), ()))),
        ((5, 2, 3), (2, 4, 5), (((0,), (2,)), ((1,), (0,)))),
        ((2, 4, 5, 3), (5, 6, 4), (((2, 1), (0, 2)), ((), ()))),
        ((2, 3, 7, 4), (4, 3, 5, 2), (((3,), (0,)), ((1, 0), (1, 3)))),
    ],
)
def test_without_quantization_it_is_lax_dot_general(lhs_shape, rhs_shape, dims):
    rng = np.random.default_rng(0)
    lhs, rhs = rng.normal(size=lhs_shape).astype(F32), rng.normal(size=rhs_shape).astype(F32)
    y, vjp = jax.vjp(lambda a, b: jax.lax.dot_general(a, b, dims), lhs, rhs)
    dy = rng.normal(size=y.shape).astype(F32)
    model = oracle_dot.dot_general(lhs, rhs, dims, recipe(reuse=None), dy)
    for ours, theirs in zip((model.y, model.dlhs, model.drhs), (y, *vjp(dy))):
        np.testing.assert_allclose(ours.value, theirs, rtol=1e-5, atol=1e-5)


def test_quantized_product_equals_a_naive_loop():
    """Three nested loops over the equations of the design, scales outside the sum and folded into dY behind."""
    rng = np.random.default_rng(3)
    m, k, n = 3, 10, 4
    x, w, dy = (rng.normal(size=s).astype(F32) for s in ((m, k), (k, n), (m, n)))
    e5m2 = Spec("E5M2", PerTensor())
    model = oracle_dot.dot_general(
        x, w, (((1,), (0,)), ((), ())), recipe(Spec(), Spec(), dy=e5m2, outliers=Occ(alpha=0.9), weights=DGE()), dy
    )
    xq = oracle.quantize_activation(x, Spec(), Occ(alpha=0.9), -1)
    wq = oracle.quantize(w, Spec(), 0)
    sx, sw = xq.scale[:, 0], wq.scale[0]
    factor = oracle.dge_factor(wq.scaled, oracle.FORMATS["E2M1"], 5.0, 3.0)
    folded_w, folded_x = np.empty((m, n), F32), np.empty((m, n), F32)
    for i, j in np.ndindex(m, n):
        folded_w[i, j], folded_x[i, j] = dy[i, j] * sw[j], dy[i, j] * sx[i]
    g, h = (oracle.quantize(f, e5m2, -1) for f in (folded_w, folded_x))
    for i, j in np.ndindex(m, n):
        want = float(sx[i]) * float(sw[j]) * sum(float(xq.values[i, t]) * float(wq.values[t, j]) for t in range(k))
        assert model.y.value[i, j] == pytest.approx(want, rel=1e-12)
    for i, t in np.ndindex(m, k):
        want = sum(float(g.values[i, j]) * float(g.scale[i, j]) * float(wq.values[t, j]) for j in range(n))
        assert model.dlhs.value[i, t] == pytest.approx(want, rel=1e-12)
    for t, j in np.ndindex(k, n):
        want = sum(float(xq.values[i, t]) * float(h.values[i, j]) * float(h.scale[i, j]) for i in range(m))
        assert model.drhs.value[t, j] == pytest.approx(want * factor[t, j], rel=1e-12)


def test_sparse_compensation_restores_what_the_clamp_took():
    """With the identity as weight, Y = Q(Xc)·sx + ΔX."""
    x, w = np.random.default_rng(4).normal(size=(6, 20)).astype(F32), np.eye(20, dtype=F32)
    occ = Occ(alpha=0.9, compensation="sparse")
    got = oracle_dot.dot_general(x, w, (((1,), (0,)), ((), ())), recipe(Spec(), Spec(), outliers=occ), x)
    clamped, residual = oracle.clamp_outliers(x, occ, -1)
    np.testing.assert_allclose(got.y.value, oracle.quantize(clamped, Spec(), -1).exact + residual, rtol=1e-6)


def test_scale_of_a_reused_block_cannot_be_folded():
    blocks = Spec(granularity=PerBlock(2))
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(F32)
    with pytest.raises(ValueError, match="one scale a vector or a tensor"):
        oracle_dot.dot_general(x, x, (((1,), (0,)), ((), ())), recipe(blocks, blocks), x)
