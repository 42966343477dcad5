"""Errors a user of the training commands can mend: the command line prints their one line and exits with code 2."""

import importlib
from types import ModuleType


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: which setting, its value, what would work."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is absent. The message names the extra that brings it."""


def require(module: str, purpose: str, *, instead: str = "") -> ModuleType:
    """Import a module of the `train` extra, or say in one line how to get it.

    Args:
        module: dotted name.
        purpose: what it is needed for, as the subject of the message.
        instead: what the user can do without it, such as "pass --no-tensorboard".

    Raises:
        MissingPackageError: the package is not installed.

    Example:
        >>> require("nosuchpackage", "drawing curves")
        Traceback (most recent call last):
        fp4jax.train.errors.MissingPackageError: drawing curves needs 'nosuchpackage': pip install 'fp4jax[train]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        alternative = f", or {instead}" if instead else ""
        raise MissingPackageError(
            f"{purpose} needs {package!r}: pip install 'fp4jax[train]'{alternative}", name=module
        ) from None
