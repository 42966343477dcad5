"""The least time that a train step could take on a GPU, by parts: arithmetic at a rate, and bytes that must move.

Of one block, with T tokens of sequences of s, widths q, k of queries and keys, d and f of model and MLP,
W = d(q + 2k) + qd + 3df weights, activations of 2 bytes and parameters of 4:

    part                        FLOP             bytes
    products                    6 T W
    casts of a BF16 layer                        12 W          weight to BF16; gradient to float32
    quantizers: activations                      4 T (2d + q + f)      read, and written both ways
                gradients                        6 T (q + 2k + 2d + 2f)        read twice, written both ways
                weights                          10 W          read twice, written both ways
    exact quantile                               2 T (2d + q + f)
    DGE factor                                   4 W           weight read, where its gradient is written
    attention, causal           7 T s q                        2 forward, 5 backward, where scores are computed again
    RMSNorm with residual sums                   32 T d
    SwiGLU                                       16 T f
    rotary embedding                             8 T (q + k)

and once, with v tokens in the vocabulary and P parameters:

    head                        6 T d v          6 d v         its cast
    loss                                         10 T v        logits read twice, gradient written
    embedding                                    16 T d + 4 v d
    AdamW in float32                             32 P          4 of them for the norm of the gradient

Not counted: what operands and results of products cost to read and write (their rates are those of whole products),
copies that XLA makes, launches, and the time in which the GPU waits.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from fp4jax.bench import parts
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks
from fp4jax.bench.report import Breakdown
from fp4jax.models import MODELS, LlamaConfig, count_parameters
from fp4jax.recipe import Recipe
from fp4jax.train.naming import parse_recipe


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU attains.

    Args:
        bfloat16, fp8: FLOP/s of products.
        memory: bytes a second.
        activations, gradients, weights, quantile: times that quantizers take over their bytes at that rate.
        outliers: times that quantizing activations takes longer where outliers are clamped.
    """

    bfloat16: float
    fp8: float
    memory: float
    activations: float = 1.0
    gradients: float = 1.0
    weights: float = 1.0
    quantile: float = 1.0
    outliers: float = 1.0

    @classmethod
    def of(cls, peaks: Peaks | None) -> "Rates":
        """The peaks of this run, or those of an H200 where none were measured."""
        return H200 if peaks is None or peaks.fp8 is None else cls(peaks.bfloat16, peaks.fp8, peaks.memory)


H200 = Rates(bfloat16=830e12, fp8=1622e12, memory=4.3e12)
"""Peaks of an H200: products of XLA and cuBLASLt of 8192³, a copy (2026-11-30)."""

KERNELS = Rates(
    bfloat16=812e12, fp8=1470e12, memory=4.3e12, activations=1.78, gradients=1.26, weights=1.3, outliers=0.71,
    quantile=2.93,
)  # fmt: skip
"""The same with the kernels as measured on 2026-11-30. Under OCC activations are read once, since counting finds their
extremes."""


def least_seconds(
    model: LlamaConfig, tokens: int, seq_len: int, recipe: Recipe | None, rates: Rates
) -> dict[str, float]:
    """Seconds of a train step by the groups of ``fp4jax.bench.parts``; see the top of this module.

    Args:
        model: whose linear layers but the head follow ``recipe``.
        tokens: of a step.
        seq_len: of a sequence.
        recipe: None for BF16; else one that quantizes all six operands.
        rates: of the device.

    Example:
        >>> spent = least_seconds(MODELS["1.3b"], 8 * 2048, 2048, None, H200)
        >>> round(1e3 * spent["products of linear layers"])
        144
    """
    d, f, v, layers = model.embed_dim, model.mlp_dim, model.vocab_size, model.num_layers
    q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = layers * (d * (q + 2 * k) + q * d + 3 * d * f)
    inputs, outputs = layers * tokens * (2 * d + q + f), layers * tokens * (q + 2 * k + 2 * d + 2 * f)
    quantizes = recipe is not None and recipe.quantizes
    operations = {
        parts.PRODUCTS: 6 * tokens * weights / (rates.fp8 if quantizes else rates.bfloat16),
        parts.ATTENTION: 7 * layers * tokens * seq_len * q / rates.bfloat16,
        parts.HEAD: 6 * tokens * d * v / rates.bfloat16,
    }
    moved = {
        parts.NORMS: 32 * (layers + 0.5) * tokens * d,
        parts.SWIGLU: 16 * layers * tokens * f,
        parts.ROPE: 8 * layers * tokens * (q + k),
        parts.HEAD: 6 * d * v,
        parts.LOSS: 10 * tokens * v,
        parts.EMBEDDING: 16 * tokens * d + 4 * v * d,
        parts.OPTIMIZER: 32 * count_parameters(model),
    }
    if recipe is not None and quantizes:
        clamped = 1.0 if recipe.outliers is None else rates.outliers
        moved[parts.QUANTIZERS] = (
            4 * inputs * rates.activations * clamped + 6 * outputs * rates.gradients + 10 * weights * rates.weights
        )
        if recipe.outliers is not None and recipe.outliers.quantile == "exact":
            moved[parts.QUANTILE] = 2 * inputs * rates.quantile
        if not recipe.weight_estimator.is_identity:
            moved[parts.DGE] = 4 * weights
    else:
        moved[parts.MOVES] = 12 * weights
    return {
        group: operations.get(group, 0.0) + moved.get(group, 0) / rates.memory
        for group in parts.GROUPS
        if group in operations or group in moved
    }


def reachable(measured: float, baseline: Mapping[str, float], other: Mapping[str, float]) -> float:
    """How many times as fast as a measured step another could be, if only what ``least_seconds`` tells apart changes.

    What the measured step spends beyond its own least time stays as it is.

    Args:
        measured: seconds of the step whose least times are ``baseline``.
        baseline, other: from ``least_seconds``.

    Example:
        >>> reachable(0.3, {"products": 0.2}, {"products": 0.1, "quantizers": 0.05})
        1.2
    """
    return measured / (measured - sum(baseline.values()) + sum(other.values()))


def least(config: BenchConfig, peaks: Peaks | None) -> Iterator[Breakdown]:
    """Least times at the peaks of this run, or else of an H200; and with the kernels as measured there."""
    assert config.model is not None
    assert config.seq_len is not None
    model, tokens = MODELS[config.model], config.batch_size * config.seq_len
    peak = Rates.of(peaks)
    for how, rates in (("at the peak rates", peak), ("with the kernels as measured on an H200", KERNELS)):
        found = {
            name: least_seconds(model, tokens, config.seq_len, recipe, rates)
            for name, recipe in (("BF16", None), *((name, parse_recipe(name)) for name in config.recipes))
        }
        shown = [group for group in parts.GROUPS if any(group in seconds for seconds in found.values())]
        yield Breakdown(
            f"least time of a train step of {config.model}, {config.batch_size} × {config.seq_len} tokens, {how}",
            tuple(found),
            tuple((group, "", tuple(seconds.get(group, 0.0) for seconds in found.values())) for group in shown),
        )
