"""Training on several devices: gradients reduced in FP8, inside ``jax.shard_map``."""

from fp4jax.parallel.reduce import fp8_mean, fp8_mean_scatter, gather_shards, local_shards

__all__ = ["fp8_mean", "fp8_mean_scatter", "gather_shards", "local_shards"]
