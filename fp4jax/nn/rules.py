"""Which layer gets which recipe: an ordered list of (pattern, recipe) rules, read from the top."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A pattern for the layers inside some of the blocks `name.0`, `name.1`, …; negative indices count from the end.

    `name` is the last part of the path of the list, or more of it: "layers", "encoder.layers". Linen's names for a
    list of modules, `name_0`, `name_1`, …, are found too.

    Args:
        name: of the list of blocks.
        indices: which blocks, as in Python: -1 is the last.
        part: a regular expression that must be found in the rest of the path; "" takes the whole block.

    Raises:
        ValueError: no indices.

    Example:
        >>> rules = [(Blocks("layers", (0, -1), part="mlp"), None), (".*", fp4jax.recipes.fp4())]
        >>> recipes = resolve_rules(rules, ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.2.attention"])
        >>> [path for path, recipe in recipes.items() if recipe is None]
        ['layers.0.mlp', 'layers.2.mlp']
    """

    name: str
    indices: tuple[int, ...]
    part: str = ""

    def __post_init__(self):
        object.__setattr__(self, "indices", tuple(self.indices))
        if not self.indices or not all(isinstance(index, int) for index in self.indices):
            raise ValueError(f"indices={self.indices!r} must be integers, one or more, such as (0, 1, -1)")


type Rule = tuple[str | Blocks, Recipe | None]
"""A regular expression over layer paths, or `Blocks`, and the recipe of the layers it decides (None: leave in high
precision)."""

type Rules = Sequence[Rule]
"""Rules in order of precedence."""


def default_rules(recipe: Recipe | None) -> Rules:
    """Every linear layer follows `recipe`, except embedding and head, which stay in high precision."""
    return (("embed|head", None), (".*", recipe))


def keep_blocks(name: str, *, first: int = 0, last: int = 0) -> Rule:
    """The rule that leaves the first and last blocks of a list in high precision; put it before the others.

    Args:
        name: of the list of blocks, as in `Blocks`.
        first: how many blocks at the beginning.
        last: how many at the end.

    Raises:
        ValueError: a negative number, or none to keep.

    Example:
        >>> keep_blocks("layers", first=2, last=1)
        (Blocks(name='layers', indices=(0, 1, -1), part=''), None)
    """
    if first < 0 or last < 0 or not first + last:
        raise ValueError(f"first={first} and last={last} must be numbers of blocks, not both 0")
    return Blocks(name, (*range(first), *range(-last, 0))), None


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
        TypeError: a rule is not a pair of a string or `Blocks` and a `Recipe` or None.
        ValueError: a pattern is no regular expression, decides nothing, or a path is left undecided.

    Example:
        >>> resolve_rules([("head", None), (".*", fp4jax.recipes.fp4())], ["layers.mlp.up", "head"])["head"] is None
        True
    """
    return {path: recipes[0] for path, recipes in resolve_blocks(rules, dict.fromkeys(paths)).items()}


def resolve_blocks(
    rules: Rules,
    layers: Mapping[str, int | None],
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    stacks: Iterable[str] = (),
) -> dict[str, tuple[Recipe | None, ...]]:
    """`resolve_rules` for layers of which some stand for several blocks: their parameters have a leading layer axis.

    Such a layer, say "layers.mlp.up", answers to its own path, which names it in all blocks, and to the path it would
    have in a list of blocks: "layers.3.mlp.up" names it in block 3.

    Args:
        rules: (pattern, recipe) pairs, first match wins.
        layers: number of blocks for each path, None for a layer that is not stacked.
        others: what kind of module has parameters at paths that can follow no recipe. A rule for them says None.
        stacks: paths of the modules that hold the blocks, such as "layers". Without it the index may stand behind any
            part of the path.

    Returns:
        For each path a recipe a block, or one.

    Raises:
        TypeError, ValueError: as `resolve_rules`; and a recipe is given to nothing but `others`.

    Example:
        >>> rules = [("layers.0", None), (".*", fp4jax.recipes.fp4())]
        >>> [recipe is None for recipe in resolve_blocks(rules, {"layers.mlp.up": 3})["layers.mlp.up"]]
        [True, False, False]
    """
    stacks = tuple(stacks)
    names = {
        (path, i): layer_names(path, i, stacks)
        for path, n in layers.items()
        for i in ([None] if n is None else range(n))
    }
    matchers = compile_rules(rules, [*(name for several in names.values() for name in several), *others])
    decided = {key: first_match(matchers, several) for key, several in names.items()}
    for (path, _), rule in decided.items():
        if rule is None:
            raise ValueError(
                f"no rule matches layer {path!r}; add one, or end the rules with ('.*', None) to leave the rest in "
                f"high precision. {_listing(layers)}"
            )
    for i, matcher in enumerate(matchers):
        if i not in decided.values():
            _check_idle(i, rules[i], matcher, names, decided, layers, others)
    found: dict[str, list[Recipe | None]] = {}
    for (path, _), rule in decided.items():
        if rule is not None:
            found.setdefault(path, []).append(rules[rule][1])
    return {path: tuple(recipes) for path, recipes in found.items()}


def compile_rules(rules: Rules, names: Sequence[str]) -> list[re.Pattern[str]]:
    """Each rule's pattern as a regular expression; `names` are all there are, to count blocks from the end."""
    return [_matcher(i, rule, names) for i, rule in enumerate(_checked(rules))]


def first_match(matchers: Sequence[re.Pattern[str]], names: Sequence[str]) -> int | None:
    """Number of the first rule that finds one of the names of a layer."""
    return next((i for i, matcher in enumerate(matchers) if any(map(matcher.search, names))), None)


