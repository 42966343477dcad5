"""Training over eight virtual devices: reductions, refused settings, optimizer state, and one step's program."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import train_config, write_text

import fp4jax
from fp4jax.train.arm import Arm, Text
from fp4jax.train.compose import Parts
from fp4jax.train.config import DistributedOptions, OptimizerOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.gradient import across_data
from fp4jax.train.placement import OnMesh, SingleDevice, make_placement


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    config = train_config(write_text(tmp_path_factory.mktemp("text")), batch_size=8)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32")).resolved()


@pytest.fixture(scope="module")
def text(settings):
    return Text.load(settings.data)


def with_optimizer(settings, **options):
    return dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, **options))


def steps(settings, text, placement, recipe="bf16", count=2):
    """(losses, gradient norms, last state, arm) of the first steps."""
    with placement.active():
        arm = Arm(settings, recipe, (0,), text, placement)
        state, batches, rows = arm.init(), arm.batches(0), []
        for _ in range(count):
            state, metrics = arm.train_step(state, next(batches))
            rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        batches.close()
        return np.array(rows), jax.tree.map(np.asarray, state.params), state, arm


@pytest.fixture(scope="module")
def alone(settings, text):
    return steps(settings, text, SingleDevice())


def test_a_mesh_trains_as_one_device(settings, text, alone):
    rows, params, state, arm = steps(settings, text, OnMesh("data=2,fsdp=2,tensor=2"))
    np.testing.assert_allclose(rows, alone[0], rtol=1e-5)
    for one, many in zip(jax.tree.leaves(alone[1]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(many, one, atol=2e-3 * np.abs(one).max())
    # A device keeps an eighth or so of parameters, m and v, and each lies as its parameter.
    kernel = state.params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 16)
    for leaf in jax.tree.leaves(state.opt_state):
        if leaf.shape == kernel.shape:
            assert leaf.sharding.shard_shape(leaf.shape) == (2, 16, 16)
    with OnMesh("data=2,fsdp=2,tensor=2").active():
        assert np.isfinite(arm.validate(state).loss).all()


@pytest.mark.parametrize("reduction", ["bfloat16", "fp8"])
def test_a_reduction_changes_gradients_by_its_rounding(settings, text, alone, reduction):
    rows, *_ = steps(with_optimizer(settings, reduction=reduction), text, OnMesh("data=4,fsdp=2"))
    np.testing.assert_allclose(rows[0, 0], alone[0][0, 0], rtol=1e-6)
    # Two roundings of relative size 2⁻⁴ (E4M3) or one of 2⁻⁹, of entries whose errors are independent.
    bound = {"bfloat16": 2e-3, "fp8": 2e-2}[reduction]
    assert 0 < abs(rows[0, 1] / alone[0][0, 1] - 1) < bound


def test_a_reduction_quantizes_to_the_values_of_one_device(settings, text):
    one, *_ = steps(settings, text, SingleDevice(), "fp4", count=1)
    many, *_ = steps(with_optimizer(settings, reduction="fp8"), text, OnMesh("data=8"), "fp4", count=1)
    np.testing.assert_allclose(many[0, 0], one[0, 0], rtol=1e-6)  # thresholds and scales are those of all rows
    assert 0 < abs(many[0, 1] / one[0, 1] - 1) < 2e-2


def test_fp8_gradients_take_a_byte_an_element_on_the_wire(settings, text):
    placement = OnMesh("data=8")
    with placement.active():
        arm = Arm(with_optimizer(settings, reduction="fp8"), "bf16", (0,), text, placement)
        batches = arm.batches(0)
        program = arm.train_step.lower(arm.abstract_state, next(batches)).compile().as_text()
        batches.close()
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program)
    moved = [(d, shape, kind) for types, kind in found for d, shape in re.findall(r"(\w+)\[([\d,]*)\]", types)]
    assert "reduce-scatter" not in {kind for *_, kind in moved}
    size = lambda shape: int(np.prod([int(d) for d in shape.split(",") if d]))
    elements = sum(x.size for x in jax.tree.leaves(arm.abstract_state.params))
    for kind in ("all-to-all", "all-gather"):
        dtypes = {dtype for dtype, shape, found in moved if found == kind}
        assert dtypes == {"u8"}, (kind, dtypes)
    gathered = sum(size(shape) for _, shape, found in moved if found == "all-gather")
    assert elements <= gathered <= elements + 8 * len(jax.tree.leaves(arm.abstract_state.params))
    assert sum(size(shape) for _, shape, found in moved if found == "all-reduce") < 200


def test_the_low_precision_optimizer_trains_and_keeps_its_dtypes(settings, text):
    settings = with_optimizer(settings, optimizer="fp8_adamw")
    rows, _, state, arm = steps(settings, text, SingleDevice(), "fp4")
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state)}
    assert {"float8_e4m3fn", "float16"} <= dtypes
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(arm.abstract_state)
    ]
    assert rows[1, 0] < rows[0, 0]


def test_quantiles_and_tensor_scales_are_named_after_the_data_axis():
    recipe = across_data(fp4jax.recipes.fp4())
    assert recipe.outliers.axis_name == "data"
    assert recipe.dgrad.lhs.granularity == fp4jax.PerTensor("data")
    assert recipe.fprop.rhs == fp4jax.recipes.fp4().fprop.rhs
    assert across_data(fp4jax.recipes.fp8()).fprop.rhs.granularity == fp4jax.PerTensor(())
    nvfp4 = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel())
    with pytest.raises(ConfigError, match="has two-level scales, which need --reduction float32"):
        across_data(fp4jax.Recipe("nv", fp4jax.Gemm(nvfp4, nvfp4)))
    mxfp4 = fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(32))
    blocks = fp4jax.Recipe("mx", fp4jax.Gemm(mxfp4, mxfp4), wgrad=fp4jax.Gemm(mxfp4, mxfp4))
    with pytest.raises(ConfigError, match="has blocks along the rows, which need --reduction float32"):
        across_data(blocks)


@pytest.mark.parametrize(
    ("devices", "optimizer", "message"),
    [
        ({"mesh": "data=x"}, {}, "mesh='data=x': 'data=x' is no axis=size"),
        ({"mesh": "data=3"}, {}, "batch_size=8 / accumulate=1 must be a multiple of data · fsdp = 3"),
        ({}, {"reduction": "fp8"}, "reduction='fp8' needs several devices along data: --mesh data=2, say"),
        (
            {"mesh": "data=2,fsdp=2,tensor=2"},
            {"reduction": "fp8"},
            "reduction='fp8' goes with data and one of fsdp and tensor",
        ),
        ({"coordinator": "a:1"}, {}, "coordinator needs all of coordinator, num_processes and process_id"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            {},
            r"process_id=2 must be in \[0, num_processes=2\)",
        ),
        (
            {"distributed": True, "coordinator": "a:1", "num_processes": 2, "process_id": 0},
            {},
            "distributed asks the launcher, and coordinator says it",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, devices, optimizer, message):
    config = dataclasses.replace(with_optimizer(settings, **optimizer), devices=DistributedOptions(**devices))
    with pytest.raises(ConfigError, match=message):
        config.resolved()


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="mesh=data=4,fsdp=1,tensor=1 takes 4 devices, and there are 8"):
        make_placement(DistributedOptions(mesh="data=4"))


def test_an_axis_that_the_mesh_does_not_divide_is_named(settings, text):
    odd = dataclasses.replace(settings, model=dataclasses.replace(settings.model, mlp_dim=33))
    placement = OnMesh("data=4,tensor=2")
    with placement.active(), pytest.raises(ConfigError, match=r"parameter \['layers'\]\['mlp'\]\['down'\]\['kernel'\]"):
        Arm(odd, "bf16", (0,), text, placement)


def test_a_microbatch_that_is_too_large_to_count_is_refused(settings, text):
    loop = dataclasses.replace(settings.loop, batch_size=2**20, seq_len=64)
    large = dataclasses.replace(settings, loop=loop)
    with pytest.raises(
        ConfigError, match=r"accumulate=1: recipe 'fp4' finds .* has 2147483648: give --accumulate 2, or"
    ):
        Parts.compose(large, "fp4", 256, SingleDevice())
    with pytest.raises(ConfigError, match="give --accumulate 2"):
        Parts.compose(large, "w8a4", 256, SingleDevice())
    assert Parts.compose(large, "fp4:quantile=sampled", 256, SingleDevice()).model.embed_dim == 32


def test_heads_must_be_divided(settings, text):
    few = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_heads=4, num_kv_heads=2))
    placement = OnMesh("data=2,tensor=4")
    with placement.active(), pytest.raises(ConfigError, match="mesh axis tensor=4 must divide num_kv_heads=2"):
        Arm(few, "bf16", (0,), text, placement)


def test_noise_and_reductions_do_not_go_together(settings, text, monkeypatch):
    noisy = fp4jax.Recipe("noisy", fp4jax.Gemm(fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)))
    monkeypatch.setitem(fp4jax.recipes.RECIPES, "noisy", lambda: noisy)
    with pytest.raises(ConfigError, match="whose noise would depend on the number of devices"):
        Arm(with_optimizer(settings, reduction="fp8"), "noisy", (0,), text)


def test_several_seeds_need_one_device(settings, text):
    placement = OnMesh("data=8")
    with pytest.raises(ConfigError, match="2 seeds side by side need one device"):
        placement.batch({"tokens": np.zeros((2, 8, 17), np.int32)}, seeds=2)


def test_a_compare_has_no_reduction(settings):
    from fp4jax.train.config import CompareConfig

    with pytest.raises(ConfigError, match="reduction='fp8' is for fp4jax train --mesh"):
        CompareConfig(optimizer=OptimizerOptions(reduction="fp8")).resolved()


def test_losses_of_a_batch_do_not_depend_on_the_number_of_parts(settings, text, alone):
    parts = dataclasses.replace(settings, loop=dataclasses.replace(settings.loop, accumulate=2))
    rows, *_ = steps(parts, text, OnMesh("data=4,tensor=2"), count=1)
    np.testing.assert_allclose(rows[0], alone[0][0], rtol=1e-5)
    assert jnp.isfinite(rows).all()
