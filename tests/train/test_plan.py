"""`fp4jax plan`: the step is the one that trains, its bytes are those of real arrays, and errors are one line."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import micro
import numpy as np
import pytest
from rich.console import Console

import fp4jax
from fp4jax import E5M2, REUSE, STOCHASTIC, Gemm, PerTensor, QuantSpec
from fp4jax.models import Llama
from fp4jax.train.arm import Arm, Text
from fp4jax.train.compose import Parts
from fp4jax.train.config import ModelOptions, QuantizationOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.memory import Share, block_activations
from fp4jax.train.optimizer import make_optimizer
from fp4jax.train.placement import SingleDevice, make_placement
from fp4jax.train.plan import PlanConfig, plan
from fp4jax.train.plan_tables import parameters_gathered
from fp4jax.train.step import Architecture, make_init
from fp4jax.train.step_report import Step, optimizer_parts, recipes_of_blocks

MESH = "data=2,fsdp=2,tensor=2"
VOCABULARY = 64
CONFIG = PlanConfig(
    model=dataclasses.replace(micro.MODEL, remat="full", vocab_size=VOCABULARY),
    recipe="bf16",
    mesh=MESH,
    batch_size=8,
    seq_len=16,
    accumulate=2,
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(report, JSON, what was printed) of the micro model on eight devices."""
    out = tmp_path_factory.mktemp("plan") / "plan.json"
    console = Console(width=100, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    report = plan(dataclasses.replace(CONFIG, out=out), console)
    console.file.close()
    return report, json.loads(out.read_text(encoding="utf-8")), console.export_text()


def test_arguments_are_the_bytes_of_real_arrays(planned):
    report, _, _ = planned
    config = CONFIG.training()
    placement = make_placement(config.devices)
    step = Step.trace(config)
    with placement.active():
        architecture = Architecture(lambda rngs: Llama(report.model, rngs=rngs))
        init = make_init(architecture, make_optimizer(config.optimizer, 1), placement.parameters)
        shardings = jax.tree.map(lambda x: x.sharding, step.state)
        state = jax.jit(init, out_shardings=shardings)(np.uint32(0))
        batch = placement.batch(np.zeros((8, 17), np.int32))
    (device, *_) = jax.devices()
    shards = [s for x in jax.tree.leaves((state, batch)) for s in x.addressable_shards if s.device == device]
    assert sum(shard.data.nbytes for shard in shards) == report.argument_bytes == report.sharded_bytes


def test_gathers_bring_every_parameter_for_both_passes(planned):
    """Of a block forward and backward, of table, head and last norm once: for every part of the batch."""
    report, _, _ = planned
    d, f, layers, tensor, parts = 32, 32, 2, 2, 2
    block = (4 * d * d + 3 * d * f) / tensor + 2 * d
    elements = parts * (2 * layers * block + 2 * VOCABULARY * d / tensor + d)
    sizes = {"f32": 4, "bf16": 2}
    found = [t for t in report.traffic.transfers if (t.kind, t.axes) == ("all-gather", "fsdp")]
    assert sum(t.bytes / sizes[t.dtype] for t in found) == elements
    # Codes of query, key, value, gate and up take two bytes a value, the other weights four.
    assert 0.5 <= parameters_gathered(report) <= 2


def test_gradients_are_summed_over_data_and_fsdp_for_every_part(planned):
    report, _, _ = planned
    sums = [t for t in report.traffic.transfers if set(t.axes.split("+")) >= {"data"} and t.kind != "all-gather"]
    kernels = (4 * 32 * 32 + 3 * 32 * 32) * 2 / 2
    elements = sum(t.bytes / {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}[t.dtype] for t in sums)
    assert 2 * kernels <= elements <= 2 * kernels + 2 * 2 * (2 * VOCABULARY * 32)
    assert report.traffic.unknown_loops == 0


def test_tables_and_json_hold_the_same(planned):
    report, written, printed = planned
    assert written["argument_bytes"] == report.argument_bytes
    assert written["total_bytes"] == report.total_bytes
    assert written["traffic"]["transfers"][0]["sent"] == report.traffic.transfers[0].sent
    assert {part["name"] for part in written["optimizers"]["fp8_adamw"]} >= {"mu", "nu", "mu_scale", "nu_scale"}
    assert written["speedups"]["FP4 forward and backward"]["paper_layer"] > 2
    words = ("the shardings agree", "all-gather", "fp8_adamw", "3.12 without and 2.95", "gives 3.03", "compiled in")
    assert [word for word in words if word not in printed] == []
    assert max(map(len, printed.splitlines())) <= 100


def test_the_total_is_the_sum_of_its_rows(planned):
    report, _, _ = planned
    extra = report.gradients + report.recomputed + sum(report.activations.values()) + sum(report.head.values())
    assert report.total_bytes == report.argument_bytes + extra
    assert report.gradients == 2 * report.state[0].per_device  # of a part, and of all


def test_it_is_the_step_that_trains(tmp_path):
    """The lowered program is, to the letter, that of `fp4jax train`."""
    text = Text.load(micro.data(micro.write_text(tmp_path)))
    model = dataclasses.replace(CONFIG.model, vocab_size=text.vocab_size)
    config = dataclasses.replace(CONFIG, model=model, recipe="fp4_vector", accumulate=1).training()
    step = Step.trace(config)
    placement = make_placement(config.devices)
    with placement.active():
        arm = Arm(config, config.recipe, (0,), text, placement)
        trains = arm.train_step.lower(arm.abstract_state, step.tokens).as_text()
    assert step.lowered.as_text() == trains


def test_blocks_in_high_precision_are_counted_as_such():
    """`--high-precision` may name blocks."""

    def recipes_under(high_precision: str):
        model = dataclasses.replace(micro.MODEL, num_layers=3)
        quantization = QuantizationOptions(high_precision=high_precision)
        config = dataclasses.replace(CONFIG, model=model, recipe="fp4", quantization=quantization, mesh=None).training()
        parts = Parts.compose(config, "fp4", VOCABULARY, SingleDevice())
        return parts.model, recipes_of_blocks(parts)

    model, blocks = recipes_under(r"embed|head|layers\.[02]\.")
    assert [recipes["layers.mlp.up"] is None for recipes in blocks] == [True, False, True]
    sizes = [sum(block_activations(model, recipes, Share(128)).values()) for recipes in blocks]
    assert sizes[0] == sizes[2] != sizes[1]
    assert recipes_under("embed|head")[1] == (blocks[1],) * 3


def test_fp8_adamw_holds_three_bytes_a_parameter():
    """Of the tiny model, whose scales weigh the most."""
    config = dataclasses.replace(CONFIG, model=ModelOptions(), accumulate=1).training()
    step = Step.trace(config)
    moments = {
        name: sum(part.per_parameter for part in optimizer_parts(config, step, name) if part.name[:2] in ("mu", "nu"))
        for name in ("adamw", "fp8_adamw")
    }
    assert moments["adamw"] == 8
    assert 3 < moments["fp8_adamw"] <= 3.1


def test_fp8_reduction_sends_a_byte_a_gradient(tmp_path):
    """The command, in a process of its own, on as many devices as it is asked for."""
    out = tmp_path / "plan.json"
    flags = {
        "num-layers": 2, "embed-dim": 32, "num-heads": 2, "mlp-dim": 32, "vocab-size": VOCABULARY, "recipe": "bf16",
        "batch-size": 4, "seq-len": 16, "mesh": "data=4", "reduction": "fp8", "out": out,
    }  # fmt: skip
    run = "from fp4jax.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", run, "plan", *(f"--{name}={value}" for name, value in flags.items())]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    sent = {(t["kind"], t["axes"], t["dtype"]): t["bytes"] for t in written["traffic"]["transfers"]}
    for kind in ("all-to-all", "all-gather"):
        # Leaves are padded to a multiple of the devices.
        assert written["parameters"] <= sent[kind, "data", "u8"] <= written["parameters"] + 4 * 20
    assert written["hardware"].startswith("CPU")


