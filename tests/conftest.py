"""A hostile session: eight virtual CPU devices, no excess precision, warnings are errors, strict promotion."""

import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false " + os.environ.get("XLA_FLAGS", "")
)

import jax
import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where no CUDA device is."""
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
