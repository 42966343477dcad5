"""Published recipes, each a function of its knobs. ``RECIPES`` lists them by name, for command lines and tests."""

from fp4jax.recipes.bf16 import bf16
from fp4jax.recipes.fp4 import fp4, fp4_direct, fp4_vector, w4a8, w8a4
from fp4jax.recipes.fp8 import fp8
from fp4jax.recipes.published import fp4_release, fp4_research

RECIPES = {
    f.__name__: f for f in (bf16, fp8, fp4_direct, fp4_vector, fp4, w4a8, w8a4, fp4_research, fp4_release)
}  # fmt: skip

__all__ = [*RECIPES, "RECIPES"]
