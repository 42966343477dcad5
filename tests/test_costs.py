"""The cost model: the paper's numbers, where its formula departs from them, and LLaMA's layers."""

import pytest

from fp4jax.costs import (
    VARIANTS,
    Rates,
    dge_flops,
    linear_flops,
    llama_layer,
    llama_model,
    occ_flops,
    other_flops,
    paper_layer,
    paper_speedup,
    speedup,
)
from fp4jax.models import MODELS, count_parameters

SHAPES = [(4096, 2048), (2048, 2048), (5120, 4096), (64, 1)]
FP4 = Rates(4, 4, 4)


def test_table_5_sums_to_its_totals():
    table = {part.name: part.flops for part in paper_layer(10, 1000)}
    assert table == {
        "attention norm": 40,
        "query, key, value": 600,
        "scores and their sum over values": 40_000,
        "softmax": 10_000,
        "output": 200,
        "MLP norm": 40,
        "up": 800,
        "GeLU": 280,
        "down": 800,
    }


@pytest.mark.parametrize(("h", "s"), SHAPES)
def test_totals_of_the_paper(h, s):
    layer = paper_layer(h, s)
    assert linear_flops(layer) == 24 * h**2
    assert other_flops(layer) == 5 * s * h + 36 * h


@pytest.mark.parametrize(("h", "s"), SHAPES)
def test_the_closed_formulas(h, s):
    fp4 = 6 * h + 5 * s + 36
    whole = 24 * h + 5 * s + 36
    assert paper_speedup(h, s) == pytest.approx(whole / fp4, rel=1e-12)
    for alpha in (0.97, 0.99, 0.999, 1.0):
        outliers = (1 - alpha) * h
        assert paper_speedup(h, s, alpha) == pytest.approx(whole / (fp4 + 32 + 48 * outliers), rel=1e-12)
        printed = whole / (fp4 + 32 + 24 * outliers)
        assert paper_speedup(h, s, alpha, occ_rate=2) == pytest.approx(printed, rel=1e-12)


def test_the_published_numbers_and_the_printed_formula():
    assert round(paper_speedup(), 2) == 3.12
    assert round(paper_speedup(alpha=0.99), 2) == 2.95
    assert round(paper_speedup(alpha=0.99, occ_rate=2), 2) == 3.03


def test_the_shares_of_dge_and_occ():
    """Of an FP4 step: DGE .1 %, OCC the published 5.6 %, and half of it as the formula is printed."""
    layer = paper_layer(4096, 2048)
    step = 3 * (linear_flops(layer) / 4 + other_flops(layer))
    assert round(100 * dge_flops(12 * 4096**2, 4096) / step, 2) == 0.09
    assert round(100 * 3 * occ_flops(layer, 0.99) / step, 2) == 5.64
    assert round(100 * 3 * occ_flops(layer, 0.99, rate=2) / step, 2) == 2.82


def test_what_backward_runs_in_decides():
    layer = paper_layer(4096, 2048)
    found = {name: round(speedup(layer, rates), 2) for name, rates in VARIANTS.items()}
    assert found == {
        "FP4 forward and backward": 3.12,
        "FP4 forward, FP8 backward": 2.12,
        "FP4 forward, BF16 backward": 1.29,
    }


def test_no_speed_up_at_rate_one_and_four_where_only_products_count():
    assert speedup(paper_layer(4096, 2048), Rates(1, 1, 1)) == 1
    assert speedup(tuple(p for p in paper_layer(4096, 2048) if p.linear), FP4) == 4


@pytest.mark.parametrize("name", list(MODELS))
def test_linear_layers_of_llama_take_two_flops_a_weight(name):
    config = MODELS[name]
    d = config.embed_dim
    block = (count_parameters(config) - 2 * config.vocab_size * d - d) / config.num_layers - 2 * d
    assert linear_flops(llama_layer(config, 2048)) == 2 * block


def test_the_head_of_a_model_is_not_sped_up():
    config = MODELS["7b"]
    layer, model = llama_layer(config, 2048), llama_model(config, 2048)
    assert linear_flops(model) == 32 * linear_flops(layer)
    assert other_flops(model) == 32 * other_flops(layer) + 4 * 4096 + 2 * 4096 * 32_000
    assert round(speedup(layer, FP4), 2) == 3.12
    assert round(speedup(model, FP4), 2) == 3.00


def test_estimator_vanishes_with_the_batch():
    weights = 12 * 4096**2
    assert dge_flops(weights, 2048 * 2048) == pytest.approx(dge_flops(weights, 4096) / 1024)


def test_no_outliers_cost_nothing():
    assert occ_flops(paper_layer(64, 8), alpha=1.0) == 0


@pytest.mark.parametrize("alpha", [0.5, 1.01, 99.0])
def test_a_quantile_out_of_range(alpha):
    with pytest.raises(ValueError, match=rf"alpha={alpha} must be above 0.5 and at most 1"):
        occ_flops(paper_layer(64, 8), alpha)
