"""Optional packages: imported where they are needed, and one line about how to get them where they are absent."""

import importlib
from types import ModuleType


class MissingPackageError(ModuleNotFoundError):
    """An optional package is absent. The message names the extra that brings it."""


def require(module: str, purpose: str, *, install: str = "fp4jax[train]", instead: str = "") -> ModuleType:
    """Import an optional module, or say in one line how to get it.

    Args:
        module: dotted name.
        purpose: what it is needed for, as the subject of the message.
        install: what pip installs to have it.
        instead: what the user can do without it, such as "pass --no-tensorboard".

    Raises:
        MissingPackageError: the package is not installed.

    Example:
        >>> require("nosuchpackage", "drawing curves")
        Traceback (most recent call last):
        fp4jax.packages.MissingPackageError: drawing curves needs 'nosuchpackage': pip install 'fp4jax[train]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        alternative = f", or {instead}" if instead else ""
        raise MissingPackageError(
            f"{purpose} needs {package!r}: pip install '{install}'{alternative}", name=module
        ) from None
