"""metrics.jsonl: one row a line, no row twice after a resume, no crash on what a killed process leaves."""

import json
import math
import sys

import numpy as np
import pytest

from fp4jax.train.errors import ConfigError, MissingPackageError
from fp4jax.train.metrics import FILE, MetricsLog, read_metrics, truncate_metrics


def write(folder, steps, *, resume_at=None, tensorboard=False):
    with MetricsLog(folder, tensorboard=tensorboard, resume_at=resume_at) as log:
        for step in steps:
            log.write("train", step, {"loss": np.float32(0.1 * step), "skipped": np.float32(0)})


def test_rows_come_back_as_written(tmp_path):
    with MetricsLog(tmp_path / "run", tensorboard=False) as log:
        log.write("train", 1, {"loss": np.float32(0.1), "count": np.int32(3)})
        log.write("validation", 1, {"loss": 2.5, "sources": {"emma": np.float64(1.5)}})
    rows = read_metrics(tmp_path / "run")
    assert rows[0] == {"kind": "train", "step": 1, "loss": 0.1, "count": 3}
    assert rows[1] == {"kind": "validation", "step": 1, "loss": 2.5, "sources": {"emma": 1.5}}
    assert read_metrics(tmp_path / "run", "validation") == rows[1:]


def test_float32_survives_the_trip(tmp_path):
    value = np.float32(1) / np.float32(3)
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write("train", 1, {"loss": value})
    assert np.float32(read_metrics(tmp_path)[0]["loss"]) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_reads_as_nan(tmp_path, value):
    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.write("train", 1, {"loss": np.float32(value), "grad_norm": value})
    line = (tmp_path / FILE).read_text()
    assert json.loads(line) == {"kind": "train", "step": 1, "loss": None, "grad_norm": None}
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_a_resume_removes_the_rows_after_it(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 9), resume_at=4)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_resume_drops_half_a_line(tmp_path):
    write(tmp_path, range(1, 4))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_metrics(tmp_path)) == 3
    write(tmp_path, [4], resume_at=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_truncation_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    write(tmp_path, range(1, 4))
    before = (tmp_path / FILE).read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        truncate_metrics(tmp_path, 1)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / FILE).write_text('{"kind": "train", "step": 1}\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"line 2 of '.*metrics\.jsonl' is not a row of metrics: '{\"step\": 2}'"):
        read_metrics(tmp_path)


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []
    write(tmp_path, [1], resume_at=0)
    assert len(read_metrics(tmp_path)) == 1


def test_tensorboard_gets_every_number(tmp_path):
    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.write("validation", 3, {"loss": 2.0, "sources": {"emma": 1.5}})
    (events,) = tmp_path.glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"validation/loss" in content
    assert b"validation/sources/emma" in content


def test_tensorboard_is_told_to_forget_later_steps(tmp_path):
    write(tmp_path, [1, 2], resume_at=0, tensorboard=True)
    first = set(tmp_path.glob("events.*"))
    write(tmp_path, [2], resume_at=1, tensorboard=True)
    events = sorted(tmp_path.glob("events.*"), key=lambda path: path in first)
    # A SessionLog of status START at step resume_at + 1: fields 2 (step) and 7 (session_log) of the first events.
    assert any(b"\x10\x02\x3a\x02\x08\x01" in path.read_bytes() for path in events)


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    expected = (
        r"writing TensorBoard events needs 'tensorboardX': pip install 'fp4jax\[train\]', or pass --no-tensorboard"
    )
    with pytest.raises(MissingPackageError, match=expected):
        MetricsLog(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
