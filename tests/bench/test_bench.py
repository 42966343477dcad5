"""`fp4jax bench` in a tiny mode on the CPU: tables, JSON, errors; the tables of a GPU with kernels interpreted."""

import dataclasses
import io
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from fp4jax import cli, kernels
from fp4jax.bench import baselines, networks, products, quantizers, run
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks
from fp4jax.bench.report import Bars, Result, Row
from fp4jax.kernels import GemmConfig, gemm
from fp4jax.models import MODELS, LlamaConfig
from fp4jax.train.errors import ConfigError

PEAKS = Peaks(bfloat16=1e12, fp8=2e12, memory=1e12)
SMALL = LlamaConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=1, num_kv_heads=1, head_dim=32, mlp_dim=64)


def text(table) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


QWIX_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, for what Qwix calls
HAS_QWIX = baselines.qwix() is not None


def test_a_step_on_the_cpu_is_timed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "tiny", SMALL)
    out = tmp_path / "bench.json"
    flags = ["--seq-len", "8", "--batch-size", "1", "--iterations", "1", "--no-baselines", "--out", str(out)]
    assert cli.main(["bench", *flags]) == 0
    shown = capsys.readouterr().out
    for expected in ("train step of tiny, 1 × 8 tokens", "fp4jax fp4", "× BF16", "emulated", f"written to {out}"):
        assert expected in shown
    record = json.loads(out.read_text())
    assert {"command", "date", "hardware", "versions", "settings", "peaks", "tables"} <= set(record)
    rows = record["tables"][0]["rows"]
    assert [row["name"] for row in rows] == ["BF16", "fp4jax fp4"]
    assert all(row["microseconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert rows[0]["ratio_to_first"] == 1
    assert "peak GB" in shown


def test_help_and_errors(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "--tables" in capsys.readouterr().out
    cases = {
        ("--tables", "products"): "tables: products needs an H100 or H200, and this is 'cpu'; here only step, profile",
        ("--model", "9b"): "model '9b' is unknown; choose from tiny",
        ("--recipes", "fp5"): "fp5",
        ("--iterations", "0"): "iterations=0 must be at least 1",
        ("--seq-len", "0"): "seq_len=0 must be at least 1",
        ("--product-tokens", "8", "0"): "product_tokens=(8, 0) must each be at least 1",
        ("--budget", "0"): "budget=0.0 must be above 0 seconds",
        ("--out", str(tmp_path / "none" / "b.json")): "its folder does not exist",
    }
    for flags, message in cases.items():
        assert cli.main(["bench", *flags]) == cli.USAGE_ERROR
        assert message in capsys.readouterr().err


def test_gpu_defaults_are_all_tables(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "is_hopper", lambda: True)
    config = BenchConfig().resolved()
    assert config.tables == ("quantizers", "quantile", "layer", "products", "step")
    assert (config.model, config.seq_len) == ("1.3b", 2048)
    with pytest.raises(ConfigError, match="tokens=0 must be at least 1"):
        BenchConfig(tokens=0).resolved()


@pytest.fixture
def tiny_7b(monkeypatch):
    monkeypatch.setitem(MODELS, "7b", SMALL)
    return BenchConfig(sizes=("7b",), tokens=40, iterations=1, recipes=("fp4_vector",), baselines=False)


def test_kernel_tables_run_interpreted(tiny_7b):
    with kernels.interpret():
        first, second = itertools.islice(quantizers.quantizers(tiny_7b, PEAKS), 2)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    assert [row.name for row in first.rows] == ["floor", "rows", "rows, outliers carried"]
    assert second.rows[0].seconds == pytest.approx(4 * 40 * 32 / 1e12)


def test_products_and_their_mean(tiny_7b, monkeypatch):
    monkeypatch.setattr(products, "shapes", lambda config: {"one": (40, 24, 32, "bfloat16")})
    with kernels.interpret():
        one, mean, aims = products.products(tiny_7b, PEAKS)
    assert isinstance(one, Result)
    assert isinstance(mean, Result)
    assert isinstance(aims, Bars)
    assert [bar.passed for bar in aims.bars[:4]] == [None] * 4  # there is nothing to compare with
    assert [row.name for row in one.rows] == ["fp4jax", "fp4jax, not promoted"]
    assert mean.json()["rows"][1]["ratio_to_first"] == pytest.approx(one.json()["rows"][1]["ratio_to_first"])
    assert "× fp4jax" in text(mean.table())


@QWIX_WARNS
def test_layers_beside_flax(tiny_7b):
    rows = [*networks._layer_rows(dataclasses.replace(tiny_7b, baselines=True), 16, 32, 24)]
    others = ["Qwix FP8"] if HAS_QWIX else []
    assert [row.name for row in rows] == ["XLA BF16", "fp4jax fp4_vector", "Flax Fp8DotGeneral", *others]


def test_shapes_are_those_of_the_models():
    found = products.shapes(BenchConfig())
    assert found["7b up, m = 8192"] == (8192, 11008, 4096, "bfloat16")
    assert found["13b down, m = 16384"] == (16384, 5120, 13824, "bfloat16")
    assert found["7b up, weight gradient"] == (4096, 11008, 16384, "float32")
    assert len(found) == 2 * (2 * 3 + 3)


def test_aims_are_means_and_the_worst():
    def shape(bfloat16: float, fp8: float) -> Result:
        names = (products.BFLOAT16, products.FP8, products.VECTORS, products.OURS, products.BARE)
        times = (bfloat16, fp8, 1.2e-3, 1e-3, 0.96e-3)
        return Result("", tuple(map(Row, names, times)), 1.0, "FLOP")

    bars = products.aims("products", [shape(2e-3, 0.9e-3), shape(1.4e-3, 1.1e-3)]).bars
    assert [round(bar.value, 3) for bar in bars if bar.value] == [0.995, 1.2, 1.673, 1.4, 4.167]
    assert [bar.passed for bar in bars] == [True, True, False, False, True]
    shown = text(Bars("t", bars).table())
    assert "short" in shown
    assert "≤ 5" in shown


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tuning_tries_only_what_fits(dtype):
    for config, promote in products.candidates(dtype):
        assert config.shared_bytes(jnp.dtype(dtype)) + 1024 <= gemm.SHARED_BYTES
        assert promote is None or config.tile_n <= 192


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A device of 132 multiprocessors whose tuned file is tmp_path/card.json."""
    monkeypatch.setattr(gemm, "TUNED", tmp_path)
    monkeypatch.setattr(gemm, "device_kind", lambda: "card")
    monkeypatch.setattr(gemm, "core_count", lambda: 132)
    gemm._table.cache_clear()
    yield tmp_path / "card.json"
    gemm._table.cache_clear()


def test_a_wave_is_a_tile_on_every_multiprocessor(card):
    assert gemm.waves(128 * 132, 192, GemmConfig(192)) == 1
    assert gemm.waves(128 * 132, 193, GemmConfig(192)) == 2
    assert gemm.waves(128 * 12, 192 * 11 + 1, GemmConfig(192, cluster="m")) == 2  # 6 · 12 pairs on 66
    assert gemm.waves(1, 1, GemmConfig(192, cluster="n"), batch=66) == 1
    assert gemm.waves(1, 1, GemmConfig(192, cluster="n"), batch=67) == 2


def test_tuning_tells_what_a_wave_takes_and_the_product_takes_the_fewest_seconds(card):
    wide, narrow = GemmConfig(192), GemmConfig(128)

    def times(config, per_k_tile, per_wave):
        shapes = [(2048, 2048, 2048), (16384, 5504, 2048), (16384, 4096, 11008)]
        return {s: 1e-6 * gemm.waves(*s[:2], config) * (s[2] / 128 * per_k_tile + per_wave) for s in shapes}

    entries = [
        products.tuned_entry("float32", 256, wide, times(wide, 0.5, 0.8)),
        products.tuned_entry("float32", 256, narrow, times(narrow, 0.4, 0.6)),
    ]
    assert [(e["per_k_tile"], e["per_wave"]) for e in entries] == [(0.5, 0.8), (0.4, 0.6)]
    assert entries[0]["measured"][0] == [2048, 2048, 2048, 17.6]
    products.write_tuned(card, entries)
    assert gemm.tuned(2048, 2048, 16384, "float32", 256) == narrow  # two waves of either
    assert gemm.tuned(2048, 5504, 16384, "float32", 256) == wide  # four against six
    assert gemm.tuned(2048, 2048, 16384, "float32", 256, batch=3) == wide  # four against six
    assert gemm.tuned(2048, 2048, 16384, "bfloat16", 256) == GemmConfig()  # not measured
    assert gemm.tuned(2048, 64, 16384, "float32", 256) == GemmConfig(tile_n=64)


def test_what_ships_gives_back_the_times_it_was_fitted_to(monkeypatch):
    """Within 3.2 %, as docs/kernels.md says."""
    monkeypatch.setattr(gemm, "core_count", lambda: 132)
    errors = [
        gemm.waves(m, n, GemmConfig(**entry["config"])) * (k / 128 * entry["per_k_tile"] + entry["per_wave"]) / time - 1
        for entry in json.loads((gemm.TUNED / "nvidia_h200.json").read_text())["gemm"]
        for m, n, k, time in entry["measured"]
    ]
    assert 0.02 < max(map(abs, errors)) < 0.0325


def test_an_h100_takes_the_tiles_of_the_h200():
    found = []
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100"):
        gemm._table.cache_clear()
        with kernels.lowering_for(kind):
            found.append(gemm.tuned(16384, 4096, 4096, "bfloat16", 256))
    gemm._table.cache_clear()
    assert found[0] == found[1] != GemmConfig()
    assert found[2] == GemmConfig()


def test_of_one_length_of_sums_nothing_is_set_apart_for_a_wave(card):
    entry = products.tuned_entry("float32", None, GemmConfig(256), {(1, 1, 256): 4e-6, (16896, 256, 256): 4e-6})
    assert (entry["per_k_tile"], entry["per_wave"], entry["promote"]) == (2.0, 0.0, 0)


def test_step_operations_count_what_is_multiplied():
    # A 7B token: 6 · 6.6e9 for the products, and attention.
    per_token = networks.step_operations(MODELS["7b"], 2048)
    assert per_token == pytest.approx(6 * (6_738_415_616 - 32_000 * 4096) + 6 * 32 * 4096 * 2048)


def test_rates_and_shares():
    result = Result("t", (Row("a", 2e-6), Row("b", 1e-6)), 1e6, "FLOP", peak=2e12)
    shown = text(result.table())
    assert "50" in shown  # % of peak of b
    assert "2.00" in shown
    assert result.json()["rows"][1]["a_second"] == 1e12


def test_memory_of_a_step_is_compared():
    result = Result("t", (Row("a", 1.0, memory=2 * 10**9), Row("b", 1.0, memory=10**9, in_use=5)), 1.0, "tokens")
    assert "0.50" in text(result.table())
    assert result.json()["rows"][1]["peak_bytes_in_use_so_far"] == 5


def test_a_table_that_comes_anew_is_shown_once_and_the_budget_stops(tmp_path, monkeypatch):
    def growing(config, peaks):
        for n in (1, 2, 3):
            yield Result("t", tuple(Row(f"row {i}", 1.0) for i in range(n)), 1.0, "tokens")

    times = iter([0.0, 1.0, 2.0, 4.0])
    monkeypatch.setitem(run.TABLES, "step", growing)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(times))
    console = Console(width=120, file=io.StringIO())
    (found,) = run.bench(BenchConfig(tables=("step",), budget=3.0, out=tmp_path / "b.json"), console)
    assert [row["name"] for row in found.json()["rows"]] == ["row 0", "row 1"]
    shown = console.file.getvalue()
    assert shown.count("row 1") == 1
    assert "budget=3.0 seconds are over: step is not complete" in shown
    (kept,) = json.loads((tmp_path / "b.json").read_text())["tables"]
    assert len(kept["rows"]) == 2
