"""Snapshots on disk, on paper and as a picture."""

import io
import json
import math
import sys

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from fp4jax import telemetry
from fp4jax.telemetry import STATISTICS, Record, Snapshot
from fp4jax.telemetry.heatmap import heatmap_grids
from fp4jax.telemetry.log import EVENTS


def record(layer, place, snr, index=(), **values):
    numbers = dict.fromkeys(STATISTICS, 0.5) | {"snr_db": snr} | values
    return Record(layer, index, place, numbers)


SNAPSHOT = Snapshot(
    tuple(
        record(f"layers.{name}", place, snr - 2 * block - (place == "fprop.rhs"), (block,))
        for name, snr in (("mlp.up", 20.0), ("mlp.down", 14.0))
        for block in range(2)
        for place in ("fprop.lhs", "fprop.rhs", "dgrad.lhs")
    )
)


def test_noise_of_both_operands_adds():
    expected = -10 * math.log10(10**-2.0 + 10**-1.9)
    assert SNAPSHOT.product_snr_db()["layers.mlp.up[0]"] == pytest.approx(expected)
    assert SNAPSHOT.product_snr_db("dgrad")["layers.mlp.down[1]"] == pytest.approx(12)
    assert [label for label, _ in SNAPSHOT.worst(2)] == ["layers.mlp.down[1]", "layers.mlp.down[0]"]
    exact = Snapshot(
        (record("a", "fprop.lhs", math.inf), record("b", "fprop.lhs", math.nan), record("c", "fprop.lhs", 3.0))
    )
    assert exact.product_snr_db()["a"] == math.inf
    assert [label for label, _ in exact.worst(3)] == ["b", "c", "a"]
    with pytest.raises(ValueError, match="product='bprop' must be 'fprop', 'dgrad' or 'wgrad'"):
        SNAPSHOT.product_snr_db("bprop")
    with pytest.raises(KeyError, match="name='snr' is no statistic; there are snr_db, cosine"):
        SNAPSHOT.values("snr", place="fprop.lhs")


def test_gradients_below_sqrt_3_times_their_noise_are_drowned():
    ratio = lambda snr: 10 ** (snr / 20)
    assert record("a", "dgrad.lhs", 4.7).drowned
    assert ratio(4.7) < math.sqrt(3) < ratio(4.8)
    assert not record("a", "wgrad.rhs", 4.8).drowned
    assert not record("a", "fprop.lhs", 1.0).drowned


def test_the_report_names_the_layers_that_are_hurt_most():
    text = str(telemetry.report(SNAPSHOT, top=1))
    assert "SNR (dB) by layer and operand, mean over the blocks (lowest)" in text
    assert "19.0 (18.0)" in text  # mlp.up's fprop.lhs: 20 and 18
    hurt = text[text.index("Hurt most") :]
    assert "layers.mlp.down[1]" in hurt
    assert "layers.mlp.up" not in hurt
    assert "0 of 4 gradients are below √3 times their quantization noise (4.77 dB)" in text
    assert str(SNAPSHOT) == str(telemetry.report(SNAPSHOT))
    stream = io.StringIO()
    Console(width=100, file=stream).print(telemetry.report(SNAPSHOT))
    for layer in SNAPSHOT.layers:
        assert layer in text
        assert layer in stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_cell_of_the_report_is_broken_over_lines(width):
    """Where a table does not fit, its columns go on in another; at 80 columns two tables hold all that a LLaMA has."""
    shares = {"underflow": 0.071, "clipped": 0.093, "crest": 12.5, "scale_spread": 10.2}
    snapshot = Snapshot(
        tuple(
            record(f"layers.{name}", place, 20.0 - block, (block,), **shares)
            for name in ("attention.query", "mlp.down")
            for block in range(12)
            for place in ("fprop.lhs", "fprop.rhs", "dgrad.lhs", "wgrad.rhs")
        )
    )
    stream = io.StringIO()
    Console(width=width, file=stream).print(telemetry.report(snapshot))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    heads = [i for i, line in enumerate(lines) if line.startswith("layer ")]
    cells = [line.split() for i in heads for line in lines[i + 2 : i + 4]]
    for row in cells:
        assert row[0].startswith(("layers.attention.query", "layers.mlp.down"))
    words = [word for i in heads for word in lines[i].split()[1:]]
    assert "".join(words).startswith("fprop.lhsfprop.rhsdgrad.lhswgrad.rhsunderflowclippedresidualSNRdB")
    assert len(heads) <= {60: 5, 80: 3, 100: 3, 200: 2}[width]
    text = "\n".join(lines)
    for cell in ("14.5 (9.0)", "7.1 / 7.1", "9.3 / 9.3", "2^10.2"):
        assert cell in text


