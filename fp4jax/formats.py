"""What a number is: floating-point formats of at most eight bits, their grids, and how four-bit codes are packed."""

import dataclasses
import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fp4jax.typing import Array

_STORES = (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32)


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A small floating-point format.

    A code with exponent field E > 0 and mantissa field M stands for ``±2^(E - bias) · (1 + M / 2^m)``, one with E = 0
    for ``±2^(1 - bias) · M / 2^m`` (m = ``mantissa_bits``). The grid ends at ``max``: codes beyond it, which
    hold NaN or infinity in E4M3 and E5M2, are not values.

    Args:
        name: short lower-case name, the key in ``FORMATS``.
        exponent_bits: bits of the exponent field.
        mantissa_bits: bits of the mantissa field.
        max: the largest finite value.
        dtype: the ml_dtypes type of the same name, or None if there is none.
        bias: of the exponent field; by default IEEE's, ``2^(exponent_bits - 1) - 1``.
        signed: whether there is a sign bit (E8M0 has none, and no zero either).

    Raises:
        ValueError: if ``max`` is not a value of the fields given.

    Example:
        >>> from fp4jax.formats import E2M1
        >>> E2M1.grid[7:].tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        >>> E2M1.bits
        4

    References:
        Wang et al., arXiv:2501.17116, Table 4 (E1M2, E2M1, E3M0); OCP 8-bit Floating Point Specification 1.0 (E4M3,
        E5M2); OCP Microscaling Formats Specification 1.0 (E2M1, E8M0).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: type | None = None
    bias: int | None = None
    signed: bool = True

    def __post_init__(self):
        if not np.any(self.grid == np.float32(self.max)):
            raise ValueError(
                f"max={self.max} is not a value of a format with {self.exponent_bits} exponent and "
                f"{self.mantissa_bits} mantissa bits; its largest values are {self._codes()[-3:].tolist()}"
            )

    @property
    def bits(self) -> int:
        """Bits of one code, the sign included."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        bias = 2 ** (self.exponent_bits - 1) - 1 if self.bias is None else self.bias
        return self.signed - bias

    def _codes(self) -> np.ndarray:
        fields = np.arange(2 ** (self.exponent_bits + self.mantissa_bits))
        exponent, mantissa = (
            fields >> self.mantissa_bits,
            (fields & (2**self.mantissa_bits - 1)) / 2**self.mantissa_bits,
        )
        if not self.signed:
            return np.ldexp(1 + mantissa, exponent + self.min_exponent)
        normal = np.ldexp(1 + mantissa, np.maximum(exponent, 1) - 1 + self.min_exponent)
        return np.where(exponent > 0, normal, np.ldexp(mantissa, self.min_exponent))

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """All finite values in ascending order, float32; zero once."""
        positive = self._codes()
        positive = positive[positive <= self.max]
        values = np.unique(np.concatenate([-positive, positive])) if self.signed else positive
        grid = (values + 0.0).astype(np.float32)
        grid.setflags(write=False)
        return grid

    @functools.cached_property
    def storage_dtype(self) -> np.dtype:
        """The dtype that holds values of this format: its own, else the narrowest one that holds the grid exactly."""
        if self.dtype is not None:
            return np.dtype(self.dtype)
        with np.errstate(over="ignore"):
            return next(
                np.dtype(t) for t in _STORES if np.array_equal(self.grid.astype(t).astype(np.float32), self.grid)
            )

    def __repr__(self) -> str:
        return self.name.upper()


E2M1 = FloatFormat("e2m1", 2, 1, 6.0, ml_dtypes.float4_e2m1fn)
E1M2 = FloatFormat("e1m2", 1, 2, 3.5)
E3M0 = FloatFormat("e3m0", 3, 0, 16.0)
E4M3 = FloatFormat("e4m3", 4, 3, 448.0, ml_dtypes.float8_e4m3fn)
E5M2 = FloatFormat("e5m2", 5, 2, 57344.0, ml_dtypes.float8_e5m2)
E8M0 = FloatFormat("e8m0", 8, 0, 2.0**127, ml_dtypes.float8_e8m0fnu, signed=False)

FORMATS = {f.name: f for f in (E2M1, E1M2, E3M0, E4M3, E5M2, E8M0)}


def pack_nibbles(codes: Array) -> Array:
    """Packs four-bit codes along the last axis, element 0 in the low nibble: ``byte = codes[2i] | codes[2i+1] << 4``.

    Args:
        codes: unsigned or E2M1 array [..., n]; the low four bits of each element count. E2M1 values are packed by code.

    Returns:
        uint8 array [..., ceil(n / 2)]; for odd n the last high nibble is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> [hex(b) for b in pack_nibbles(jnp.asarray([0.5, 6.0, -0.0, 1.5], jnp.float4_e2m1fn)).tolist()]
        ['0x71', '0x38']
    """
    if codes.dtype == jnp.float4_e2m1fn:
        codes = encode(codes, E2M1)
    codes = codes.astype(jnp.uint8) & jnp.uint8(0xF)
    if codes.shape[-1] % 2:
        codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
    return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


def unpack_nibbles(packed: Array, size: int) -> Array:
    """Undoes ``pack_nibbles``: uint8 [..., ceil(size / 2)] to uint8 codes [..., size].

    Raises:
        ValueError: if ``packed`` does not hold ``size`` codes a row.
    """
    if packed.shape[-1] != (size + 1) // 2:
        raise ValueError(f"{size=} codes take {(size + 1) // 2} bytes a row, but packed has shape {packed.shape}")
    pairs = jnp.stack([packed & jnp.uint8(0xF), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :size]


def encode(values: Array, format: FloatFormat) -> Array:
    """Codes of values that lie on the grid of ``format``: sign, exponent and mantissa fields as uint8.

    Args:
        values: array of any float dtype whose elements are values of ``format`` (-0 keeps its sign bit).
    """
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    field = (bits >> 23) & 0xFF
    if not format.signed:
        return (field - 127 - format.min_exponent).astype(jnp.uint8)
    m, smallest = format.mantissa_bits, format.min_exponent + 127
    exponent = jnp.maximum(field, smallest)
    inverse_step = lax.bitcast_convert_type((254 + m - exponent) << 23, jnp.float32)
    units = (jnp.abs(values.astype(jnp.float32)) * inverse_step).astype(jnp.int32)
    code = ((exponent - smallest) << m) + units
    return (code | ((bits >> 31) & 1) << (format.bits - 1)).astype(jnp.uint8)


def decode(codes: Array, format: FloatFormat) -> Array:
    """Values of codes, float32: the inverse of ``encode``.

    Args:
        codes: uint8 array; only the low ``format.bits`` bits count. A code past the largest value is NaN.
    """
    positive = format._codes()
    positive = np.where(positive <= format.max, positive, np.nan).astype(np.float32)
    table = np.concatenate([positive, -positive]) if format.signed else positive
    return jnp.asarray(table)[codes.astype(jnp.int32) & (2**format.bits - 1)]
