"""Device side of the scaled FP8 product: a persistent, warp-specialized Mosaic GPU kernel for Hopper (sm_90).

One warpgroup copies tiles into shared memory and never stops between output tiles; two multiply. Each of the two owns
64 rows of the output tile, so that both read the same tile of rhs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

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
PREFETCH_PIECES = 16
LOADED_AHEAD = 64  # columns of the weight; fewer beside sums of more than 192, so that registers suffice


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
    cluster: int | None  # dimension along which two blocks form a cluster and share a copy: 0 for m, 1 for n, or None
    factor: Callable | None  # f' of weight · reciprocal, float32, that the result is multiplied with

    @property
    def clusters(self) -> tuple[int, int]:
        """Clusters (or blocks, where they form none) along m and n."""
        m, n = (2 if self.cluster == axis else 1 for axis in range(2))
        return -(-self.m_tiles // m), -(-self.n_tiles // n)

    @property
    def warpgroup_m(self) -> int:
        """Rows of one consumer."""
        return self.tile_m // CONSUMERS


def kernel(
    lhs_gmem, rhs_gmem, lhs_scale_gmem, rhs_scale_gmem, *rest,
    lhs_smem, rhs_smem, out_smem, full, empty, turns, problem: Problem,
):  # fmt: skip
    """Body of the kernel; copies past the ends of an operand read zeros, those past the ends of the result are lost."""
    p = problem
    *factor_gmem, out_gmem = rest  # with a factor the weight [b, m, n] and its reciprocal scales [b, n]
    warpgroup = lax.axis_index("warpgroup")

    def tile_loop(body):
        """Runs ``body(batch, m, n, step)`` over this block's output tiles; ``step`` counts k tiles since the start.

        Returns the number of k tiles.
        """

        @plgpu.nd_loop((p.batch, math.prod(p.clusters)), collective_axes="block", init_carry=jnp.int32(0))
        def steps(info, *, carry):
            batch, linear = info.index
            m, n = plgpu.planar_snake(linear, p.clusters, p.minor, p.group)
            if p.cluster == 0:
                m = 2 * m + lax.axis_index("peer")
            elif p.cluster == 1:
                n = 2 * n + lax.axis_index("peer")
            body(batch, m * p.tile_m, n * p.tile_n, carry)
            return carry + p.k_tiles

        return steps

    def produce(batch, m, n, first):
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

    def prefetch_weight(batch, m, n, piece):
        """Brings a few rows of the weight into L2, before consumers ask for them all at a time."""
        rows = p.tile_m // PREFETCH_PIECES

        @pl.when((piece >= 0) & (piece < PREFETCH_PIECES))
        def _():
            source = factor_gmem[0].at[batch, pl.ds(m + piece * rows, rows), pl.ds(n, p.tile_n)]
            plgpu.async_prefetch(source)

    def consume(batch, m, n, first):
        rows = pl.ds(warpgroup * p.warpgroup_m, p.warpgroup_m)

        def partial_sum(start, count):
            """Σ over ``count`` k tiles in the tensor core's accumulator.

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

                lax.fori_loop(0, count, multiply, None)
                value = acc[...]
                plgpu.barrier_arrive(empty.at[lax.rem(start + count - 1, p.stages)])
                return value

            value = pl.run_scoped(accumulate, plgpu.ACC((p.warpgroup_m, p.tile_n), jnp.float32))
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turns.at[1]))
            return value

        full_chunks, rest = divmod(p.k_tiles, p.promote_tiles)
        if full_chunks == 0 or (full_chunks, rest) == (1, 0):
            total = partial_sum(first, p.k_tiles)
        else:
            chunk = p.promote_tiles
            total = lax.fori_loop(
                1,
                full_chunks,
                lambda c, total: total + partial_sum(first + c * chunk, chunk),
                partial_sum(first, chunk),
            )
            if rest:
                total = total + partial_sum(first + full_chunks * chunk, rest)
        store(total, batch, m + warpgroup * p.warpgroup_m, n)

    def store(total, batch, m, n):
        shape, chunks = (p.warpgroup_m, p.tile_n), p.tile_n // p.epilogue_n
        ahead, loaded = max(1, min(LOADED_AHEAD, 256 - p.tile_n) // p.epilogue_n), []
        if p.factor is not None:
            loaded += [load_weight(batch, m, n + i * p.epilogue_n) for i in range(min(ahead, chunks))]
        lhs_scale = plgpu.load(
            lhs_scale_gmem.at[batch, pl.ds(m, p.warpgroup_m)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        rhs_scale = plgpu.load(
            rhs_scale_gmem.at[batch, pl.ds(n, p.tile_n)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        result = total * lax.broadcast_in_dim(lhs_scale, shape, (0,)) * lax.broadcast_in_dim(rhs_scale, shape, (1,))
        if p.factor is None:
            result = result.astype(out_gmem.dtype)
        for i in range(chunks):
            slot = i % out_smem.shape[1]
            chunk = result[:, i * p.epilogue_n : (i + 1) * p.epilogue_n]
            if p.factor is not None:
                if i + ahead < chunks:
                    loaded.append(load_weight(batch, m, n + (i + ahead) * p.epilogue_n))
                weight, reciprocal = loaded.pop(0)
                # Subnormal weights count here, but read as 0 where XLA's CPU code interprets this.
                u = weight * lax.broadcast_in_dim(reciprocal, chunk.shape, (1,))
                chunk = (chunk * p.factor(u)).astype(out_gmem.dtype)
            plgpu.wait_smem_to_gmem(out_smem.shape[1] - 1, wait_read_only=True)
            out_smem[warpgroup, slot] = chunk
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem.at[warpgroup, slot],
                out_gmem.at[batch, pl.ds(m, p.warpgroup_m), pl.ds(n + i * p.epilogue_n, p.epilogue_n)],
            )

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
        steps = tile_loop(produce)
        # Every arrival is awaited, so that no barrier is left in the middle of a phase.
        lax.fori_loop(
            jnp.maximum(steps - p.stages, 0),  # pyright: ignore[reportOperatorIssue]
            steps,
            lambda step, _: plgpu.barrier_wait(empty.at[lax.rem(step, p.stages)]),
            None,
        )

    def consumer():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        tile_loop(consume)
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

    slots = min(2, p.tile_n // p.epilogue_n)
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
            "out_smem": tiled((CONSUMERS, slots, p.warpgroup_m, p.epilogue_n), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=p.stages),
            "empty": empty,
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
