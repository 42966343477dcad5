"""The gradient through a quantizer: straight-through, clipped, and the paper's differentiable gradient estimator."""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.exact import as_float32
from fp4jax.formats import FloatFormat
from fp4jax.quantize import QuantSpec, check_spec, find_scales, quantize, scaled_input
from fp4jax.rounding import position
from fp4jax.scaling import normalize_axis
from fp4jax.typing import Array, Axis, Key


class Estimator(abc.ABC):
    """The factor f'(u) that stands for the derivative of rounding at u = x · r.

    The scale's own derivative is not taken (it cancels in the product r · (1 / r); arXiv:2501.17116, App. C.2), so
    ``dx = dx_quantized · f'(u)``.
    """

    is_identity = False

    @property
    def has_kernel_form(self) -> bool:
        """Whether there is a ``kernel_factor``. Without one the factor is an operation of its own after the product."""
        return type(self).kernel_factor is not Estimator.kernel_factor

    @abc.abstractmethod
    def factor(self, u: Array, format: FloatFormat) -> Array:
        """f'(u), of the shape and dtype of ``u``.

        Args:
            u: the input in units of the grid; float32, bfloat16 or float16.
            format: the format it is rounded to.
        """

    def kernel_factor(self, u: Array, format: FloatFormat) -> Array:
        """f'(u) of float32 ``u`` in operations that Pallas lowers inside a kernel; close to ``factor``, as each says.

        Raises:
            NotImplementedError: for an estimator without ``has_kernel_form``.
        """
        raise NotImplementedError(f"{self!r} has no form for kernels; use factor")


@dataclasses.dataclass(frozen=True)
class STE(Estimator):
    """Straight-through: f' = 1 (Bengio et al., arXiv:1308.3432)."""

    is_identity = True

    def factor(self, u, format):
        return jnp.ones_like(u)


@dataclasses.dataclass(frozen=True)
class ClippedSTE(Estimator):
    """Straight-through inside the range: f' = 1 where |u| ≤ max, else 0.

    Under ``AbsMax`` scales all of it is inside: if rounding puts the largest x · r an ulp above max, it counts as max.
    """

    def factor(self, u, format):
        limit = jnp.float32(format.max * (1 + 2.0**-22))
        return (jnp.abs(u.astype(jnp.float32)) <= limit).astype(u.dtype)

    def kernel_factor(self, u, format):
        return self.factor(u, format)


@dataclasses.dataclass(frozen=True)
class DGE(Estimator):
    """Differentiable gradient estimator (arXiv:2501.17116, §3.1, Eq. 8).

    In the grid interval [l, r) that holds u, with p = 2(u - l)/(r - l) - 1, the staircase is replaced by
    ``f(u) = l + (r - l)/2 · (1 + sgn(p)|p|^(1/k))``, so

        f'(u) = min(|p|^(1/k - 1) / k, clip).

    That is ``clip`` at the midpoints and 1/k on the grid; the mean over an interval is .593 for k = 5, clip = 3. ±max
    and anything past it count as the end of the outermost interval. Meant for weights.

    Args:
        k: > 1; larger is nearer to the staircase (paper: 5; 3 and 10 in its ablation).
        clip: largest factor, > 0 (paper: 3).

    Raises:
        ValueError: for ``k`` or ``clip`` out of range.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> fp4jax.DGE().factor(jnp.array([0.0, 0.25, 5.0]), fp4jax.E2M1).tolist()
        [0.20000000298023224, 3.0, 3.0]
    """

    k: float = 5.0
    clip: float = 3.0

    def __post_init__(self):
        if not self.k > 1:
            raise ValueError(f"k={self.k} must be above 1 (k = 1 is STE())")
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be positive")

    @jax.named_scope("dge_factor")
    def factor(self, u, format):
        p = jnp.abs(position(u.astype(jnp.float32), format) * jnp.float32(2) - jnp.float32(1))
        # The infinity of |0|^(1/k - 1) is cut off before anything could be differentiated through it.
        power = jnp.where(p == 0, jnp.float32(1), p) ** jnp.float32(1 / self.k - 1)
        slope = jnp.where(p == 0, jnp.float32(self.clip), power * jnp.float32(1 / self.k))
        return jnp.minimum(slope, jnp.float32(self.clip)).astype(u.dtype)

    def kernel_factor(self, u, format):
        """The |p| of ``factor``, bit for bit, without a floor, which does not lower; its power by log2 and exp2.

        The hardware's are good to 2⁻²² (PTX ISA, ``lg2.approx`` and ``ex2.approx``), and so the factor to 2⁻¹⁹ of
        itself for the paper's k and clip. It is exact at midpoints, where log2 is -∞, and on the grid, where it is 0.
        """
        magnitude = jnp.minimum(jnp.abs(u), jnp.float32(format.max))
        bits, smallest = lax.bitcast_convert_type(magnitude, jnp.int32), (format.min_exponent + 127) << 23
        step = jnp.maximum(bits & 0x7F800000, smallest) - (format.mantissa_bits << 23)  # its exponent, in place
        scaled = magnitude * lax.bitcast_convert_type((254 << 23) - step, jnp.float32)
        # Adding and taking away 1.5 · 2²³ rounds to an integer, and sums run faster than the hardware's rounding. The
        # barrier hides the constant from XLA, which would drop both sums where kernels are interpreted.
        shift = lax.optimization_barrier(jnp.float32(1.5 * 2**23))
        p = jnp.float32(1) - jnp.float32(2) * jnp.abs(scaled - ((scaled + shift) - shift))
        power = jnp.exp2(jnp.log2(p) * jnp.float32(1 / self.k - 1))
        return jnp.minimum(power * jnp.float32(1 / self.k), jnp.float32(self.clip))


