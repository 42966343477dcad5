"""The page on telemetry is true: its examples run, and the names in it exist."""

import re

import jax
import test_docs

PAGE = "docs/telemetry.md"


def test_examples_run_and_print_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for line, source in test_docs.examples_of(PAGE):
            test_docs.run(PAGE, line, source, names)


def test_names_in_prose_exist():
    tokens = set(test_docs.CODE.findall(test_docs.text_of(PAGE)))
    names = {f"fp4jax.{t}" if t.startswith("telemetry.") else t for t in tokens if re.fullmatch(r"[\w.]+", t)}
    names = {name for name in names if name.startswith("fp4jax.") and not name.endswith(".jsonl")}
    names.discard("fp4jax.telemetry.png")
    assert len(names) > 10
    assert not {name for name in names if not test_docs.resolves(name)}
