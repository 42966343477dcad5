"""The paper's cost model: floating-point operations (FLOPs) of a transformer layer, and what FP4 saves of them.

All counts are FLOPs a token, forward; the paper's Table 5 multiplies by b·s tokens. Backward takes twice as many, so
that a step costs 3 (N + O), where

    N   FLOPs of the linear layers' products, which quantization speeds up
    O   FLOPs of all else (attention, norms, activation functions), which it does not

A linear layer runs three products of N FLOPs each: fprop, dgrad, wgrad. With products r times as fast as BF16's,

    speed-up = 3 (N + O) / (N/r_fprop + N/r_dgrad + N/r_wgrad + 3 O + DGE + 3 OCC)

It counts operations and no memory traffic, so it bounds what hardware can reach; docs/planning.md says how far the
paper's 3.12 and 2.95 follow from it.

Source: Wang et al., arXiv:2501.17116, Appendix B, Table 5.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from fp4jax.models.configs import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of the table of FLOPs.

    Args:
        name: what is computed.
        flops: FLOPs a token, forward.
        linear: whether it is the product of a linear layer.
    """

    name: str
    flops: float
    linear: bool = False


type Layer = tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """How many times as fast as in BF16 the three products of a linear layer run: 4 in FP4, 2 in FP8.

    Args:
        fprop: Y = X W.
        dgrad: dX = dY Wᵀ.
        wgrad: dW = Xᵀ dY.
    """

    fprop: float
    dgrad: float
    wgrad: float


VARIANTS: Mapping[str, Rates] = MappingProxyType(
    {
        "FP4 forward and backward": Rates(4, 4, 4),
        "FP4 forward, FP8 backward": Rates(4, 2, 2),
        "FP4 forward, BF16 backward": Rates(4, 1, 1),
    }
)
"""What the three products run in. The paper's Table 5 has all in FP4; its released code quantizes dY to FP8."""


def paper_layer(h: int, s: int) -> Layer:
    """The layer of Table 5: LayerNorm, attention, and an ungated GeLU MLP of width 4h.

        N = 24h²        O = 5sh + 36h

    Args:
        h: width of the residual stream.
        s: tokens of a sequence. Scores are counted as if they were not causal.

    Example:
        >>> layer = paper_layer(4096, 2048)
        >>> linear_flops(layer) == 24 * 4096**2, other_flops(layer) == (5 * 2048 + 36) * 4096
        (True, True)
    """
    return (
        Part("attention norm", 4 * h),
        Part("query, key, value", 6 * h**2, linear=True),
        Part("scores and their sum over values", 4 * s * h),
        Part("softmax", s * h),
        Part("output", 2 * h**2, linear=True),
        Part("MLP norm", 4 * h),
        Part("up", 8 * h**2, linear=True),
        Part("GeLU", 28 * h),
        Part("down", 8 * h**2, linear=True),
    )


def llama_layer(config: LlamaConfig, s: int) -> Layer:
    """The layer of `fp4jax.models.Llama`: RMSNorm, rotary attention, and a SwiGLU of width f.

        N = 2d(2q + 2k) + 6df        O = 5sq + 8d + 3(q + k) + 8f

    with q and k the widths of all query and of all key heads. Norm, softmax and the activation function's 7 FLOPs an
    entry are counted as in Table 5; the rotary embedding takes 3 an entry, the gate's product one more.

    Args:
        config: the model.
        s: tokens of a sequence.

    Example:
        >>> from fp4jax.models import MODELS
        >>> round(linear_flops(llama_layer(MODELS["7b"], 2048)) / linear_flops(paper_layer(4096, 2048)), 3)
        1.005
    """
    d, f = config.embed_dim, config.mlp_dim
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        Part("attention norm", 4 * d),
        Part("query, key, value", 2 * d * (q + 2 * k), linear=True),
        Part("rotary embedding", 3 * (q + k)),
        Part("scores and their sum over values", 4 * s * q),
        Part("softmax", s * q),
        Part("output", 2 * q * d, linear=True),
        Part("MLP norm", 4 * d),
        Part("gate, up", 4 * d * f, linear=True),
        Part("SwiGLU", 8 * f),
        Part("down", 2 * f * d, linear=True),
    )


def linear_flops(layer: Layer) -> float:
    """N: FLOPs of the linear layers, a token, forward."""
    return sum(part.flops for part in layer if part.linear)


