"""`train --telemetry-every`: the same run, bit for bit, with measurements beside it, which a resume continues."""

import dataclasses
import io
import shutil

import jax
import numpy as np
import pytest
from micro import assert_bit_equal, train_config
from rich.console import Console

import fp4jax
from fp4jax import telemetry
from fp4jax.recipes import RECIPES
from fp4jax.telemetry.log import EVENTS, FILE
from fp4jax.train.arm import Arm, Text
from fp4jax.train.errors import ConfigError
from fp4jax.train.job import train
from fp4jax.train.measuring import HEATMAP, Measuring
from fp4jax.train.metrics import read_metrics
from fp4jax.train.placement import OnMesh, SingleDevice

pytestmark = pytest.mark.usefixtures("program_cache")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def noisy() -> fp4jax.Recipe:
    """Draws noise for the weights of the forward product; the rest compiles fast."""
    weight = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
    gradient = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())
    return fp4jax.Recipe("noisy", fp4jax.Gemm(None, weight), fp4jax.Gemm(gradient, fp4jax.REUSE))


@pytest.fixture(scope="module", autouse=True)
def noisy_recipe():
    RECIPES["noisy"] = noisy
    yield
    del RECIPES["noisy"]


def settings(paths, out=None, *, every=2, resume=False, **loop):
    """Only `down` is quantized, in two microbatches: a fraction of the time to compile."""
    config = train_config(paths, out, resume=resume, accumulate=2, **loop)
    quantization = dataclasses.replace(config.quantization, high_precision="embed|head|attention|gate|up")
    return dataclasses.replace(config, recipe="noisy", telemetry_every=every, quantization=quantization)


@pytest.fixture(scope="module")
def runs(paths, tmp_path_factory):
    """(folder, output) of a run that measures every other step, and of one that does not."""
    found = {}
    for every in (2, 0):
        console, out = quiet(), tmp_path_factory.mktemp("runs") / f"every{every}"
        train(settings(paths, out, every=every, tensorboard=every > 0), console)
        found[every] = out, console.file.getvalue()
    return found


def rows(folder):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in read_metrics(folder)]


def test_a_run_that_measures_computes_the_same_bits(runs):
    (on, output), (off, plain) = runs[2], runs[0]
    assert rows(on) == rows(off)
    assert {FILE, HEATMAP, EVENTS} <= {path.name for path in on.iterdir()}
    assert not {FILE, HEATMAP, EVENTS} & {path.name for path in off.iterdir()}
    assert list((on / EVENTS).glob("events.out.tfevents.*"))
    found = dict(telemetry.read(on))
    assert list(found) == [2, 4, 6]
    for snapshot in found.values():
        assert snapshot.layers == ("layers.mlp.down",)
        assert [record.index for record in snapshot.of(place="fprop.rhs")] == [(0,), (1,)]
        assert snapshot.places == ("fprop.rhs", "dgrad.lhs")
    assert "Operands of step 6" in output
    assert "SNR (dB)" in output
    assert HEATMAP in output.replace("\n", "")
    assert "SNR" not in plain


def test_a_resume_goes_on_measuring(runs, paths, tmp_path):
    """From step 2 it comes to the same rows; a finished run that is resumed without it keeps them."""
    folder, _ = runs[2]
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / FILE).write_text((copy / FILE).read_text() + '{"step": 8, "cut')
    config = settings(paths, copy, resume=True, tensorboard=True)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume_step=2))
    train(config, quiet())
    assert (copy / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert rows(copy) == rows(folder)
    before = (copy / FILE).read_bytes()
    console = quiet()
    train(settings(paths, copy, every=0, resume=True, tensorboard=True), console)
    assert (copy / FILE).read_bytes() == before
    assert "SNR" not in console.file.getvalue()


def test_the_step_knows_nothing_of_it(paths, tmp_path):
    """Its StableHLO is that of an arm that is not measured; what is measured is the first microbatch of the step."""
    config = settings(paths).resolved()
    text = Text.load(config.data)
    tokens = jax.ShapeDtypeStruct((4, 17), np.int32)

    def program(arm):
        return arm.train_step.lower(arm.abstract_state, tokens).as_text()

    before = program(Arm(config, "noisy", (0,), text))
    arm = Arm(config, "noisy", (0,), text)
    with Measuring(arm, tmp_path, 2, tensorboard=False) as measuring:
        state = arm.init()
        batches = arm.batches(0)
        batch = next(batches)
        batches.close()
        kept = jax.tree.map(np.asarray, state.params)
        for step in (2, 4):
            measuring(step, state, batch)  # the same state: the number is only written down
        other = batch.at[1::2].set(0)
        measuring(6, state, other)
        measuring(8, state, batch.at[0].set(0))
        assert_bit_equal(jax.tree.map(np.asarray, state.params), kept)
    assert program(arm) == before
    found = dict(telemetry.read(tmp_path))
    assert found[2] == found[4] == found[6] != found[8]
    # Noise of the microbatch that the step draws for: rounding to nearest would lose less.
    (first, _) = found[2].of(place="fprop.rhs")
    kernel = kept["layers"]["mlp"]["down"]["kernel"][0]
    nearest = telemetry.operand_statistics(kernel, fp4jax.QuantSpec(fp4jax.E2M1), axis=-2)
    assert first.snr_db < float(nearest["snr_db"]) - 1


def test_a_mesh_measures_what_one_device_does(paths, tmp_path):
    config = settings(paths, batch_size=8).resolved()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    text = Text.load(config.data)
    found = []
    for placement in (SingleDevice(), OnMesh("data=2,fsdp=2,tensor=2")):
        folder = tmp_path / type(placement).__name__
        with placement.active():
            arm = Arm(config, "noisy", (0,), text, placement)
            batches = arm.batches(0)
            with Measuring(arm, folder, 1, tensorboard=False) as measuring:
                measuring(1, arm.init(), next(batches))
            batches.close()
        found.append(next(telemetry.read(folder))[1])
    one, many = found
    assert [record.label for record in many.records] == [record.label for record in one.records]
    for a, b in zip(one.records, many.records, strict=True):
        np.testing.assert_allclose(list(b.values.values()), list(a.values.values()), rtol=1e-3, atol=1e-6)


def test_an_arm_without_quantizers_has_nothing_to_measure(paths):
    config = settings(paths).resolved()
    arm = Arm(config, "bf16", (0,), Text.load(config.data))
    with pytest.raises(ConfigError, match="telemetry_every: the model has no product to measure"):
        Measuring(arm, None, 1, tensorboard=False)
