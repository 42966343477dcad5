"""Device side of the scaled FP8 product: a persistent, warp-specialized Mosaic GPU kernel for Hopper (sm_90).

One warpgroup copies tiles into shared memory and never stops between output tiles; two multiply. Each of the two owns
64 rows of the output tile, so that both read the same tile of rhs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp4jax.kernels.device import interpreter

CONSUMERS = 2  # warpgroups that multiply; the producer is one more
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232  # 40 · 128 + 232 · 256 of the 65,536 of a multiprocessor
PREFETCH = 24  # k tiles before the end of an output tile: 12 µs
PREFETCH_PIECES = 16  # of a tile of the weight, one a k tile
LOADED_AHEAD = 64  # columns of the weight; fewer beside sums of more than 192, so that registers suffice
DEFERRED = 192  # widest tile whose total fits the registers beside the accumulator of the next


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static sizes of a launch: ``out[b, m, n] = Σk lhs[b, m, k] rhs[b, n, k]``, in elements and tiles."""

    batch: int
    m_tiles: int
    n_tiles: int
    k_tiles: int
    tile_m: int  # of both consumers together
    tile_n: int
    tile_k: int
    stages: int
    promote_tiles: int  # k tiles after which the partial sum is added to the float32 total
    group: int  # output tiles along the minor dimension that are visited together, for L2
    minor: int  # that dimension: 0 for m, 1 for n
    epilogue_n: int
    slots: int  # chunks of epilogue_n columns that wait in shared memory to be stored, for each consumer
    cluster: int | None  # dimension along which two blocks form a cluster and share a copy: 0 for m, 1 for n, or None
    scalars: bool  # whether each operand has one scale, [1], instead of one for each row
    factor: Callable | None  # f' of weight · reciprocal, float32, that the result is multiplied with

    @property
    def clusters(self) -> tuple[int, int]:
        """Clusters (or blocks, where they form none) along m and n."""
        m, n = (2 if self.cluster == axis else 1 for axis in range(2))
        return -(-self.m_tiles // m), -(-self.n_tiles // n)

    @property
    def deferred(self) -> bool:
        """Whether a result is scaled and stored while the first products of the next output tile run.

        Not one with a factor, which takes registers of its own.
        """
        return self.factor is None and self.tile_n <= DEFERRED

    @property
    def warpgroup_m(self) -> int:
        """Rows of one consumer."""
        return self.tile_m // CONSUMERS


def scales_shape(tile_m: int, tile_n: int) -> tuple[int]:
    """Shape of a tile's scales in shared memory, lhs before rhs, each in whole 128 bytes."""
    return (tile_m + -(-tile_n // 32) * 32,)


def kernel(
    lhs_gmem, rhs_gmem, lhs_scale_gmem, rhs_scale_gmem, *rest,
    lhs_smem, rhs_smem, scales_smem, out_smem, full, empty, scales_full, scales_empty, turns, problem: Problem,
):  # fmt: skip
    """Body of the kernel; copies past the ends of an operand read zeros, those past the ends of the result are lost."""
    p = problem
    *factor_gmem, out_gmem = rest  # with a factor the weight [b, m, n] and its reciprocal scales [b, n]
    warpgroup = lax.axis_index("warpgroup")
    scalars = (lhs_scale_gmem[0], rhs_scale_gmem[0]) if p.scalars else None

    def tile_loop(body, init=None) -> Any:
        """Runs ``body(batch, m, n, step, carry)`` over this block's output tiles; ``step`` counts k tiles so far.

        Returns the number of k tiles, and the last carry.
        """
        grid, start = (p.batch, math.prod(p.clusters)), (jnp.int32(0), init)

        @plgpu.nd_loop(grid, collective_axes="block", init_carry=start)  # pyright: ignore[reportArgumentType]
        def result(info, *, carry):
            step, carry = carry
            batch, linear = info.index
            m, n = plgpu.planar_snake(linear, p.clusters, p.minor, p.group)
            if p.cluster == 0:
                m = 2 * m + lax.axis_index("peer")
            elif p.cluster == 1:
                n = 2 * n + lax.axis_index("peer")
            return step + p.k_tiles, body(batch, m * p.tile_m, n * p.tile_n, step, carry)

        return result

    def produce(batch, m, n, first, _):
        def load(i, _):
            step = first + i
            slot = lax.rem(step, p.stages)
            pl.when(step >= p.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            k = pl.ds(i * p.tile_k, p.tile_k)
            # Blocks side by side along m read the same tile of rhs, those along n the same of lhs: each copies one half
            # into the memory of both.
            copies = (
                (lhs_gmem.at[batch, pl.ds(m, p.tile_m), k], lhs_smem, 1),
                (rhs_gmem.at[batch, pl.ds(n, p.tile_n), k], rhs_smem, 0),
            )
            for source, target, shared_along in copies:
                axes = "peer" if p.cluster == shared_along else None
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot], collective_axes=axes)
            if p.factor is not None:
                prefetch_weight(batch, m, n, i - (p.k_tiles - PREFETCH))
            return _

        lax.fori_loop(0, p.k_tiles, load, None)
        if p.scalars:
            return
        # Asked for here, the scales are there long before their epilogue, and those of the tile before were read while
        # the first k tiles of this one were multiplied, so that this waits for nothing but where there are few of them.
        pl.when(first > 0)(lambda: plgpu.barrier_wait(scales_empty))
        for source, start, size, at in (
            (lhs_scale_gmem, m, p.tile_m, 0),
            (rhs_scale_gmem, n, scales_smem.shape[0] - p.tile_m, p.tile_m),
        ):
            plgpu.copy_gmem_to_smem(source.at[batch, pl.ds(start, size)], scales_smem.at[pl.ds(at, size)], scales_full)

    def prefetch_weight(batch, m, n, piece):
        """Brings a few rows of the weight into L2, before consumers ask for them all at a time."""
        rows = p.tile_m // PREFETCH_PIECES

        @pl.when((piece >= 0) & (piece < PREFETCH_PIECES))
        def _():
            source = factor_gmem[0].at[batch, pl.ds(m + piece * rows, rows), pl.ds(n, p.tile_n)]
            plgpu.async_prefetch(source)

    def consume(batch, m, n, first, before):
        rows = pl.ds(warpgroup * p.warpgroup_m, p.warpgroup_m)

        def partial_sum(start, count, meanwhile=lambda: None):
            """Σ over ``count`` k tiles in the tensor core's accumulator; ``meanwhile`` runs beside the second product.

            Consumer 0 stays one k tile ahead of consumer 1, so that one feeds the tensor cores while the other adds or
            stores: consumer 1 begins a sum once consumer 0 has issued its second product, and consumer 0 goes on to the
            next once consumer 1 has. Left to themselves they fall into step wherever both wait for data, and then both
            leave the tensor cores idle at a time.
            """
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(turns.at[0]))

            def accumulate(acc):
                def multiply(i, _):
                    slot = lax.rem(start + i, p.stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, lhs_smem.at[slot, rows], rhs_smem.at[slot].T)
                    pl.when(i == min(1, count - 1))(lambda: plgpu.barrier_arrive(turns.at[warpgroup]))
                    plgpu.wgmma_wait(1)  # the product before this one is done with its tiles
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(start + i - 1, p.stages)]))
                    return _

                lax.fori_loop(0, min(2, count), multiply, None)
                meanwhile()
                lax.fori_loop(min(2, count), count, multiply, None)
                value = acc[...]
                plgpu.barrier_arrive(empty.at[lax.rem(start + count - 1, p.stages)])
                return value

            value = pl.run_scoped(accumulate, plgpu.ACC((p.warpgroup_m, p.tile_n), jnp.float32))
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turns.at[1]))
            return value

        def store_before():
            if p.deferred:
                pl.when(first > 0)(lambda: store(*before))

        chunk = min(p.promote_tiles, p.k_tiles)
        full_chunks, rest = divmod(p.k_tiles, chunk)
        total = partial_sum(first, chunk, store_before)
        if full_chunks > 1:
            total = lax.fori_loop(1, full_chunks, lambda c, total: total + partial_sum(first + c * chunk, chunk), total)
        if rest:
            total = total + partial_sum(first + full_chunks * chunk, rest)
        tile = total, batch, m + warpgroup * p.warpgroup_m, n
        if p.deferred:
            return tile
        store(*tile)
        return before

    def store(total, batch, m, n):
        m, n = pl.multiple_of(m, p.warpgroup_m), pl.multiple_of(n, p.tile_n)  # not seen where they come with a carry
        chunks = p.tile_n // p.epilogue_n
        ahead, loaded = max(1, min(LOADED_AHEAD, 256 - p.tile_n) // p.epilogue_n), []
        if p.factor is not None:
            loaded += [load_weight(batch, m, n + i * p.epilogue_n) for i in range(min(ahead, chunks))]
        lhs_scale, rhs_scale_of = scales_of(scalars)
        for i in range(chunks):
            slot = i % p.slots
            chunk = total[:, i * p.epilogue_n : (i + 1) * p.epilogue_n]
            chunk = chunk * lhs_scale(chunk.shape)
            chunk = chunk * rhs_scale_of(i, chunk.shape)
            if p.factor is not None:
                if i + ahead < chunks:
                    loaded.append(load_weight(batch, m, n + (i + ahead) * p.epilogue_n))
                weight, reciprocal = loaded.pop(0)
                # Subnormal weights count here, but read as 0 where XLA's CPU code interprets this.
                u = weight * lax.broadcast_in_dim(reciprocal, chunk.shape, (1,))
                chunk = chunk * p.factor(u)
            if i == 0:  # stores of the tile before, of which the last may be from any slot
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            elif i >= p.slots:
                plgpu.wait_smem_to_gmem(p.slots - 1, wait_read_only=True)
            out_smem[warpgroup, slot] = chunk.astype(out_gmem.dtype)
            plgpu.commit_smem()
            # Only now: the commit also orders reads of the scales before the copy of the next.
            if i == chunks - 1 and not p.scalars:
                plgpu.barrier_arrive(scales_empty)
            plgpu.copy_smem_to_gmem(
                out_smem.at[warpgroup, slot],
                out_gmem.at[batch, pl.ds(m, p.warpgroup_m), pl.ds(n + i * p.epilogue_n, p.epilogue_n)],
            )

    def scales_of(scalars):
        """Functions that give the scales of lhs, and those of a chunk of rhs, in the layout of a chunk."""
        if p.scalars:
            return (lambda shape: scalars[0]), (lambda i, shape: scalars[1])
        plgpu.barrier_wait(scales_full)
        rows = pl.ds(warpgroup * p.warpgroup_m, p.warpgroup_m)
        lhs_scale = plgpu.load(scales_smem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def rhs_scale_of(i, shape):
            cols = pl.ds(p.tile_m + i * p.epilogue_n, p.epilogue_n)
            scale = plgpu.load(scales_smem.at[cols], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return lax.broadcast_in_dim(scale, shape, (1,))

        return (lambda shape: lax.broadcast_in_dim(lhs_scale, shape, (0,))), rhs_scale_of

    def load_weight(batch, m, n):
        """A chunk of the weight in float32 and its reciprocal scales; of one outside, which is dropped, the last."""
        weight_gmem, reciprocal_gmem = factor_gmem
        shape = p.warpgroup_m, p.epilogue_n
        m, n = (jnp.minimum(at, end - size) for at, end, size in zip((m, n), weight_gmem.shape[1:], shape, strict=True))
        source = weight_gmem.at[batch, pl.ds(m, shape[0]), pl.ds(n, shape[1])]
        weight = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        reciprocal = plgpu.load(
            reciprocal_gmem.at[batch, pl.ds(n, shape[1])], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        return weight.astype(jnp.float32), reciprocal

    def producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        steps, _ = tile_loop(produce)
        # Every arrival is awaited, so that no barrier is left in the middle of a phase.
        lax.fori_loop(
            jnp.maximum(steps - p.stages, 0),  # pyright: ignore[reportOperatorIssue]
            steps,
            lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, p.stages)]),
            None,
        )
        if not p.scalars:
            pl.when(steps > 0)(lambda: plgpu.barrier_wait(scales_empty))

    def consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        none = None
        if p.deferred:
            zeros = plgpu.layout_cast(jnp.zeros((p.warpgroup_m, p.tile_n), jnp.float32), plgpu.Layout.WGMMA)
            none = zeros, jnp.int32(0), jnp.int32(0), jnp.int32(0)
        steps, last = tile_loop(consume, none)
        if p.deferred:
            pl.when(steps > 0)(lambda: store(*last))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(warpgroup == CONSUMERS, producer, consumer)


def launch(*operands, shape, dtype, problem: Problem, blocks: int):
    """Runs the kernel on ``blocks`` blocks or clusters; ``shape`` and ``dtype`` are those of the result [b, m, n].

    ``operands`` are lhs, rhs and their scales, and with a factor the weight and its reciprocal scales: the weight's
    rows a multiple of those of a consumer, its columns one of ``epilogue_n``.
    """
    p, (lhs, rhs) = problem, operands[:2]

    def tiled(shape, dtype):
        size = jnp.dtype(dtype).itemsize
        swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
        tiling, swizzling = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))

    # A slot is free once the consumers of both blocks have read it, since either may copy into it.
    if p.cluster is None:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=p.stages)
    else:
        empty = plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=CONSUMERS, num_barriers=p.stages)
    run = plgpu.kernel(
        functools.partial(kernel, problem=p),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types={
            "lhs_smem": tiled((p.stages, p.tile_m, p.tile_k), lhs.dtype),
            "rhs_smem": tiled((p.stages, p.tile_n, p.tile_k), rhs.dtype),
            "scales_smem": plgpu.SMEM(scales_shape(p.tile_m, p.tile_n), jnp.float32),
            "out_smem": tiled((CONSUMERS, p.slots, p.warpgroup_m, p.epilogue_n), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
            "empty": empty,
            "scales_full": plgpu.Barrier(num_arrivals=2),
            "scales_empty": plgpu.Barrier(num_arrivals=CONSUMERS),
            "turns": plgpu.Barrier(num_barriers=CONSUMERS),
        },
        grid=(blocks,),
        grid_names=("block",),
        **({} if p.cluster is None else {"cluster": (2,), "cluster_names": ("peer",)}),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="fp4jax_scaled_matmul",
        # Logarithms and powers of two by one instruction each.
        compiler_params=plgpu.CompilerParams(approx_math=p.factor is not None),
        interpret=interpreter(),
    )
    return run(*operands)
