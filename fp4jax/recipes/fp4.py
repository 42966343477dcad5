"""The recipe of the paper, and its four-bit ablations."""

from typing import Literal

from fp4jax.estimators import DGE, STE
from fp4jax.formats import E2M1, E4M3, E5M2, FloatFormat
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import REUSE, Gemm, Recipe
from fp4jax.scaling import Granularity, PerTensor, PerVector


def _gradient(format: FloatFormat | None) -> QuantSpec | None:
    """Gradients as the authors' code quantizes them: one scale a tensor, of the current maximum."""
    return None if format is None else QuantSpec(format, PerTensor())


def fp4(
    *,
    alpha: float | None = 0.99,
    k: float | None = 5.0,
    clip: float = 3.0,
    scope: Literal["tensor", "vector"] = "tensor",
    quantile: Literal["exact", "sampled"] = "exact",
    compensation: Literal["none", "residual", "sparse"] = "residual",
    gradient: FloatFormat | None = E5M2,
) -> Recipe:
    """The paper: W4A4 in E2M1, vector-wise scales, DGE on weights, OCC on activations, FP8 gradients.

        Y[m,n] = sx[m] · sw[n] · Σk Xq[m,k] Wq[k,n]                          (§3, §4.1: token- and channel-wise scales)
        dW     = dŴ ⊙ min(|p|^(1/k-1) / k, clip)                             (Eq. 8)
        Xc     = clip(X, quantile(1-α), quantile(α)),  ΔX = X - Xc           (Eq. 9)

    Args:
        alpha: quantile of OCC; None leaves outliers alone.
        k, clip: of DGE; ``k=None`` is the straight-through estimator.
        scope, quantile, compensation: see ``OCC``.
        gradient: format of dY in both backward products, one scale a tensor; None leaves it in high precision.

    Source: Wang et al., arXiv:2501.17116. Deviations: ties go to even, as in hardware, where the paper's table sends
    them up (``fp4_release`` keeps that); ΔX is carried in E4M3 inside the four-bit operand, so one product does the
    work of the paper's two, and the scale of a token is at least amax(X)/448 so that nothing saturates; the paper
    does not say how
    gradients are quantized: E5M2, one scale a tensor, is what the authors' code does.
    """
    operand, grad = QuantSpec(E2M1), _gradient(gradient)
    outliers = None if alpha is None else OCC(alpha, quantile=quantile, scope=scope, compensation=compensation)
    return Recipe(
        "fp4",
        fprop=Gemm(operand, operand),
        dgrad=Gemm(grad, REUSE),
        wgrad=Gemm(REUSE, grad),
        weight_estimator=STE() if k is None else DGE(k, clip),
        outliers=outliers,
    )


def fp4_vector(
    *,
    activation: Granularity = PerVector(),
    weight: Granularity = PerVector(),
    gradient: FloatFormat | None = E5M2,
) -> Recipe:
    """W4A4 in E2M1 with vector-wise scales and the straight-through estimator; neither DGE nor OCC.

    Args:
        activation, weight: who shares a scale (``PerTensor()`` for the paper's "coarse"). With ``PerBlock`` the
            operand is quantized again, along the new axis, in the backward product.
        gradient: format of gradients, one scale a tensor; None leaves them in high precision.

    Source: the "fine" arm of arXiv:2501.17116, Fig. 6d. Deviation: gradients in E5M2 as in ``fp4``, so that the two
    differ by DGE and OCC alone.
    """
    lhs, rhs, grad = QuantSpec(E2M1, activation), QuantSpec(E2M1, weight), _gradient(gradient)
    return Recipe(
        "fp4_vector",
        fprop=Gemm(lhs, rhs),
        dgrad=Gemm(grad, REUSE if weight.leaves_the_sum else rhs),
        wgrad=Gemm(REUSE if activation.leaves_the_sum else lhs, grad),
    )


def fp4_direct(*, gradient: FloatFormat | None = E5M2) -> Recipe:
    """W4A4 cast directly: E2M1, one scale a tensor, the straight-through estimator, nothing else. The one that fails.

    Args:
        gradient: format of gradients, one scale a tensor; None leaves them in high precision.

    Source: "W4A4 direct casting" of arXiv:2501.17116, Fig. 1 and 6a. Deviation: none known; gradients are E5M2 in every
    arm of the authors' code, so also here.
    """
    operand, grad = QuantSpec(E2M1, PerTensor()), _gradient(gradient)
    return Recipe("fp4_direct", fprop=Gemm(operand, operand), dgrad=Gemm(grad, REUSE), wgrad=Gemm(REUSE, grad))


def w4a8(*, k: float | None = 5.0, clip: float = 3.0, weight: Granularity = PerVector()) -> Recipe:
    """Four-bit weights, eight-bit activations: E2M1 weights under DGE, E4M3 activations; the ablation of DGE.

    Args:
        k, clip: of DGE; ``k=None`` is the straight-through estimator.
        weight: who shares a scale of the weight. The authors' commits ran this ablation with ``PerTensor()``.

    Source: arXiv:2501.17116, Fig. 6b. Deviation: vector-wise weight scales by default, as in the paper's text.
    """
    lhs, rhs, grad = QuantSpec(E4M3, PerVector()), QuantSpec(E2M1, weight), _gradient(E5M2)
    return Recipe(
        "w4a8",
        fprop=Gemm(lhs, rhs),
        dgrad=Gemm(grad, REUSE),
        wgrad=Gemm(REUSE, grad),
        weight_estimator=STE() if k is None else DGE(k, clip),
    )


def w8a4(
    *,
    alpha: float | None = 0.99,
    scope: Literal["tensor", "vector"] = "tensor",
    quantile: Literal["exact", "sampled"] = "exact",
    compensation: Literal["none", "residual", "sparse"] = "residual",
    activation: Granularity = PerVector(),
) -> Recipe:
    """Eight-bit weights, four-bit activations: E4M3 weights, E2M1 activations under OCC; the ablation of OCC.

    Args:
        alpha: quantile of OCC; None leaves outliers alone.
        scope, quantile, compensation: see ``OCC``.
        activation: who shares a scale of the activation. The authors' commits ran this ablation with ``PerTensor()``.

    Source: arXiv:2501.17116, Fig. 6c. Deviation: vector-wise activation scales by default, as in the paper's text.
    """
    lhs, rhs, grad = QuantSpec(E2M1, activation), QuantSpec(E4M3, PerVector()), _gradient(E5M2)
    return Recipe(
        "w8a4",
        fprop=Gemm(lhs, rhs),
        dgrad=Gemm(grad, REUSE),
        wgrad=Gemm(REUSE, grad),
        outliers=None if alpha is None else OCC(alpha, quantile=quantile, scope=scope, compensation=compensation),
    )
