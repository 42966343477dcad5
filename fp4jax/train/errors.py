"""Errors a user of the training commands can mend: the command line prints their one line and exits with code 2."""

import contextlib
import re
from collections.abc import Iterator

from fp4jax.packages import MissingPackageError as MissingPackageError
from fp4jax.packages import require as require


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: which setting, its value, what would work."""


@contextlib.contextmanager
def naming_high_precision(pattern: str) -> Iterator[None]:
    """Within it, what is wrong with the rule that `high_precision` became, the first of two, names that setting.

    Raises:
        ConfigError: the block raised a ValueError about that rule, or about what it leaves to the second.
    """
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())
        first, second = f"rules[0]: {pattern!r} ", "rules[1]: '.*' decides no layer"
        if not pattern or not text.startswith((first, second)):
            raise
        if text.startswith(second):
            message = "matches every layer, and leaves none to the recipe: give fewer"
        else:
            message, listed, layers = text.removeprefix(first).partition(" The layers are: ")
            if listed:
                names = re.sub(r" \(\d+ blocks, stacked\)", "", layers).split()
                message = f"{message.rstrip('.')} (the layers are {', '.join(names)})"
        raise ConfigError(f"high_precision={pattern!r} {message}") from error
