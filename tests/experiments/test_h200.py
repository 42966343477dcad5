"""`experiments/kernels/h200.py` on a CPU: its checks at tiny sizes, and that no section can spoil another."""

import json
import sys

import jax.numpy as jnp
import pytest


@pytest.fixture(scope="module")
def h200(kernel_script):
    return kernel_script("h200")


def test_checks_find_the_kernels_equal(h200, tmp_path, monkeypatch):
    tensors = h200._activations
    monkeypatch.setattr(h200, "_activations", lambda shape: {"float32": tensors(shape)["float32"]})
    monkeypatch.setattr(h200, "TRANSPOSING", ())
    out = tmp_path / "o.json"
    assert h200.main([str(out), "--micro", "--sections", "checks", "--here"]) == 0
    found = json.loads((tmp_path / "o.checks.json").read_text())["differences"]
    assert set(found.values()) == {"none"}
    for kernel in ("quantile, float32", "rows, stochastic and transpose", "gradient", "weight", "product", "cluster n"):
        assert any(kernel in name for name in found), kernel


def test_a_difference_is_told(h200, tmp_path, monkeypatch):
    def section(report):
        report.check("all", jnp.zeros((2, 3), jnp.bfloat16).at[1, 2].set(-0.0), jnp.zeros((2, 3), jnp.bfloat16))
        report.check("dtype", jnp.zeros(2), jnp.zeros(2, jnp.bfloat16))

    monkeypatch.setattr(h200, "SECTIONS", {"checks": h200.Section(section, 1)})
    assert h200.main([str(tmp_path / "o.json"), "--micro", "--sections", "checks", "--here"]) == 1
    found = json.loads((tmp_path / "o.checks.json").read_text())["differences"]
    assert found["all"] == "1 of 6, first at [1, 2]: -0.0 instead of 0.0"
    assert found["dtype"] == "float32[2] instead of bfloat16[2]"


def test_a_section_that_fails_or_hangs_costs_the_others_nothing(h200, tmp_path):
    out = tmp_path / "o.json"

    def writes(section: str, then: str) -> list[str]:
        file = h200.section_file(out, section)
        return [sys.executable, "-c", f"import sys, time; open({str(file)!r}, 'w').write('[1]'); {then}"]

    commands = {
        "fails": (writes("fails", "sys.exit(3)"), 60),
        "hangs": (writes("hangs", "time.sleep(60)"), 2),
        "works": (writes("works", ""), 60),
    }
    ended = h200.run_apart(commands, out, limit=100)
    assert ended == {"fails": "failed with status 3", "hangs": "stopped after 2 s", "works": "done"}
    assert json.loads(out.read_text()) == {"sections": ended, "fails": [1], "hangs": [1], "works": [1]}
    assert h200.run_apart(commands, out, limit=0) == dict.fromkeys(commands, "not begun")
