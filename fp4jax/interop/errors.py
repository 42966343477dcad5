"""What goes wrong at the border: files that are no LLaMA of ours, and optional packages that are absent."""

import functools

from fp4jax import packages
from fp4jax.packages import MissingPackageError as MissingPackageError


class InteropError(ValueError):
    """A model file that cannot be used. The message is one line: which file or setting, its value, what would work."""


require = functools.partial(packages.require, install="fp4jax[hf]")
"""`fp4jax.packages.require` for the packages of the extra `hf`."""
