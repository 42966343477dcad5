"""The authors' code, as run and as released, where it differs from their paper."""

from fp4jax.estimators import DGE
from fp4jax.formats import E1M2, E2M1, E5M2
from fp4jax.outliers import OCC
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import REUSE, Gemm, Recipe
from fp4jax.rounding import TIES_UP
from fp4jax.scaling import PerTensor, PowerOfTwo


def fp4_research(*, alpha: float = 0.97, k: float = 3.0, clip: float = 3.0) -> Recipe:
    """What the authors' research branch ran by default: E1M2 activations, α = .97, DGE with k = 3.

        Y = sx · sw · Σk E1M2(Xc)[m,k] E2M1(W)[k,n],  ΔX carried,  dW = dŴ ⊙ f'(W · r)

    Args:
        alpha: quantile of OCC, one pair a token.
        k, clip: of DGE.

    Source: github.com/Mr-Philo/MS-AMP, branches ``fp4`` and ``pai`` (January 2025), folder
    ``msamp/operators/fp4_quant``: activations E1M2, token-wise, α = .97, compensated; quantiles by token. Deviations:
    the code adds the residual to the dequantized tensor and casts the sum to E4M3 per tensor before one FP8 product;
    here the residual is carried per token, which rounds once less. Its weight scales lie along the input axis and
    cannot leave the sum; here they are per output channel, as in the paper. Ties go up, as in its kernel.
    """
    lhs, rhs = QuantSpec(E1M2, rounding=TIES_UP), QuantSpec(E2M1, rounding=TIES_UP)
    grad = QuantSpec(E5M2, PerTensor())
    return Recipe(
        "fp4_research",
        fprop=Gemm(lhs, rhs),
        dgrad=Gemm(grad, REUSE),
        wgrad=Gemm(REUSE, grad),
        weight_estimator=DGE(k, clip),
        outliers=OCC(alpha, scope="vector"),
    )


def fp4_release(*, alpha: float = 0.99, k: float = 5.0, clip: float = 3.0) -> Recipe:
    """What was released: power-of-two scales, ties up, clamping without compensation.

        scale = 2^e with e the smallest for which amax / 2^e ≤ 6,    Y = sx · sw · Σk Xcq[m,k] Wq[k,n]

    Args:
        alpha: quantile of the clamp, one pair a token.
        k, clip: of DGE.

    Source: github.com/Azure/MS-AMP, commit 9746ea8 (``msamp/operators/fp4_quantize``, ``msamp/megatron/layers.py``):
    γ = 2^⌊log2(6 / amax)⌋, that is ``PowerOfTwo("rceil")``; activations clamped by token at α = .99, ΔX discarded. The
    gradient passes the clamp unchanged. Deviations: weight scales are per output channel (the code's per-input-channel
    scales cannot leave the sum); gradients are scaled from the current maximum, not from a window.
    """
    operand = QuantSpec(E2M1, scale=PowerOfTwo("rceil"), rounding=TIES_UP)
    grad = QuantSpec(E5M2, PerTensor())
    return Recipe(
        "fp4_release",
        fprop=Gemm(operand, operand),
        dgrad=Gemm(grad, REUSE),
        wgrad=Gemm(REUSE, grad),
        weight_estimator=DGE(k, clip),
        outliers=OCC(alpha, scope="vector", compensation="none"),
    )
