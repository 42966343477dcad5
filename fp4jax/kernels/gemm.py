"""Scaled FP8 product on Hopper's tensor cores: checks, configuration and launch. The kernel is in ``gemm_device``."""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fp4jax.estimators import Estimator
from fp4jax.formats import FloatFormat
from fp4jax.kernels import gemm_device
from fp4jax.kernels.device import core_count, device_kind, is_hopper
from fp4jax.typing import Array

OPERAND_DTYPES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
OUT_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
WEIGHT_DTYPES = (*OUT_DTYPES, np.dtype(np.float16))
SHARED_BYTES = 227 * 1024  # of a block on sm_90
BARRIER_BYTES = 1024  # of those, left for barriers: 8 bytes each
PROMOTE = 256
TILE_M, TILE_K = 128, 128


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """How a product is cut up; every choice gives the same result but for the order of float32 sums.

    Args:
        tile_n: columns of an output tile (rows: 128); a multiple of 16 up to 256, or 192 where sums are promoted, which
            takes twice the registers.
        stages: pairs of operand tiles in flight.
        group: output tiles along the minor dimension that are visited together, so that operands stay in L2.
        minor: that dimension, ``"m"`` or ``"n"``.
        epilogue_n: columns of a store; divides ``tile_n``.
        cluster: ``"m"`` or ``"n"``: two multiprocessors whose tiles lie side by side along that dimension read what
            they share from L2 once; ``""`` for none.

    Raises:
        ValueError: for an argument out of its range.
    """

    tile_n: int = 128
    stages: int = 4
    group: int = 8
    minor: str = "m"
    epilogue_n: int = 64
    cluster: str = ""

    def __post_init__(self):
        if not 16 <= self.tile_n <= 256 or self.tile_n % 16:
            raise ValueError(f"tile_n={self.tile_n} must be a multiple of 16 in [16, 256]")
        if self.epilogue_n < 16 or self.epilogue_n % 16 or self.tile_n % self.epilogue_n:
            raise ValueError(f"epilogue_n={self.epilogue_n} must be a multiple of 16 that divides tile_n={self.tile_n}")
        if self.stages < 2 or self.group < 1:
            raise ValueError(f"stages={self.stages} must be at least 2 and group={self.group} at least 1")
        if self.minor not in ("m", "n"):
            raise ValueError(f"minor={self.minor!r} must be 'm' or 'n'")
        if self.cluster not in ("", "m", "n"):
            raise ValueError(f"cluster={self.cluster!r} must be 'm', 'n' or '' for none")

    def slots(self, out_dtype) -> int:
        """How many stores of a tile may be under way: all of them where shared memory suffices, else at least two."""
        free = SHARED_BYTES - BARRIER_BYTES - self._operand_bytes()
        return min(self.tile_n // self.epilogue_n, max(2, free // self._store_bytes(out_dtype)))

    def shared_bytes(self, out_dtype) -> int:
        """Shared memory of a block, in bytes, but for barriers."""
        return self._operand_bytes() + self.slots(out_dtype) * self._store_bytes(out_dtype)

    def _operand_bytes(self) -> int:
        scales = 4 * math.prod(gemm_device.scales_shape(TILE_M, self.tile_n))
        return self.stages * (TILE_M + self.tile_n) * TILE_K + _up(scales, 1024)  # Mosaic aligns to 1024

    def _store_bytes(self, out_dtype) -> int:
        return TILE_M * self.epilogue_n * np.dtype(out_dtype).itemsize


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "reciprocal"], meta_fields=["estimator", "format"]
)
@dataclasses.dataclass(frozen=True)
class Factor:
    """What the gradient of a weight is multiplied with, ``f'(weight · reciprocal)``.

    Attributes:
        weight: float32, bfloat16 or float16 [*batch, m, n], of the shape of the product.
        reciprocal: r of its scales, float32 [*batch, n] or a scalar.
        estimator: one with a form for kernels; f' is its ``kernel_factor``.
        format: what the weight is rounded to.
    """

    weight: Array
    reciprocal: Array
    estimator: Estimator
    format: FloatFormat


