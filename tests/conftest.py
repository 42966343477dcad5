"""A hostile session: eight virtual CPU devices, no excess precision, warnings are errors, strict promotion."""

import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false " + os.environ.get("XLA_FLAGS", "")
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Optax and Flax NNX raise under strict promotion, so folders that call them are exempt;
# everything fp4jax computes by itself is held to it.
_CALLS_OTHERS = (
    "nn",
    "linen",
    "models",
    "train",
    "optim",
    "parallel",
    "interop",
    "experiments",
    "cli",
    "telemetry",
    "bench",
)


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    """Mixing dtypes raises inside fp4jax's own functions."""
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    if folder.removesuffix(".py").removeprefix("test_") in _CALLS_OTHERS:
        yield
    else:
        with jax.numpy_dtype_promotion("strict"):
            yield


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory):
    """Where the programs of `program_cache` lie, for all files."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def program_cache(program_folder):
    """JAX's cache of compiled programs, for files whose tests compile the same ones; a new process has none."""
    options = {
        "jax_compilation_cache_dir": str(program_folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where no CUDA device is."""
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
