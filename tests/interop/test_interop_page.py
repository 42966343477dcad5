"""The page of interop is true: its examples run, the names in it exist, and so do its figures of bits."""

import re

import jax
import jax.numpy as jnp
from test_docs import CODE, ROOT, examples_of, resolves, run, text_of

import fp4jax
from fp4jax.scaling import PerBlock, PowerOfTwo, TwoLevel

PAGE = "docs/interop.md"


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = examples_of(PAGE)
    assert len(examples) == 3
    names = {"__name__": "__main__"}
    for line, source in examples:
        run(PAGE, line, source, names)
    assert 4 < names["bits"] < 4.25
    assert (tmp_path / "tiny-dequantized" / "config.json").exists()


def test_names_and_files_exist():
    words = {word for word in CODE.findall(text_of(PAGE)) if re.fullmatch(r"fp4jax\.[\w.]+", word)}
    assert len(words) > 5
    assert {word for word in words if not resolves(word)} == set()


def test_the_bits_of_each_kind_of_scale():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    table = re.findall(r"^\| (?:MXFP4|NVFP4|E2M1).* \| ([\d.]+) \|$", page, re.MULTILINE)
    specs = (
        fp4jax.QuantSpec(fp4jax.E2M1),
        fp4jax.QuantSpec(fp4jax.E2M1, PerBlock(32), PowerOfTwo("floor")),
        fp4jax.QuantSpec(fp4jax.E2M1, PerBlock(16), TwoLevel()),
    )
    like = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for said, spec in zip(table, specs, strict=True):
        q = jax.eval_shape(lambda w, spec=spec: fp4jax.quantize(w, spec, axis=0), like)
        assert round(8 * q.nbytes / 4096**2, 3) == float(said)