def scaled_matmul(
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    *,
    out_dtype=jnp.bfloat16,
    promote: int | None = PROMOTE,
    config: GemmConfig | None = None,
    factor: Factor | None = None,
) -> Array:
    """``out[m, n] = (Σk lhs[m, k] · rhs[n, k]) · lhs_scale[m] · rhs_scale[n]`` with FP8 operands, both k-major.

    The tensor cores of sm_90 add FP8 products with about 14 bits, so a long sum of one sign drifts (9.6 % at k =
    11,008). Partial sums are therefore added up in float32 registers every ``promote`` steps of k.

    Args:
        lhs: E4M3 or E5M2, [*batch, m, k].
        rhs: E4M3 or E5M2, [*batch, n, k]; need not be of the dtype of ``lhs``.
        lhs_scale, rhs_scale: float32 [*batch, m] and [*batch, n], or scalars.
        out_dtype: bfloat16 or float32.
        promote: how many k a partial sum may span, a multiple of 128; None never promotes.
        config: tile sizes; by default those tuned for the shape.
        factor: what the scaled product is multiplied with, in float32, before it is rounded to ``out_dtype``.

    Returns:
        [*batch, m, n]. Sizes need not fit the tiles, and may be 0. A ``vmap`` over ``lhs`` alone gives one product of
        so many more rows; any other, or one with a ``factor``, joins the batch.

    Raises:
        TypeError: for operands or an ``out_dtype`` of another dtype.
        ValueError: for shapes that do not match, a bad ``promote``, an estimator without a form for kernels, or a
            ``config`` that takes too much shared memory.

    References:
        DeepSeek-V3 technical report, arXiv:2412.19437, §3.3.2 (the precision of FP8 sums on Hopper and promotion).
    """
    out_dtype = np.dtype(out_dtype)
    _check(lhs, rhs, out_dtype, promote)
    *batch, m, k = lhs.shape
    n = rhs.shape[-2]
    shapes = {"lhs_scale": (*batch, m), "rhs_scale": (*batch, n)}
    scales = [_scale(scale, shapes[name], name) for name, scale in zip(shapes, (lhs_scale, rhs_scale), strict=True)]
    if any(scale.ndim for scale in scales):  # else the kernel takes scalars, for which no vectors need be written
        scales = [jnp.broadcast_to(scale, shape) for scale, shape in zip(scales, shapes.values(), strict=True)]
    weight = () if factor is None else _weight(factor, (*batch, m, n))
    if math.prod((*batch, m, n, k)) == 0:
        return jnp.zeros((*batch, m, n), out_dtype)
    asked = config
    if config is None:
        config = tuned(m, n, k, out_dtype, promote, math.prod(batch))
    if promote is not None and config.tile_n > 192 and promote < k:
        raise ValueError(
            f"config.tile_n={config.tile_n} leaves no registers for promotion; use tile_n of at most 192, or "
            "promote=None"
        )
    if (used := config.shared_bytes(out_dtype) + BARRIER_BYTES) > SHARED_BYTES:
        raise ValueError(
            f"{config} takes {used} bytes of shared memory for a result in {out_dtype}, and a block has "
            f"{SHARED_BYTES}; use fewer stages or a smaller tile_n"
        )

    @jax.custom_batching.custom_vmap
    def product(*operands: Array) -> Array:
        flat = [x.reshape(math.prod(batch), *x.shape[len(batch) :]) if x.ndim else x.reshape(1) for x in operands]
        return _run(*flat, out_dtype=out_dtype, promote=promote, config=config, factor=factor).reshape(*batch, m, n)

    @product.def_vmap
    def _(size: int, mapped: list[bool], *operands: Array) -> tuple[Array, bool]:
        again = functools.partial(scaled_matmul, out_dtype=out_dtype, promote=promote, config=asked)
        a, b, a_scale, b_scale = operands[:4]
        if not batch and not mapped[1] and not mapped[3] and factor is None:  # many lhs and one rhs: so many more rows
            if mapped[2] or a_scale.ndim:
                a_scale = _mapped(a_scale, size, mapped[2]).reshape(size, -1)
                a_scale = jnp.broadcast_to(a_scale, (size, m)).reshape(size * m)
            a = _mapped(a, size, mapped[0])
            return again(a.reshape(size * m, k), b, a_scale, b_scale).reshape(size, m, n), True
        whole = [_mapped(x, size, own) if own or x.ndim else x for x, own in zip(operands, mapped, strict=True)]
        for i, length in ((2, m), (3, n)):
            if mapped[i] and operands[i].ndim == 1:  # a scale for each of the batch
                whole[i] = jnp.broadcast_to(whole[i].reshape(size, *(1 for _ in batch), 1), (size, *batch, length))
        own = None if factor is None else dataclasses.replace(factor, weight=whole[4], reciprocal=whole[5])
        return again(*whole[:4], factor=own), True

    return product(lhs, rhs, *scales, *weight)


