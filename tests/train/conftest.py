"""Programs that one test of training has compiled are not compiled again by the next."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

EVERYTHING = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory):
    """Where compiled programs lie, for all files."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def program_cache(program_folder):
    """JAX's cache of compiled programs, on while the tests of a file run that ask for it; new processes have none."""
    options = {"jax_compilation_cache_dir": str(program_folder), **EVERYTHING}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
