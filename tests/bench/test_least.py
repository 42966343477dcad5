"""The least time of a train step: against counts by hand, and against what was measured."""

import dataclasses

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
