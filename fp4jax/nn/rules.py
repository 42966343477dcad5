"""Which layer gets which recipe: an ordered list of (pattern, recipe) rules, read from the top."""

import difflib
import re
from collections.abc import Iterable, Sequence

from fp4jax.recipe import Recipe

type Rule = tuple[str, Recipe | None]
"""A regular expression over layer paths, and the recipe of the layers it decides (None: leave in high precision)."""

type Rules = Sequence[Rule]
"""Rules in order of precedence."""


def default_rules(recipe: Recipe | None) -> Rules:
    """Every linear layer follows `recipe`, except embedding and head, which stay in high precision."""
    return (("embed|head", None), (".*", recipe))


def resolve_rules(rules: Rules, paths: Iterable[str]) -> dict[str, Recipe | None]:
    """Give every path the recipe of the first rule whose pattern `re.search` finds in it.

    Nothing is left to chance: a path that no rule decides raises, and so does a rule that decides no path, which is
    what a misspelled or shadowed rule does.

    Args:
        rules: (pattern, recipe) pairs, first match wins.
        paths: dotted layer paths, such as "layers.attention.query".

    Returns:
        The recipe of every path, in the order of `paths`.

    Raises:
        TypeError: a rule is not a pair of a string and a `Recipe` or None.
        ValueError: a pattern is no regular expression, decides nothing, or a path is left undecided.

    Example:
        >>> resolve_rules([("head", None), (".*", fp4jax.recipes.fp4())], ["layers.mlp.up", "head"])["head"] is None
        True
    """
    paths = tuple(paths)
    compiled = [_compile(i, rule) for i, rule in enumerate(rules)]
    decided_by = {path: next((i for i, p in enumerate(compiled) if p.search(path)), None) for path in paths}

    for path, rule in decided_by.items():
        if rule is None:
            raise ValueError(
                f"no rule matches layer {path!r}; add one, or end the rules with ('.*', None) to leave the rest in "
                f"high precision. {_listing(paths)}"
            )
    for i, pattern in enumerate(compiled):
        if i not in decided_by.values():
            raise ValueError(_explain_idle(i, pattern, paths, decided_by))
    return {path: rules[rule][1] for path, rule in decided_by.items() if rule is not None}


def _compile(index: int, rule: Rule) -> re.Pattern[str]:
    match rule:
        case (str(pattern), None | Recipe()):
            try:
                return re.compile(pattern)
            except re.error as error:
                raise ValueError(f"rules[{index}]: {pattern!r} is not a regular expression: {error}") from error
    raise TypeError(f"rules[{index}] must be a pair (pattern, Recipe or None), got {rule!r}")


def _explain_idle(index: int, pattern: re.Pattern[str], paths: Sequence[str], decided_by: dict[str, int | None]) -> str:
    """Why rule `index` decides nothing, and what would make it."""
    shadowed = [path for path in paths if pattern.search(path)]
    if shadowed:
        first = decided_by[shadowed[0]]
        return (
            f"rules[{index}]: {pattern.pattern!r} decides no layer, since rules before it take all it matches "
            f"({shadowed[0]!r} by rules[{first}]); put it before them"
        )
    near = _near_misses(pattern.pattern, paths)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"rules[{index}]: {pattern.pattern!r} matches no layer{hint} {_listing(paths)}"


def _near_misses(pattern: str, paths: Sequence[str]) -> list[str]:
    """Names in `paths`, whole or one part of them, that look like the pattern or one of its alternatives."""
    names = dict.fromkeys([*paths, *(part for path in paths for part in path.split("."))])
    words = [word for word in re.split(r"[^\w.]+", pattern.replace("\\.", ".")) if word]
    return list(dict.fromkeys(name for w in words for name in difflib.get_close_matches(w, names, n=2, cutoff=0.6)))


def _listing(paths: Sequence[str]) -> str:
    return "The layers are:\n  " + "\n  ".join(paths)
