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
from fp4jax.bench import baselines, networks, products, quantizers
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks
from fp4jax.bench.report import Result, Row
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
    assert all(row["microseconds"] > 0 for row in rows)
    assert rows[0]["ratio_to_first"] == 1


def test_help_and_errors(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "--tables" in capsys.readouterr().out
    cases = {
        ("--tables", "products"): "tables: products needs an H100 or H200, and this is 'cpu'; here only step",
        ("--model", "9b"): "model '9b' is unknown; choose from tiny",
        ("--recipes", "fp5"): "fp5",
        ("--iterations", "0"): "iterations=0 must be at least 1",
        ("--seq-len", "0"): "seq_len=0 must be at least 1",
        ("--out", str(tmp_path / "none" / "b.json")): "its folder does not exist",
    }
    for flags, message in cases.items():
        assert cli.main(["bench", *flags]) == cli.USAGE_ERROR
        assert message in capsys.readouterr().err


def test_gpu_defaults_are_all_tables(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "is_hopper", lambda: True)
    config = BenchConfig().resolved()
    assert config.tables == ("products", "quantizers", "quantile", "layer", "step")
    assert (config.model, config.seq_len) == ("1.3b", 2048)
    with pytest.raises(ConfigError, match="tokens=0 must be at least 1"):
        BenchConfig(tokens=0).resolved()


@pytest.fixture
def tiny_7b(monkeypatch):
    monkeypatch.setitem(MODELS, "7b", SMALL)
    return BenchConfig(sizes=("7b",), tokens=40, iterations=1, recipes=("fp4_vector",), baselines=False)


def test_kernel_tables_run_interpreted(tiny_7b):
    with kernels.interpret():
        found = [*itertools.islice(quantizers.quantizers(tiny_7b, PEAKS), 2)]
    assert [row.name for row in found[0].rows] == ["floor", "rows", "rows, outliers carried"]
    assert found[1].rows[0].seconds == pytest.approx(4 * 40 * 32 / 1e12)


def test_products_and_their_mean(tiny_7b, monkeypatch):
    monkeypatch.setattr(products, "shapes", lambda config: {"one": (40, 24, 32, "bfloat16")})
    with kernels.interpret():
        one, mean = products.products(tiny_7b, PEAKS)
    assert [row.name for row in one.rows] == ["fp4jax", "fp4jax, not promoted"]
    assert mean.json()["rows"][1]["ratio_to_first"] == pytest.approx(one.json()["rows"][1]["ratio_to_first"])
    assert "× fp4jax" in text(mean.table())


@QWIX_WARNS
def test_layers_beside_flax(tiny_7b):
    rows = [*networks._layer_rows(dataclasses.replace(tiny_7b, baselines=True), 16, 32, 24)]
    others = ["Qwix FP8"] if HAS_QWIX else []
    assert [row.name for row in rows] == ["XLA BF16", "fp4jax fp4_vector", "Flax Fp8DotGeneral", *others]


def test_shapes_are_those_of_the_models():
    found = products.shapes(BenchConfig(sizes=("7b",), tokens=8192))
    assert found["7b up"] == (8192, 11008, 4096, "bfloat16")
    assert found["7b up, weight gradient"] == (4096, 11008, 8192, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tuning_tries_only_what_fits(dtype):
    for config, promote in products.candidates(dtype):
        assert config.shared_bytes(jnp.dtype(dtype)) + 1024 <= gemm.SHARED_BYTES
        assert promote is None or config.tile_n <= 192


def test_tuned_files_are_read_back(tmp_path, monkeypatch):
    entry = {"m": 64, "n": 128, "k": 256, "out_dtype": "bfloat16", "promote": 256, "microseconds": 1.0,
             "config": vars(GemmConfig(tile_n=96, epilogue_n=48, cluster="m"))}  # fmt: skip
    products.write_tuned(tmp_path / "card.json", [entry])
    monkeypatch.setattr(gemm, "TUNED", tmp_path)
    monkeypatch.setattr(gemm, "device_kind", lambda: "card")
    gemm._table.cache_clear()
    try:
        assert gemm.tuned(64, 128, 256, "bfloat16", 256) == GemmConfig(tile_n=96, epilogue_n=48, cluster="m")
    finally:
        gemm._table.cache_clear()


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
