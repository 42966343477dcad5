"""FP8 with per-tensor current scaling."""

from fp4jax.formats import E4M3, E5M2, FloatFormat
from fp4jax.quantize import QuantSpec
from fp4jax.recipe import REUSE, Gemm, Recipe
from fp4jax.scaling import PerTensor


def fp8(*, forward: FloatFormat = E4M3, gradient: FloatFormat = E5M2) -> Recipe:
    """W8A8 in FP8: one scale a tensor from its current maximum; E4M3 forward, E5M2 gradients.

        Y = sx · sw · Σk Xq Wq,    dX = s1 · Σn Q(dY · sw) Wqᵀ,    dW = s2 · Σm Xqᵀ Q(dY · sx)

    Args:
        forward: format of activations and weights.
        gradient: format of gradients.

    Source: Micikevicius et al., *FP8 Formats for Deep Learning*, arXiv:2209.05433, and the FP8 baselines of
    arXiv:2501.17116 (Fig. 6a). Deviation: those baselines use delayed scaling, from a window of past maxima; here every
    scale is of the tensor at hand.
    """
    operand, grad = QuantSpec(forward, PerTensor()), QuantSpec(gradient, PerTensor())
    return Recipe("fp8", fprop=Gemm(operand, operand), dgrad=Gemm(grad, REUSE), wgrad=Gemm(REUSE, grad))
