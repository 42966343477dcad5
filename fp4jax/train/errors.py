"""Errors a user of the training commands can mend: the command line prints their one line and exits with code 2."""

from fp4jax.packages import MissingPackageError as MissingPackageError
from fp4jax.packages import require as require


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: which setting, its value, what would work."""
