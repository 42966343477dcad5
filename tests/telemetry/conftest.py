"""Most programs here run once, and take longer to optimize than to run."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_programs(program_cache):
    """Programs are barely optimized, and none is compiled twice. What must hold of optimized ones says so itself."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized_programs(quick_programs):
    """As users run them: for claims about bits, which fusion could change."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
