"""Recipes on command lines: `fp4`, or with knobs `fp4:alpha=0.999,k=3`. Code passes `Recipe` objects instead."""

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp4jax import scaling
from fp4jax.formats import FORMATS, FloatFormat
from fp4jax.recipe import Recipe
from fp4jax.recipes import RECIPES
from fp4jax.scaling import Granularity
from fp4jax.train.errors import ConfigError

_GRANULARITIES: Mapping[str, type[Granularity]] = {
    cls.__name__: cls for cls in (scaling.PerTensor, scaling.PerVector, scaling.PerBlock, scaling.PerBlock2D)
}
_SIZES = {"PerTensor": 0, "PerVector": 0, "PerBlock": 1, "PerBlock2D": 2}


def parse_recipe(text: str) -> Recipe:
    """The recipe that `name` or `name:knob=value,knob=value` stands for.

    Knobs are the keyword arguments of `fp4jax.recipes.<name>`. A value is a number, a word, `none`, a format (`E4M3`)
    or a granularity (`PerTensor`, `PerBlock(32)`), as the argument's annotation says.

    Raises:
        ConfigError: an unknown recipe or knob (the message lists what exists), or a value it does not take.

    Example:
        >>> parse_recipe("fp4:alpha=0.999,k=3") == fp4jax.recipes.fp4(alpha=0.999, k=3.0)
        True
    """
    name, _, knobs = text.partition(":")
    function = RECIPES[check_choice("recipe", name, RECIPES)]
    arguments = {}
    # Commas inside parentheses belong to a value: PerBlock2D(16,16).
    for part in re.split(r",(?![^(]*\))", knobs) if knobs else []:
        knob, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"recipe {text!r}: {part!r} is not knob=value, as in fp4:alpha=0.999,k=3")
        arguments[check_choice(f"recipe {text!r}: knob", knob.strip(), _hints(function))] = value.strip()
    try:
        return function(**{knob: _value(value, _hints(function)[knob]) for knob, value in arguments.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"recipe {text!r}: {error}") from error


def describe_knobs(name: str) -> str:
    """The knobs of a recipe with their defaults, as `parse_recipe` takes them: `alpha=0.99,k=5.0`."""
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    return ",".join(f"{p.name}={_text(p.default)}" for p in parameters)


def check_choice(what: str, value: str, choices: Iterable[str]) -> str:
    """`value` if it is among `choices`; else an error that lists them, the nearest first."""
    choices = list(choices)
    if value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    listing = f"choose from {', '.join(choices)}" if choices else "there are none"
    raise ConfigError(f"{what} {value!r} is unknown; {listing}{hint}")


def _hints(function: Callable[..., Recipe]) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(function).items() if name != "return"}


def _text(value: Any) -> str:
    """A knob's value as `_value` reads it."""
    if value is None:
        return "none"
    return type(value).__name__ if isinstance(value, Granularity) else str(value)


def _value(text: str, hint: Any) -> Any:
    """`text` as a value of the annotated type.

    Raises:
        ValueError: it is none.
    """
    kinds = typing.get_args(hint) or (hint,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    if FloatFormat in kinds:
        return FORMATS[check_choice("format", text.lower(), FORMATS)]
    if Granularity in kinds:
        return _granularity(text)
    if float not in kinds:
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _granularity(text: str) -> Granularity:
    match = re.fullmatch(r"(\w+)(?:\(([\d, ]*)\))?", text)
    sizes = [int(size) for size in ((match and match[2]) or "").split(",") if size.strip()]
    if match is None or len(sizes) != _SIZES.get(match[1], len(sizes)):
        raise ValueError(f"{text!r} is no granularity; write PerTensor, PerVector, PerBlock(32) or PerBlock2D(16,16)")
    return _GRANULARITIES[check_choice("granularity", match[1], _GRANULARITIES)](*sizes)
