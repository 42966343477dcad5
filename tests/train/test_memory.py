"""The model of activations equals what differentiation keeps of a block, for every recipe and policy, on meshes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.models import Llama, LlamaConfig, cross_entropy
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.models.remat import REMAT_POLICIES
from fp4jax.nn import resolve_rules
from fp4jax.parallel import batch_sharding, parse_mesh
from fp4jax.train.compose import recipe_rules
from fp4jax.train.config import DistributedOptions
from fp4jax.train.memory import Share, block_activations, head_activations
from fp4jax.train.naming import parse_recipe
from fp4jax.train.placement import OnMesh, Placement, make_placement
from fp4jax.train.step import Architecture

CONFIG = LlamaConfig(
    vocab_size=64, num_layers=5, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48, max_seq_len=24
)
ROWS, SEQ_LEN = 8, 23


def flash(query, key, value, *, is_causal, implementation):
    """What flash attention keeps, whatever it computes: q, k, v, its result, and a statistic a query and head."""
    del is_causal, implementation

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        out = 2 * q
        return out, (q, k, v, out, jnp.sum(q.astype(jnp.float32), axis=-1))

    def backward(kept, g):
        q, k, v, out, statistic = kept
        return g * out + q * statistic[..., None].astype(q.dtype), 2 * k, 2 * v

    attend.defvjp(forward, backward)
    return attend(query, key, value)


def on_device(x) -> int:
    """Bytes of a traced array on one device."""
    sharding = x.sharding
    shape = x.shape if sharding is None or sharding.mesh.empty else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def kind(x) -> tuple:
    """What tells traced parameters from other arrays."""
    return x.shape, x.dtype, None if x.sharding is None else x.sharding.spec


def kept_by_a_block(config: LlamaConfig, rules, placement: Placement) -> int:
    """Bytes that the loss keeps of a block for its gradient: arrays stacked over the layers.

    Without the parameters themselves, which are there anyway. No other array has as many rows as there are layers.
    """
    architecture = Architecture(lambda rngs: Llama(config, rules=rules, rngs=rngs))
    create = placement.parameters(architecture.init, architecture.parameter_axes, jax.eval_shape(architecture.init, 0))
    params, noise = jax.eval_shape(create, np.uint32(0))
    sharding = batch_sharding(placement.mesh) if isinstance(placement, OnMesh) else None
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ_LEN + 1), jnp.int32, sharding=sharding)

    def residuals(params, tokens):
        def loss(params):
            return cross_entropy(architecture.merge(params, noise, 0)(tokens[:, :-1]), tokens[:, 1:])

        return jax.vjp(loss, params)[1]

    stacked = [
        x for x in jax.tree.leaves(jax.eval_shape(residuals, params, tokens)) if x.shape[:1] == (config.num_layers,)
    ]
    own = {kind(x) for x in jax.tree.leaves(params["layers"])}
    return sum(on_device(x) for x in stacked if kind(x) not in own) // config.num_layers


CASES = [
    *(("fp4", remat, "data=2,fsdp=2,tensor=2") for remat in REMAT_POLICIES),
    *(("bf16", remat, "fsdp=4,tensor=2") for remat in ("none", "dots")),
    *((recipe, "none", "data=2,fsdp=4") for recipe in ("w4a8", "w8a4", "fp4:compensation=sparse")),
    ("fp8", "quantized", "data=2,fsdp=4"),
    ("fp4", "none", "data=8"),
    ("fp4", "none", None),
]


@pytest.mark.parametrize(("name", "remat", "mesh"), CASES)
def test_a_block_keeps_what_the_model_says(monkeypatch, name, remat, mesh):
    monkeypatch.setattr(jax.nn, "dot_product_attention", flash)
    placement, recipe = make_placement(DistributedOptions(mesh=mesh)), parse_recipe(name)
    config = dataclasses.replace(CONFIG, remat=remat)
    rules = recipe_rules(recipe, "head")
    with placement.active():
        kept = kept_by_a_block(config, rules, placement)
    sizes = parse_mesh(mesh or "data=1")
    rows = ROWS // (sizes["data"] * sizes["fsdp"])
    share = Share(rows * SEQ_LEN, sizes["tensor"], sizes["fsdp"], gathered=mesh is not None)
    assert kept == sum(block_activations(config, resolve_rules(rules, LINEAR_PATHS), share).values())


def test_quantized_operands_take_a_byte_a_value():
    recipes = dict.fromkeys(LINEAR_PATHS, parse_recipe("fp8"))
    kept = block_activations(CONFIG, recipes, Share(tokens=100), remat="quantized")
    values = 100 * (2 * 32 + 64 + 48)  # query, key and value share their input, gate and up theirs
    assert values < kept["linear inputs"] <= values + 7 * 4
    weights = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48
    assert weights < kept["weights"] <= weights + 7 * 4


def test_the_head_is_split_by_tensor_parallelism():
    one, two = (head_activations(CONFIG, Share(tokens=10, tensor=t)) for t in (1, 2))
    assert one == {"last norm": 4 * 10 * 32, "head": 2 * 32 * 64, "logits and their gradient": 6 * 10 * 64}
    assert (two["last norm"], 2 * two["head"]) == (one["last norm"], one["head"])
