"""What goes wrong at the border: files that are no LLaMA of ours, and optional packages that are absent."""

import importlib
from types import ModuleType


class InteropError(ValueError):
    """A model file that cannot be used. The message is one line: which file or setting, its value, what would work."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is absent. The message names the extra that brings it."""


def require(module: str, purpose: str, *, install: str = "fp4jax[hf]") -> ModuleType:
    """Import an optional module, or say in one line how to get it.

    Args:
        module: dotted name.
        purpose: what it is needed for, as the subject of the message.
        install: what pip installs to have it.

    Raises:
        MissingPackageError: the package is not installed.

    Example:
        >>> require("nosuchpackage", "reading GGUF")
        Traceback (most recent call last):
        fp4jax.interop.errors.MissingPackageError: reading GGUF needs 'nosuchpackage': pip install 'fp4jax[hf]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackageError(f"{purpose} needs {package!r}: pip install '{install}'", name=module) from None
