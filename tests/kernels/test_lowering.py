"""Every shipped configuration is lowered for CUDA here, without a GPU: interpret mode takes what lowering rejects.

By itself and with its blocks in clusters either way, since the tuner may come to prefer those.
"""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.triton import lowering as triton_lowering
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import kernels
from fp4jax.kernels import (
    Factor,
    GemmConfig,
    QuantizerConfig,
    Wanted,
    gemm,
    order_statistics,
    quantize_rows,
    quantize_tiles,
    scaled_matmul,
)  # fmt: skip

# Pallas on Triton is deprecated in jax 0.11.2, and still the only way to these quantizers.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

E2M1 = fp4jax.QuantSpec(fp4jax.E2M1)
NOISY = fp4jax.QuantSpec(fp4jax.E2M1, scale=fp4jax.PowerOfTwo("rceil"), rounding=fp4jax.STOCHASTIC)
E5M2 = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())


@pytest.fixture(autouse=True)
def _verified(monkeypatch):
    """JAX does not verify the Triton modules it lowers to, and the GPU's compiler then rejects them."""
    lower = triton_lowering.lower_jaxpr_to_triton_module

    def verified(*args, **kwargs):
        result = lower(*args, **kwargs)
        assert result.module.operation.verify()
        return result

    monkeypatch.setattr(triton_lowering, "lower_jaxpr_to_triton_module", verified)


def lower(f, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with kernels.lowering_for():
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def shipped() -> list:
    cases = []
    for path in sorted(gemm.TUNED.glob("*.json")):
        for entry in json.loads(path.read_text())["gemm"]:
            sizes = tuple(entry["measured"][0][:3])
            for cluster in dict.fromkeys((entry["config"].get("cluster", ""), "m", "n")):
                config = GemmConfig(**{**entry["config"], "cluster": cluster})
                case = sizes, entry["out_dtype"], entry["promote"] or None, config
                cases += [case] if case not in cases else []
    cases += [((1, 7, 40), out, 256, None) for out in ("bfloat16", "float32")]
    return [*cases, ((130, 200, 400), "float32", None, None), ((4096, 4096, 4096), "float32", 256, None)]


@pytest.mark.parametrize("case", shipped(), ids=str)
def test_products(case):
    (m, n, k), out_dtype, promote, config = case
    text = lower(
        lambda *a: scaled_matmul(*a, out_dtype=out_dtype, promote=promote, config=config),
        ((m, k), jnp.float8_e4m3fn), ((n, k), jnp.float8_e5m2), ((m,), jnp.float32), ((n,), jnp.float32),
    )  # fmt: skip
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("case", [case for case in shipped() if case[1] == "float32"], ids=str)
def test_products_with_a_factor(case):
    (m, n, k), out_dtype, promote, config = case
    dtype, reciprocal = (jnp.bfloat16, ()) if config is None else (jnp.float32, (n,))

    def f(a, b, w, r):
        factor, one = Factor(w, r, fp4jax.DGE(), fp4jax.E2M1), jnp.float32(1)
        return scaled_matmul(a, b, one, one, out_dtype=out_dtype, promote=promote, config=config, factor=factor)

    shapes = ((m, k), jnp.float8_e4m3fn), ((n, k), jnp.float8_e5m2), ((m, n), dtype), (reciprocal, jnp.float32)
    assert "mosaic_gpu" in lower(f, *shapes)


@pytest.mark.parametrize("shape", [(16384, 4096), (512, 11008), (129, 127)], ids=str)
def test_quantizers_and_quantile(shape):
    m, n = shape
    x, rows, cols = (shape, jnp.bfloat16), ((m,), jnp.float32), ((n,), jnp.float32)
    bound, occ = ((), jnp.float32), fp4jax.OCC()
    texts = [
        lower(lambda x: quantize_rows(x, E2M1), x),
        lower(lambda x, r: quantize_rows(x, E2M1, fold=r, transpose=True), x, rows),
        lower(lambda x, a, b: quantize_rows(x, E2M1, thresholds=(a, b), occ=occ, transpose=True), x, bound, bound),
        lower(lambda w: quantize_tiles(w, E2M1, (Wanted(1, transposed=True),)), (shape, jnp.float32)),
        lower(
            lambda g, r, c: quantize_tiles(g, E5M2, (Wanted(None, c, 1), Wanted(None, r, 0, False, True))),
            x,
            rows,
            cols,
        ),
        lower(lambda x, k: quantize_rows(x, NOISY, transpose=True, key=k), x, ((2,), jnp.uint32)),
        lower(lambda x: quantize_rows(x, E2M1, transpose=True, config=QuantizerConfig(128, 64, 4, 4)), x),
        lower(
            lambda w: quantize_tiles(w, E2M1, (Wanted(1, transposed=True),), config=QuantizerConfig(64, 64, 4, 4)), x
        ),
        lower(lambda x: order_statistics(x, (0, 1)), x),
    ]
    assert all("triton" in text for text in texts)


def test_a_quantizer_whose_devices_agree_on_scales():
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("d",), (jax.sharding.AxisType.Explicit,), abstract_device=device)
    bounds = jnp.float32(-1), jnp.float32(1)

    def local(x):
        rows = quantize_rows(x, E2M1, thresholds=bounds, occ=fp4jax.OCC(), transpose=True, names=("d",))
        tensor, columns = quantize_tiles(x, E5M2, (Wanted(None, names=("d",)), Wanted(1, None, None, False, True)))
        return rows.values, tensor.values, columns.transposed

    with jax.sharding.use_abstract_mesh(mesh):
        split = P(None, "d")
        f = jax.shard_map(local, in_specs=split, out_specs=(split, split, P("d")), check_vma=False)
        x = jax.ShapeDtypeStruct((512, 11008), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, split))
        text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 4
    assert text.count("all_reduce") == 2


BATCH, MATMUL = (((2,), (1,)), ((0,), (0,))), (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("how", ["batch axes", "vmap", "vmap, one weight"])
def test_products_of_several_matrices(how):
    def layer(x, w, g):
        dims = BATCH if how == "batch axes" else MATMUL
        y, vjp = jax.vjp(functools.partial(dot, dimension_numbers=dims), x, w)
        return y, *vjp(g)

    dot, shared = fp4jax.DotGeneral(fp4jax.recipes.fp4(alpha=None), "hopper"), how == "vmap, one weight"
    f = layer if how == "batch axes" else jax.vmap(layer, in_axes=(0, None if shared else 0, 0))
    shapes = (2, 512, 256), (256, 768) if shared else (2, 256, 768), (2, 512, 768)
    text = lower(f, *zip(shapes, (jnp.bfloat16, jnp.float32, jnp.bfloat16), strict=True))
    assert text.count("custom_call @mosaic_gpu") == 3