ESTIMATORS = {"ste": STE, "clipped_ste": ClippedSTE, "dge": DGE}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _fake_quant(x: Array, key: Key | None, spec: QuantSpec, axis: tuple[int, ...], estimator: Estimator) -> Array:
    return quantize(x, spec, axis=axis, key=key).dequantize(x.dtype)


def _fake_quant_fwd(x, key, spec, axis, estimator):
    return _fake_quant(x, key, spec, axis, estimator), (None if estimator.is_identity else x)


def _fake_quant_bwd(spec, axis, estimator, x, g):
    if x is None:
        return g, None
    return (g.astype(jnp.float32) * gradient_factor(x, spec, axis, estimator)).astype(g.dtype), None


_fake_quant.defvjp(_fake_quant_fwd, _fake_quant_bwd)


def gradient_factor(x: Array, spec: QuantSpec, axis: tuple[int, ...], estimator: Estimator) -> Array:
    """f'(x · r), float32, with the scales that ``quantize(x, spec)`` finds."""
    value = as_float32(x)
    return estimator.factor(scaled_input(value, find_scales(value, spec, axis), spec, axis), spec.format)


def fake_quant(x: Array, spec: QuantSpec, *, axis: Axis, estimator: Estimator = STE(), key: Key | None = None) -> Array:
    """Quantizes and dequantizes ``x``; its gradient is the estimator's: ``dx = dy · f'(x · r)``.

    Args:
        x: float32, bfloat16 or float16 array.
        spec: what to quantize to.
        axis: the contraction axis or axes.
        estimator: ``STE()``, ``ClippedSTE()`` or ``DGE()``.
        key: PRNG key; compulsory for ``STOCHASTIC`` rounding.

    Returns:
        An array of the shape and dtype of ``x``; so is its gradient.

    Raises:
        TypeError, ValueError: as ``quantize`` does.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> f = lambda x: fp4jax.fake_quant(x, fp4jax.QuantSpec(fp4jax.E2M1), axis=-1, estimator=fp4jax.DGE()).sum()
        >>> jax.grad(f)(jnp.array([6.0, 0.25, 1.0])).tolist()
        [0.20000000298023224, 3.0, 0.20000000298023224]
    """
    check_spec(spec)
    x = jnp.asarray(x)
    if not isinstance(estimator, Estimator):
        raise TypeError(f"estimator={estimator!r} must be an Estimator such as STE() or DGE()")
    if spec.needs_key and key is None:
        raise ValueError(f"rounding={spec.rounding!r} draws noise and key=None; pass key=jax.random.key(...)")
    return _fake_quant(x, key, spec, normalize_axis(axis, x.ndim), estimator)