def other_flops(layer: Layer) -> float:
    """O: FLOPs of all else, a token, forward."""
    return sum(part.flops for part in layer if not part.linear)


def dge_flops(weights: float, tokens: float) -> float:
    """FLOPs a token and step of the differentiable gradient estimator: 8 a weight, once a step.

    The paper writes 8 · 12bsh for a layer of 12h² weights, which is the count for a batch of h tokens. A batch has
    thousands of times as many, so that the true term vanishes.

    Args:
        weights: of the linear layers.
        tokens: that one product wgrad sums over.

    Example:
        >>> dge_flops(12 * 4096**2, tokens=4096) == 96 * 4096
        True
    """
    return 8 * weights / tokens


def occ_flops(layer: Layer, alpha: float, rate: float = 1.0) -> float:
    """BF16-equivalent FLOPs a token that the sparse product ΔX · W adds to each of the three products: 2(1−α) N / rate.

    `fp4jax.OCC(compensation="residual")` carries ΔX inside the FP4 operand instead and runs no such product.

    Args:
        layer: whose linear layers are compensated.
        alpha: quantile of the clamp; 2(1−α) of the entries are outliers.
        rate: how many times as fast as in BF16 the product runs. The paper's text says FP8, 2; its numbers need 1.
    """
    if not 0.5 < alpha <= 1:
        raise ValueError(f"alpha={alpha} must be above 0.5 and at most 1")
    return 2 * (1 - alpha) * linear_flops(layer) / rate


def speedup(layer: Layer, rates: Rates, *, dge: float = 0.0, occ: float = 0.0) -> float:
    """Speed-up of a training step over BF16, by the formula at the top of this module.

    Args:
        layer: one layer, or the parts of a whole model.
        rates: of the three products.
        dge: from `dge_flops`.
        occ: from `occ_flops`.

    Example:
        >>> [round(speedup(paper_layer(4096, 2048), rates), 2) for rates in VARIANTS.values()]
        [3.12, 2.12, 1.29]
    """
    n, o = linear_flops(layer), other_flops(layer)
    products = n / rates.fprop + n / rates.dgrad + n / rates.wgrad
    return 3 * (n + o) / (products + 3 * o + dge + 3 * occ)


def paper_speedup(h: int = 4096, s: int = 2048, alpha: float | None = None, *, occ_rate: float = 1.0) -> float:
    """The paper's speed-up of FP4 over BF16 (which it calls FP32).

        alpha=None              (24h + 5s + 36) / (6h + 5s + 36)                      3.12, as published
        alpha=.99               (24h + 5s + 36) / (6h + 48(1−α)h + 5s + 68)           2.95, as published
        alpha=.99, occ_rate=2   (24h + 5s + 36) / (6h + 24(1−α)h + 5s + 68)           3.03, as the formula is printed

    The printed formula has the sparse product of OCC run in FP8. Both published numbers, 2.95 and OCC's share of
    5.6 %, come out only if it runs in BF16.

    Args:
        h: width; the default is the paper's 7B model.
        s: tokens of a sequence.
        alpha: OCC's quantile, with DGE; None for neither.
        occ_rate: rate of the sparse product.

    Example:
        >>> [round(x, 2) for x in (paper_speedup(), paper_speedup(alpha=0.99), paper_speedup(alpha=0.99, occ_rate=2))]
        [3.12, 2.95, 3.03]
    """
    layer = paper_layer(h, s)
    if alpha is None:
        return speedup(layer, Rates(4, 4, 4))
    dge, occ = dge_flops(12 * h**2, tokens=h), occ_flops(layer, alpha, occ_rate)
    return speedup(layer, Rates(4, 4, 4), dge=dge, occ=occ)


def llama_model(config: LlamaConfig, s: int) -> Layer:
    """All layers of a LLaMA in one, with the head, which stays in BF16, among what is not sped up.

    Example:
        >>> from fp4jax.models import MODELS
        >>> round(speedup(llama_model(MODELS["7b"], 2048), Rates(4, 4, 4)), 2)
        3.0
    """
    layers = tuple(dataclasses.replace(p, flops=config.num_layers * p.flops) for p in llama_layer(config, s))
    d, v = config.embed_dim, config.vocab_size
    return (*layers, Part("final norm", 4 * d), Part("head", 2 * d * v))
