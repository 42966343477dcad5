"""Work over several devices: meshes, and gradient reduction in FP8."""

from fp4jax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    LOGICAL_AXES,
    batch_sharding,
    make_mesh,
    parameter_sharding,
    parse_mesh,
)
from fp4jax.parallel.reduce import fp8_mean, fp8_mean_scatter, gather_shards, local_shards

__all__ = [
    "AXES",
    "BATCH_AXES",
    "LOGICAL_AXES",
    "batch_sharding",
    "fp8_mean",
    "fp8_mean_scatter",
    "gather_shards",
    "local_shards",
    "make_mesh",
    "parameter_sharding",
    "parse_mesh",
]
