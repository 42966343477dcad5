"""Which layer gets which recipe, and the errors of rules that do not say what they mean."""

import pytest

import fp4jax
from fp4jax.nn import default_rules, resolve_rules

FP4, FP8 = fp4jax.recipes.fp4(), fp4jax.recipes.fp8()
PATHS = ("layers.attention.query", "layers.attention.output", "layers.mlp.up", "head")


def test_the_first_match_wins_in_the_order_of_the_paths():
    resolved = resolve_rules([("head", None), (r"mlp\.", FP8), (".*", FP4)], PATHS)
    assert resolved == {
        "layers.attention.query": FP4,
        "layers.attention.output": FP4,
        "layers.mlp.up": FP8,
        "head": None,
    }
    assert tuple(resolved) == PATHS


def test_default_rules_leave_embedding_and_head_alone():
    resolved = resolve_rules(default_rules(FP4), PATHS)
    assert resolved.pop("head") is None
    assert set(resolved.values()) == {FP4}
    assert set(resolve_rules(default_rules(None), PATHS).values()) == {None}


def test_patterns_search_rather_than_match():
    assert resolve_rules([("up$", FP4), ("^head$", FP8), ("", None)], PATHS)["layers.mlp.up"] == FP4


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("qurey", "'query'"),
        ("layers.mlp.upp", "'layers.mlp.up'"),
        (r"layers\.atention\.query", "'layers.attention.query'"),
        ("haed|atention", "'head' or 'attention'"),
    ],
)
def test_a_rule_that_matches_nothing_names_what_it_may_have_meant(pattern, near):
    with pytest.raises(ValueError, match="matches no layer; did you mean") as error:
        resolve_rules([(pattern, FP4), (".*", None)], PATHS)
    message = str(error.value)
    assert message.startswith(f"rules[0]: {pattern!r} matches no layer; did you mean ")
    assert near in message
    assert message.endswith("The layers are:\n  " + "\n  ".join(PATHS))


def test_a_rule_like_no_layer_just_lists_them():
    with pytest.raises(ValueError, match=r"rules\[1\]: 'xyzzy' matches no layer\. The layers are:\n  layers"):
        resolve_rules([("layers", FP4), ("xyzzy", None), (".*", None)], PATHS)


def test_a_shadowed_rule_names_the_rule_before_it():
    message = (
        r"rules\[1\]: 'head' decides no layer, since rules before it take all it matches \('head' by rules\[0\]\); "
        "put it before them"
    )
    with pytest.raises(ValueError, match=message):
        resolve_rules([(".*", FP4), ("head", None)], PATHS)


def test_a_path_without_a_rule_says_how_to_add_one():
    message = r"no rule matches layer 'head'; add one, or end the rules with \('\.\*', None\) to leave the rest in high"
    with pytest.raises(ValueError, match=message):
        resolve_rules([("layers", FP4)], PATHS)


@pytest.mark.parametrize("rule", [("head", "fp4"), (None, FP4), "head", ("head",), ("head", FP4, None)])
def test_a_rule_of_another_kind_is_refused(rule):
    with pytest.raises(TypeError, match=r"rules\[0\] must be a pair \(pattern, Recipe or None\), got"):
        resolve_rules([rule], PATHS)


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"rules\[1\]: 'mlp\(' is not a regular expression: missing \)"):
        resolve_rules([("head", None), ("mlp(", FP4)], PATHS)


def test_rules_over_nothing():
    assert resolve_rules([], []) == {}