def _mapped(x: Array, size: int, has_axis: bool) -> Array:
    """With an axis of a ``vmap`` in front."""
    return x if has_axis else jnp.broadcast_to(x, (size, *x.shape))


def _run(
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    *weight: Array,
    out_dtype,
    promote,
    config: GemmConfig,
    factor: Factor | None,
) -> Array:
    b, m, k = lhs.shape
    n = rhs.shape[1]
    m_tiles, n_tiles, k_tiles = (_up(s, t) // t for s, t in ((m, TILE_M), (n, config.tile_n), (k, TILE_K)))
    # Copies want whole swizzle tiles of 8 rows and 128 bytes; what lies past them is filled with zeros, and dropped.
    lhs, rhs = (_pad(_pad(x, -1, TILE_K), -2, 8) for x in (lhs, rhs))
    scalars = lhs_scale.ndim == 1
    if not scalars:
        lhs_scale, rhs_scale = (_pad(x, -1, 4) for x in (lhs_scale, rhs_scale))  # strides of 16 bytes
    kernel_factor = None
    if factor is not None:
        kernel_factor = functools.partial(factor.estimator.kernel_factor, format=factor.format)
        rows = TILE_M // gemm_device.CONSUMERS
        weight = _pad(_pad(weight[0], -1, config.epilogue_n), -2, rows), _pad(weight[1], -1, config.epilogue_n)
    m_out, n_out = _up(m, 8), _up(n, config.epilogue_n)
    problem = gemm_device.Problem(
        batch=b, m_tiles=m_tiles, n_tiles=n_tiles, k_tiles=k_tiles,
        tile_m=TILE_M, tile_n=config.tile_n, tile_k=TILE_K, stages=config.stages,
        promote_tiles=k_tiles if promote is None else promote // TILE_K,
        group=config.group, minor="mn".index(config.minor), epilogue_n=config.epilogue_n,
        slots=config.slots(out_dtype), scalars=scalars,
        cluster="mn".index(config.cluster) if config.cluster else None, factor=kernel_factor,
    )  # fmt: skip
    blocks = min(core_count() // (2 if config.cluster else 1), b * math.prod(problem.clusters))
    out = gemm_device.launch(
        lhs, rhs, lhs_scale, rhs_scale, *weight,
        shape=(b, m_out, n_out), dtype=out_dtype, problem=problem, blocks=blocks,
    )  # fmt: skip
    return out if out.shape[1:] == (m, n) else out[:, :m, :n]


def _check(lhs: Array, rhs: Array, out_dtype: np.dtype, promote: int | None) -> None:
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in OPERAND_DTYPES:
            raise TypeError(
                f"{name} has dtype {x.dtype}; scaled_matmul takes float8_e4m3fn or float8_e5m2 (quantize it)"
            )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype={out_dtype} must be bfloat16 or float32")
    if lhs.ndim < 2 or lhs.ndim != rhs.ndim or lhs.shape[:-2] != rhs.shape[:-2] or lhs.shape[-1] != rhs.shape[-1]:
        raise ValueError(
            f"lhs has shape {lhs.shape} and rhs {rhs.shape}; they must be [*batch, m, k] and [*batch, n, k]"
        )
    if promote is not None and (promote < TILE_K or promote % TILE_K):
        raise ValueError(f"promote={promote} must be a multiple of {TILE_K}, or None")


def _weight(factor: Factor, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The weight and its reciprocal scales [*batch, n], checked against the shape of the product."""
    if not factor.estimator.has_kernel_form:
        raise ValueError(
            f"factor.estimator={factor.estimator!r} has no form for kernels; multiply the result with its factor"
        )
    weight = factor.weight
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"factor.weight has dtype {weight.dtype}; it must be float32, bfloat16 or float16")
    if weight.shape != shape:
        raise ValueError(f"factor.weight has shape {weight.shape}; it must be that of the product, {shape}")
    columns = (*shape[:-2], shape[-1])
    return weight, jnp.broadcast_to(_scale(factor.reciprocal, columns, "factor.reciprocal"), columns)


def _scale(scale: Array, shape: tuple[int, ...], name: str) -> Array:
    scale = jnp.asarray(scale)
    if scale.dtype != jnp.float32:
        raise TypeError(f"{name} has dtype {scale.dtype}; it must be float32")
    if scale.shape not in ((), shape):
        raise ValueError(f"{name} has shape {scale.shape}; it must be a scalar or {shape}")
    return scale


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: Array, axis: int, multiple: int) -> Array:
    missing = _up(x.shape[axis], multiple) - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


# --- tuned configurations ----------------------------------------------------------------------------------------

TUNED = pathlib.Path(__file__).parent / "tuned"


@functools.cache
def _table(kind: str) -> tuple[Mapping, ...]:
    path = TUNED / f"{kind}.json"
    if not path.exists() and is_hopper():  # another card of these tensor cores, as an H100
        path = TUNED / "nvidia_h200.json"
    return tuple(json.loads(path.read_text())["gemm"]) if path.exists() else ()


def waves(m: int, n: int, config: GemmConfig, batch: int = 1) -> int:
    """How many output tiles, one after the other, the busiest multiprocessor computes."""
    m_tiles, n_tiles = -(-m // TILE_M), -(-n // config.tile_n)
    if not config.cluster:
        return -(-batch * m_tiles * n_tiles // core_count())
    clusters = -(-m_tiles // 2) * n_tiles if config.cluster == "m" else m_tiles * -(-n_tiles // 2)
    return -(-batch * clusters // (core_count() // 2))


def tuned(m: int, n: int, k: int, out_dtype, promote: int | None, batch: int = 1) -> GemmConfig:
    """The configuration expected to be fastest, of those measured on this device for that dtype and promotion.

    A wave of tiles takes ``per_k_tile`` microseconds for every 128 of k, and ``per_wave`` besides: two numbers a
    configuration, fitted to times that ``fp4jax bench --tables tune`` took at several shapes. A Hopper card that was
    not measured takes the numbers of the H200. Where there are none, the defaults of ``GemmConfig``; for a narrow
    result, a narrow tile.
    """
    if n <= 64:
        return GemmConfig(tile_n=64)
    found = [
        (waves(m, n, config, batch) * (-(-k // TILE_K) * entry["per_k_tile"] + entry["per_wave"]), position, config)
        for position, entry in enumerate(_table(device_kind()))
        if entry["out_dtype"] == str(np.dtype(out_dtype)) and entry["promote"] == (promote or 0)
        for config in [GemmConfig(**entry["config"])]
    ]
    return min(found)[2] if found else GemmConfig()