def layer_names(path: str, block: int | None, stacks: Sequence[str] = ()) -> tuple[str, ...]:
    """What a layer answers to: its path and, as one block of a stack, the paths it would have in a list of blocks."""
    if block is None:
        return (path,)
    parts = path.split(".")
    if stacks:
        cuts = [stack.count(".") + 1 for stack in stacks if f"{path}.".startswith(f"{stack}.")]
    else:  # Beside a number would be a list of stacks, whose numbers are not those of blocks.
        cuts = [c for c in range(1, len(parts)) if not any(part.isdigit() for part in parts[c - 1 : c + 1])]
    return path, *(".".join([*parts[:c], str(block), *parts[c:]]) for c in cuts)


def _checked(rules: Rules) -> Rules:
    if isinstance(rules, Recipe) or not isinstance(rules, Sequence) or isinstance(rules, str):
        raise TypeError(
            f"rules must be a list of pairs (pattern, Recipe or None), such as [('.*', recipe)]; got {rules!r}"
        )
    for index, rule in enumerate(rules):
        match rule:
            case (str() | Blocks(), None | Recipe()):
                pass
            case _:
                raise TypeError(
                    f"rules[{index}] must be a pair (pattern, Recipe or None), got {rule!r}; "
                    "a recipe is, say, fp4jax.recipes.fp4()"
                )
    return rules


def _matcher(index: int, rule: Rule, names: Sequence[str]) -> re.Pattern[str]:
    """The rule's pattern as a regular expression."""
    pattern = rule[0]
    if isinstance(pattern, str):
        return _compile(index, pattern, "")
    prefix = rf"(?:^|\.){re.escape(pattern.name)}[._]"
    count = 1 + max((int(n) for name in names for n in re.findall(rf"{prefix}(\d+)(?=\.|$)", name)), default=-1)
    if not count:
        return re.compile(r"(?!)")  # matches nothing, which the caller finds and explains
    outside = [i for i in pattern.indices if not -count <= i < count]
    if outside:
        raise ValueError(
            f"rules[{index}]: {pattern!r} names block {outside[0]}, but {pattern.name!r} has {count}, 0 to {count - 1}"
        )
    lists: dict[str, int] = {}
    for name in names:
        for m in re.finditer(rf"{prefix}(\d+)(?=\.|$)", name):
            lists[name[: m.start(1)]] = max(lists.get(name[: m.start(1)], 0), 1 + int(m[1]))
    if any(i < 0 for i in pattern.indices) and len(set(lists.values())) > 1:
        raise ValueError(
            f"rules[{index}]: {pattern!r} counts from the end of lists of different lengths "
            f"({', '.join(f'{head[:-1]}: {n}' for head, n in lists.items())}); write a rule for each, by its whole path"
        )
    if len({i % count for i in pattern.indices}) < len(set(pattern.indices)):
        raise ValueError(f"rules[{index}]: {pattern!r} names a block twice, since {pattern.name!r} has only {count}")
    which = "|".join(str(i % count) for i in pattern.indices)
    return _compile(index, rf"{prefix}(?:{which})(?:\.|$)(?=.*(?:{pattern.part}))", pattern.part)


def _compile(index: int, pattern: str, shown: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rules[{index}]: {shown or pattern!r} is not a regular expression: {error}") from error


def _check_idle(
    index: int,
    rule: Rule,
    matcher: re.Pattern[str],
    names: Mapping[tuple[str, int | None], tuple[str, ...]],
    decided: Mapping[tuple[str, int | None], int | None],
    layers: Mapping[str, int | None],
    others: Mapping[str, str],
) -> None:
    """A rule that decides no layer: right if it leaves a convolution alone, else an error that says what is wrong."""
    pattern, recipe = rule
    shown = f"rules[{index}]: {pattern!r}"
    shadowed = [key for key, several in names.items() if any(map(matcher.search, several))]
    if shadowed:
        raise ValueError(
            f"{shown} decides no layer, since rules before it take all it matches ({shadowed[0][0]!r} by "
            f"rules[{decided[shadowed[0]]}]); put it before them"
        )
    wide = {path: kind for path, kind in others.items() if matcher.search(path)}
    if wide and recipe is None:
        return
    if wide:
        path, kind = next(iter(wide.items()))
        raise ValueError(
            f"{shown} matches only what can follow no recipe: {path!r} ({kind}) stays in high precision; write None "
            f"for it. {_listing(layers)}"
        )
    if not layers and not others:
        raise ValueError(f"{shown} matches no layer: the model has none that can follow a recipe")
    raise no_match(index, pattern, [*layers, *others], _listing(layers))


def no_match(index: int, pattern: str | Blocks, paths: Sequence[str], listing: str) -> ValueError:
    """The error of a rule that finds nothing, with what it may have meant."""
    near = _near_misses(pattern if isinstance(pattern, str) else pattern.name, paths)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return ValueError(f"rules[{index}]: {pattern!r} matches no layer{hint} {listing}")


def _near_misses(pattern: str, paths: Sequence[str]) -> list[str]:
    """Names in `paths`, whole or one part of them, that look like the pattern or one of its alternatives."""
    names = dict.fromkeys([*paths, *(part for path in paths for part in path.split("."))])
    words = [word for word in re.split(r"[^\w.]+", pattern.replace("\\.", ".")) if word]
    return list(dict.fromkeys(name for w in words for name in difflib.get_close_matches(w, names, n=2, cutoff=0.6)))


def _listing(layers: Mapping[str, int | None]) -> str:
    if not layers:
        return "There is no layer that can follow a recipe."
    lines = (path or "'' (the model itself)" for path in layers)
    stacked = {path: f" ({n} blocks, stacked)" for path, n in layers.items() if n is not None}
    return "The layers are:\n  " + "\n  ".join(line + stacked.get(line, "") for line in lines)