def test_the_report_says_what_is_exact_drowned_and_not_finite():
    snapshot = Snapshot(
        (record("a", "fprop.lhs", math.inf), record("b", "fprop.lhs", math.nan), record("b", "dgrad.lhs", 3.0))
    )
    text = str(telemetry.report(snapshot))
    assert "exact" in text
    assert "1 of 1 gradients are below √3 times their quantization noise (4.77 dB): b dgrad.lhs 3.0 dB" in text
    assert "1 operands hold NaN or infinity, the first b fprop.lhs" in text
    for bad, message in ((Snapshot(()), "the snapshot holds no records"),):
        with pytest.raises(ValueError, match=message):
            telemetry.report(bad)
    with pytest.raises(ValueError, match="top=0 must be a positive integer"):
        telemetry.report(snapshot, top=0)


def test_a_log_is_read_as_it_was_written(tmp_path):
    odd = Snapshot((record("a", "fprop.lhs", math.inf, amax=1 / 3), record("b", "fprop.rhs", math.nan)))
    with telemetry.Log(tmp_path) as log:
        log.write(100, SNAPSHOT)
        log.write(200, odd)
    steps = dict(telemetry.read(tmp_path))
    assert list(steps) == [100, 200]
    assert steps[100] == SNAPSHOT
    first, second = steps[200].records
    assert first.snr_db == math.inf
    assert first.values["amax"] == pytest.approx(1 / 3, rel=1e-6)
    assert math.isnan(second.snr_db)
    rows = [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]
    assert rows[0]["layer"] == "layers.mlp.up"
    assert rows[0]["index"] == [0]
    assert (rows[-2]["snr_db"], rows[-1]["snr_db"]) == ("inf", None)


def test_a_resumed_log_forgets_what_came_after(tmp_path):
    with telemetry.Log(tmp_path) as log:
        log.write(100, SNAPSHOT)
        log.write(200, SNAPSHOT)
    with (tmp_path / "telemetry.jsonl").open("a") as file:
        file.write('{"step": 300, "lay')  # a killed process
    with telemetry.Log(tmp_path, resume_at=150) as log:
        log.write(160, SNAPSHOT)
    assert [step for step, _ in telemetry.read(tmp_path)] == [100, 160]
    (tmp_path / "telemetry.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*telemetry.jsonl' is not a row of telemetry"):
        list(telemetry.read(tmp_path))


def events(folder):
    """(tag, step, value) of every scalar in the event files of a folder."""
    found = []
    for path in folder.glob("events.out.*"):
        data = path.read_bytes()
        while data:  # length, checksum, event, checksum
            length = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_every_finite_number(tmp_path):
    with telemetry.Log(tmp_path, tensorboard=True) as log:
        log.write(100, Snapshot((record("a", "fprop.lhs", 20.0), record("b", "fprop.lhs", math.inf))))
    scalars = {tag: (step, value) for tag, step, value in events(tmp_path / EVENTS)}
    assert scalars["telemetry/fprop.lhs/snr_db/a"] == (100, 20.0)
    assert "telemetry/fprop.lhs/snr_db/b" not in scalars
    assert "telemetry/fprop.lhs/cosine/b" in scalars


def test_blocks_share_a_row_of_the_heat_map_however_they_are_held():
    listed = Snapshot((record("layers.0.mlp.up", "fprop.lhs", 1.0), record("layers.2.mlp.up", "fprop.lhs", 3.0)))
    names, grids = heatmap_grids(listed, "snr_db")
    assert names == ["layers.mlp.up"]
    np.testing.assert_array_equal(grids["fprop.lhs"], [[1.0, np.nan, 3.0]])
    names, grids = heatmap_grids(SNAPSHOT, "snr_db")
    assert names == ["layers.mlp.up", "layers.mlp.down"]
    np.testing.assert_array_equal(grids["fprop.rhs"], [[19.0, 17.0], [13.0, 11.0]])


def test_the_heat_map_is_darkest_where_the_snr_is_lowest(tmp_path):
    telemetry.draw_heatmap(SNAPSHOT, tmp_path / "heat.png", title="Tiny")
    image = matplotlib.image.imread(tmp_path / "heat.png")[..., :3]
    viridis_low = np.array([68, 1, 84]) / 255
    assert (np.abs(image - viridis_low).max(axis=-1) < 0.01).mean() > 0.01
    telemetry.draw_heatmap(SNAPSHOT, tmp_path / "heat.svg")
    assert (tmp_path / "heat.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="statistic='loss' is none of snr_db, cosine"):
        telemetry.draw_heatmap(SNAPSHOT, tmp_path / "heat.png", statistic="loss")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("matplotlib", lambda folder: telemetry.draw_heatmap(SNAPSHOT, folder / "a.png")),
        ("tensorboardX", lambda folder: telemetry.Log(folder, tensorboard=True)),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path, module, use):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs '{module}': pip install 'fp4jax\[train\]'"):
        use(tmp_path)


def test_one_block_without_loss_does_not_hide_the_others():
    from fp4jax.telemetry.report import decibels

    assert decibels([math.inf, 3.1]) == "3.1 (3.1)"
    assert decibels([math.inf, math.inf]) == "exact"
    assert decibels([2.0, 4.0]) == "3.0 (2.0)"