def refused(**changes) -> str:
    """The message of the error."""
    with pytest.raises(ConfigError) as caught:
        plan(dataclasses.replace(CONFIG, **changes), Console(quiet=True))
    return str(caught.value)


def test_what_cannot_be_planned_is_one_line(tmp_path, monkeypatch):
    gradient = QuantSpec(E5M2, PerTensor(), rounding=STOCHASTIC)
    noisy = dataclasses.replace(fp4jax.recipes.fp4(), name="noisy", dgrad=Gemm(gradient, REUSE))
    monkeypatch.setitem(fp4jax.recipes.RECIPES, "noisy", lambda: noisy)
    messages = {
        refused(mesh="fsdp=4"): "mesh='fsdp=4' takes 4 virtual CPU devices, and JAX has started with 8 of 'cpu': run "
        "fp4jax plan in a process of its own",
        refused(mesh="fsdp=two"): "mesh='fsdp=two': 'fsdp=two' is no axis=size; write, say, data=2,fsdp=2,tensor=2",
        refused(model=dataclasses.replace(CONFIG.model, vocab_size=0)): "vocab_size=0 must be a positive integer",
        refused(out=tmp_path / "no" / "plan.json"): f"out={str(tmp_path / 'no' / 'plan.json')!r}: there is no folder "
        f"{str(tmp_path / 'no')!r}",
        refused(mesh="data=4,fsdp=2"): "batch_size=8 / accumulate=2 must be a multiple of data · fsdp = 8, the devices "
        "that share a batch",
        refused(mesh="data=4,fsdp=2", accumulate=1, reduction="fp8", recipe="noisy"): "reduction='fp8' cannot train "
        "'noisy', whose noise would depend on the number of devices: take --reduction float32",
        refused(model=dataclasses.replace(CONFIG.model, vocab_size=63)): "parameter ['embed']['embedding']: mesh axis "
        "tensor=2 must divide the axis 'vocab' of size 63 of a parameter of shape (63, 32)",
    }
    for message, expected in messages.items():
        assert message == expected
