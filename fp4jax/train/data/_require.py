"""Import what the `data` extra brings, with one clear error where it is absent."""

import importlib
from types import ModuleType


def require(module: str, purpose: str) -> ModuleType:
    """Import `module`, or say which extra brings it.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {module!r}: pip install 'fp4jax[data]'", name=module
        ) from None
