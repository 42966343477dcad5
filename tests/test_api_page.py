"""docs/api.md is what docs/make_api.py makes of the docstrings, and every public name has one."""

import importlib.util
import sys
from pathlib import Path

import pytest

import fp4jax

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def make_api():
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_api"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_api"]


@pytest.fixture(scope="module")
def entries(make_api):
    modules = [importlib.import_module(name) for name in make_api.MODULES]
    return {entry.name: entry for module in modules for entry in make_api.entries(module)}


def test_the_page_is_up_to_date(make_api):
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert page == make_api.render(), "docs/api.md is out of date: run `python docs/make_api.py` and commit the page"


def test_every_public_name_stands_there_once_and_is_the_object_it_names(make_api, entries):
    exported = {f"fp4jax.{name}" for name in fp4jax.__all__} - {"fp4jax.recipes"}
    assert exported <= entries.keys()
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last)
        assert entry.signature.startswith((last, f"type {last}"))
        assert (DOCS.parent / entry.source).is_file()


def test_every_class_and_function_says_what_it_is(entries):
    silent = {name for name, entry in entries.items() if "(" in entry.signature.split("=")[0] and not entry.text}
    assert not silent


def test_signatures_are_those_of_the_source(make_api, entries):
    assert entries["fp4jax.DGE"].signature == "DGE(k: float = 5.0, clip: float = 3.0)"
    assert entries["fp4jax.quantize"].signature == (
        "quantize(x: Array, spec: QuantSpec, *, axis: Axis, key: Key | None = None) -> QTensor"
    )
    assert entries["fp4jax.dot.BACKENDS"].signature == "BACKENDS: " + ", ".join(fp4jax.dot.BACKENDS)
    assert "    recipe: Recipe,\n" in entries["fp4jax.dot_general"].signature  # a long one has an argument a line
    assert "self" not in entries["fp4jax.nn.Linear"].signature


def test_the_text_is_the_first_paragraph_and_what_it_announces(make_api):
    assert make_api.first_paragraph("One\n    line.\n\n    Args:\n        x: an array.") == "One\nline."
    assert make_api.first_paragraph("The sum ``s``:\n\n        s = a + b\n\n    Not this.").endswith("    s = a + b")
    assert make_api.first_paragraph("In order:\n\n====  ====\n``a``  b").endswith("```text\n====  ====\n``a``  b\n```")
