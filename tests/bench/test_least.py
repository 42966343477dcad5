"""The least time of a train step: against counts by hand, and against what was measured."""

import dataclasses
import pathlib

import pytest

from fp4jax.bench import parts
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.least import H200, KERNELS, Rates, least, least_seconds, reachable
from fp4jax.bench.measure import Peaks
from fp4jax.models import MODELS
from fp4jax.train.naming import parse_recipe

MODEL, TOKENS = MODELS["1.3b"], 8 * 2048


def of(recipe: str | None, rates: Rates = H200) -> dict[str, float]:
    return least_seconds(MODEL, TOKENS, 2048, None if recipe is None else parse_recipe(recipe), rates)


def test_products_are_six_operations_a_weight_and_token():
    weights = 24 * (4 * 2048**2 + 3 * 2048 * 5504)
    assert of(None)[parts.PRODUCTS] == pytest.approx(6 * weights * TOKENS / 830e12)
    assert of("fp4")[parts.PRODUCTS] == pytest.approx(6 * weights * TOKENS / 1622e12)


def test_what_a_recipe_leaves_out_costs_nothing():
    assert set(of("fp4_vector")) == set(of(None)) - {parts.MOVES} | {parts.QUANTIZERS}
    assert set(of("fp4:alpha=none")) == set(of("fp4_vector")) | {parts.DGE}
    assert set(of("fp4")) == set(of("fp4:alpha=none")) | {parts.QUANTILE}
    assert parts.QUANTILE not in of("fp4:quantile=sampled")
    common = {parts.ATTENTION, parts.NORMS, parts.SWIGLU, parts.HEAD, parts.LOSS, parts.OPTIMIZER}
    assert all(of("fp4")[group] == of(None)[group] for group in common)


def test_bytes_of_the_optimizer_and_of_a_quantizer():
    assert of(None)[parts.OPTIMIZER] == pytest.approx(32 * 1_345_423_360 / 4.3e12)
    one = dataclasses.replace(MODEL, num_layers=1)
    values = TOKENS * (3 * 2048 + 5504), TOKENS * (5 * 2048 + 2 * 5504), 4 * 2048**2 + 3 * 2048 * 5504
    spent = least_seconds(one, TOKENS, 2048, parse_recipe("fp4_vector"), H200)[parts.QUANTIZERS]
    assert spent == pytest.approx((4 * values[0] + 6 * values[1] + 10 * values[2]) / 4.3e12)


@pytest.mark.parametrize(
    ("recipe", "milliseconds"), [("fp4_vector", 244.5), ("fp4:alpha=none", 253.9), ("fp4:quantile=sampled", 264.1)]
)
def test_steps_as_measured_are_explained(recipe, milliseconds):
    """From BF16's 276.9 ms and the kernels alone, the steps of 2026-11-30 follow to a tenth."""
    expected = 276.9 / reachable(276.9e-3, of(None, KERNELS), of(recipe, KERNELS))
    assert expected < milliseconds < 1.1 * expected


def test_tables_take_the_peaks_of_the_run():
    config = BenchConfig(model="1.3b", seq_len=2048)
    at_peak, _ = least(config, Peaks(bfloat16=415e12, fp8=811e12, memory=4.3e12))
    assert at_peak.columns == ("BF16", "fp4")
    assert at_peak.rows[0][2][0] == pytest.approx(2 * of(None)[parts.PRODUCTS])
    assert at_peak.total()[0] > at_peak.total()[1]


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_the_page_has_these_numbers():
    section = PAGE.split("## What the step could cost")[1].split("## ")[0]
    columns = of(None), of("fp4"), of("fp4", KERNELS)

    def row(name: str, seconds: list[float]) -> str:
        return f"| {name} | {' | '.join(f'{1e3 * s:.1f}' if s else '–' for s in seconds)} |"

    for group in dict.fromkeys(group for column in columns for group in column):
        assert row(group, [column.get(group, 0.0) for column in columns]) in section
    assert row("all", [sum(column.values()) for column in columns]) in section

    measured, rest = 276.9e-3, 276.9e-3 - sum(of(None).values())
    assert f"{1e3 * rest:.1f} more than its least" in section
    for recipe in ("fp4_vector", "fp4:alpha=none", "fp4:quantile=sampled"):
        expected = 276.9 / reachable(measured, of(None, KERNELS), of(recipe, KERNELS))
        assert f"| `{recipe}` | {expected:.1f} |" in section
    assert f"comes to {reachable(measured, of(None), of('fp4')):.2f} times BF16" in section
    least_ratio = sum(of(None).values()) / sum(of("fp4").values())
    assert f"to {least_ratio:.2f} if both steps took their least time" in section
    shared = (sum(of(None).values()) - 1.3 * sum(of("fp4").values())) / 0.3
    assert f"fall to {1e3 * shared:.0f} ms" in section
    limit = sum(of(None, KERNELS).values()) / sum(of("fp4", KERNELS).values())
    assert f"the limit is {limit:.2f} even" in section
    products = [{parts.PRODUCTS: found[parts.PRODUCTS]} for found in (of(None), of("fp4"))]
    assert f"it would be {reachable(measured, *products):.2f}" in section
    seven = [
        sum(least_seconds(MODELS["7b"], TOKENS, 2048, recipe, rates).values())
        for rates in (H200, KERNELS)
        for recipe in (None, parse_recipe("fp4"))
    ]
    assert f"give {seven[0] / seven[1]:.2f} at peak rates and {seven[2] / seven[3]:.2f} with" in section
