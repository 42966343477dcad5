"""Settings: presets, what is refused and how, and recipes by name."""

import dataclasses
import json
from pathlib import Path

import pytest
from micro import compare_config, train_config

import fp4jax
from fp4jax.models import MODELS
from fp4jax.recipes import RECIPES
from fp4jax.train.config import (
    CheckpointOptions,
    CompareConfig,
    LoopOptions,
    ModelOptions,
    OptimizerOptions,
    QuantizationOptions,
    Settings,
    TrainConfig,
    to_json,
)
from fp4jax.train.data import DataOptions
from fp4jax.train.errors import ConfigError, naming_high_precision
from fp4jax.train.model_options import SHAPE
from fp4jax.train.naming import describe_knobs, parse_recipe
from fp4jax.train.presets import PRESETS
from fp4jax.train.rundir import CONFIG, differences, open_run


def test_every_model_has_a_preset():
    assert PRESETS.keys() == MODELS.keys()


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_fill_what_is_left_open(name):
    settings = Settings(model=ModelOptions(model=name)).resolved()
    preset = PRESETS[name]
    assert (settings.plan.steps, settings.plan.batch_size, settings.plan.seq_len) == (
        preset.steps,
        preset.batch_size,
        preset.seq_len,
    )
    assert settings.optimizer.learning_rate == preset.learning_rate
    assert settings.plan.eval_every == preset.eval_every
    assert settings.resolved() == settings


def test_what_is_given_wins_over_the_preset():
    settings = Settings(loop=LoopOptions(steps=50), optimizer=OptimizerOptions(learning_rate=0.5)).resolved()
    assert (settings.plan.steps, settings.plan.eval_every, settings.optimizer.learning_rate) == (50, 5, 0.5)


def test_naming_the_steps_of_the_preset_changes_nothing():
    preset = PRESETS["tiny"]
    named = Settings(loop=LoopOptions(steps=preset.steps)).resolved()
    assert named == Settings().resolved()
    assert Settings(loop=LoopOptions(steps=10 * preset.steps)).resolved().plan.eval_every == preset.eval_every


def test_a_step_to_resume_is_a_wish_to_resume(tmp_path):
    config = TrainConfig(out=tmp_path, checkpoint=CheckpointOptions(resume_step=4)).resolved()
    assert config.checkpoint.resume


def test_an_unresolved_plan_says_what_is_missing():
    with pytest.raises(ConfigError, match=r"steps, seq_len, .*eval_batches not given"):
        _ = Settings(loop=LoopOptions(batch_size=1)).plan


@pytest.mark.parametrize("name", list(MODELS))
def test_a_named_model_is_that_model(name):
    built = ModelOptions(model=name).build(MODELS[name].vocab_size, seq_len=128)
    assert built == MODELS[name]


def test_dimensions_change_a_model():
    model = ModelOptions(num_layers=3, embed_dim=192, num_heads=6, num_kv_heads=2).build(vocab_size=500, seq_len=4096)
    assert (model.num_layers, model.embed_dim, model.head_dim, model.num_kv_heads) == (3, 192, 32, 2)
    assert (model.mlp_dim, model.vocab_size, model.max_seq_len) == (512, 500, 4096)
    assert ModelOptions(num_layers=3).build(256, 128).mlp_dim == MODELS["tiny"].mlp_dim


def test_every_part_of_a_shape_can_be_said():
    whole = dict(zip(SHAPE, (300, 1, 32, 4, 2, 16, 48, 24, 5e4, 1e-6, True), strict=True))
    options = ModelOptions(**whole)
    assert {name: getattr(options.build(256, 24), name) for name in SHAPE} == whole
    assert options.is_whole
    assert not ModelOptions(num_layers=3).is_whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ModelOptions(model="31m"), r"model '31m' is unknown; choose from tiny, 30m, .*13b \(did you mean '30m'\?\)"),
        (ModelOptions(num_layers=0), r"num_layers=0 must be a positive integer"),
        (ModelOptions(head_dim=-2), r"head_dim=-2 must be a positive integer"),
        (ModelOptions(rope_base=0.0), r"rope_base=0.0 must be positive and finite"),
        (LoopOptions(steps=0), r"steps=0 must be a positive integer"),
        (LoopOptions(eval_batches=-1), r"eval_batches=-1 must be positive, or 0 for the whole validation split"),
        (LoopOptions(batch_size=6, accumulate=4), r"batch_size=6 must be a multiple of accumulate=4"),
        (OptimizerOptions(learning_rate=0.0), r"learning_rate=0.0 must be positive and finite"),
        (OptimizerOptions(learning_rate=float("nan")), r"learning_rate=nan must be positive and finite"),
        (OptimizerOptions(warmup=1.0), r"warmup=1.0 must be at least 0 and below 1"),
        (OptimizerOptions(final_learning_rate=1.5), r"final_learning_rate=1.5 must be at least 0 and at most 1"),
        (OptimizerOptions(b2=1.0), r"b2=1.0 must be at least 0 and below 1"),
        (OptimizerOptions(clip_norm=-1.0), r"clip_norm=-1.0 must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    field = {ModelOptions: "model", LoopOptions: "loop", OptimizerOptions: "optimizer"}[type(settings)]
    with pytest.raises(ConfigError, match=message):
        Settings(**{field: settings}).resolved()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(seed=-1), r"seed=-1 must be at least 0 and below 2\*\*31"),
        (TrainConfig(checkpoint=CheckpointOptions(keep=0)), r"keep=0 must be a positive integer"),
        (TrainConfig(checkpoint=CheckpointOptions(save_every=0)), r"save_every=0 must be a positive integer"),
        (TrainConfig(checkpoint=CheckpointOptions(resume=True)), r"resume needs out=FOLDER"),
        (TrainConfig(checkpoint=CheckpointOptions(resume_step=4)), r"resume_step=4 needs out=FOLDER"),
        (TrainConfig(checkpoint=CheckpointOptions(resume_step=0)), r"resume_step=0 must be a positive integer"),
        (TrainConfig(recipe="fp5"), r"recipe 'fp5' is unknown"),
        (TrainConfig(telemetry_every=-1), r"telemetry_every=-1 must be positive, or 0 to measure nothing"),
        (TrainConfig(telemetry_every=451), r"telemetry_every=451 would measure nothing in 450 steps: give fewer"),
        (TrainConfig(telemetry_every=9, recipe="bf16"), r"telemetry_every=9: recipe 'bf16' quantizes nothing"),
        (CompareConfig(recipes=()), r"recipes=\(\) must name at least one"),
        (CompareConfig(seeds=(1, 1)), r"seeds=\(1, 1\) must name at least one, and none twice"),
        (CompareConfig(seeds=(2**31,)), r"seed=2147483648 must be"),
        (CompareConfig(recipes=("bf16", "nope")), r"recipe 'nope' is unknown"),
    ],
)
def test_commands_refuse_what_they_cannot_do(config, message):
    with pytest.raises(ConfigError, match=message):
        config.resolved()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelOptions(embed_dim=100, num_heads=3), "embed_dim=100 must be a multiple of num_heads=3"),
        (ModelOptions(embed_dim=12, num_heads=4), "model 'tiny': head_dim=3 must be even"),
        (ModelOptions(vocab_size=255), "vocab_size=255 is less than the text's 256 different tokens"),
        (ModelOptions(max_seq_len=64), "seq_len=128 is more than max_seq_len=64, which the model takes"),
        (ModelOptions(num_heads=4, num_kv_heads=3), "model 'tiny': num_kv_heads=3 must divide num_heads=4"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        model.build(256, 128)


def test_the_gap_is_measured_to_bf16_or_else_to_the_first():
    assert CompareConfig(recipes=("fp4", "bf16")).baseline == "bf16"
    assert CompareConfig(recipes=("fp8", "fp4")).baseline == "fp8"


def test_settings_become_json():
    values = to_json(TrainConfig(out=Path("runs/x")).resolved())
    assert json.loads(json.dumps(values)) == values
    assert (values["out"], values["data"]["text"], values["loop"]["steps"]) == ("runs/x", [], PRESETS["tiny"].steps)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_is_its_name_and_its_described_knobs(name):
    assert parse_recipe(name) == RECIPES[name]()
    knobs = describe_knobs(name)
    assert parse_recipe(f"{name}:{knobs}" if knobs else name) == RECIPES[name]()


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("fp4:alpha=0.999,k=3", fp4jax.recipes.fp4(alpha=0.999, k=3.0)),
        ("fp4:k=none, gradient=E4M3", fp4jax.recipes.fp4(k=None, gradient=fp4jax.E4M3)),
        ("fp4:scope=vector", fp4jax.recipes.fp4(scope="vector")),
        ("fp4_vector:weight=PerTensor", fp4jax.recipes.fp4_vector(weight=fp4jax.PerTensor())),
        (
            "fp4_vector:activation=PerBlock2D(16,8),weight=PerBlock(32)",
            fp4jax.recipes.fp4_vector(activation=fp4jax.PerBlock2D(16, 8), weight=fp4jax.PerBlock(32)),
        ),
    ],
)
def test_knobs_are_the_functions_arguments(text, recipe):
    assert parse_recipe(text) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp5", r"^recipe 'fp5' is unknown; choose from bf16, .*fp4_release \(did you mean 'fp8'\?\)$"),
        ("fp4:alfa=1", r"knob 'alfa' is unknown; choose from alpha, k, .* \(did you mean 'alpha'\?\)"),
        ("bf16:k=3", r"knob 'k' is unknown; there are none"),
        ("fp4:alpha", r"^recipe 'fp4:alpha': 'alpha' is not knob=value, as in fp4:alpha=0.999,k=3$"),
        ("fp4:alpha=2", r"^recipe 'fp4:alpha=2': alpha=2.0 must be in \(0.5, 1\]$"),
        ("fp4:alpha=x", r"^recipe 'fp4:alpha=x': 'x' is not a number$"),
        ("fp4:k=1", r"k=1.0 must be above 1"),
        ("fp4:gradient=e9m9", r"format 'e9m9' is unknown; choose from e2m1, "),
        ("fp4:scope=row", r"scope='row' is none of 'tensor', 'vector'"),
        ("fp4_vector:weight=PerBlock", r"'PerBlock' is no granularity; write PerTensor, PerVector, PerBlock\(32\)"),
        ("fp4_vector:weight=PerRow", r"granularity 'PerRow' is unknown; choose from PerTensor, PerVector"),
        ("fp4_vector:weight=PerBlock(0)", r"PerBlock\(0\)'?:? .*0"),
    ],
)
def test_a_recipe_that_cannot_be_is_one_clear_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_recipe(text)
    assert "\n" not in str(caught.value)


def test_a_run_takes_an_empty_folder_and_records_its_settings(tmp_path):
    config = train_config((Path("a.txt"),)).resolved()
    out = open_run(config, "train", out=tmp_path / "run", fingerprint="abc")
    record = json.loads((out / CONFIG).read_text())
    assert record == {"command": "train", "settings": to_json(config), "corpus": "abc"}
    with pytest.raises(ConfigError, match=r"run' is not empty: give another, or add --resume to go on with it"):
        open_run(config, "train", out=out, fingerprint="abc")
    assert open_run(config, "train", out=out, fingerprint="abc", resume=True) == out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    config = train_config((Path("a.txt"),)).resolved()
    with pytest.raises(ConfigError, match=r"cannot create out='.*file/run': Not a directory"):
        open_run(config, "train", out=tmp_path / "file" / "run", fingerprint="abc")


def test_a_run_without_a_name_gets_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = open_run(compare_config((Path("a.txt"),)).resolved(), "compare", out=None, fingerprint="abc")
    assert out.parent == Path("runs")
    assert out.name.startswith("compare-")
    assert (out / CONFIG).exists()


def test_a_resume_with_other_settings_names_them(tmp_path):
    config = train_config((Path("a.txt"),)).resolved()
    out = open_run(config, "train", out=tmp_path / "run", fingerprint="abc")
    other = dataclasses.replace(config, seed=1, loop=dataclasses.replace(config.loop, seq_len=32))
    message = r"started with other settings, .* these: --seq-len: 16 there, 32 here; --seed: 0 there, 1 here$"
    with pytest.raises(ConfigError, match=message):
        open_run(other, "train", out=out, fingerprint="abc", resume=True)
    with pytest.raises(ConfigError, match="the text itself has changed"):
        open_run(config, "train", out=out, fingerprint="xyz", resume=True)
    saves_more = dataclasses.replace(
        config, checkpoint=CheckpointOptions(save_every=1), out=Path("elsewhere"), telemetry_every=2
    )
    assert open_run(saves_more, "train", out=out, fingerprint="abc", resume=True) == out


def resumed_with(tmp_path, there, here):
    out = open_run(there.resolved(), "train", out=tmp_path / "run", fingerprint="abc")
    with pytest.raises(ConfigError) as caught:
        open_run(here.resolved(), "train", out=out, fingerprint="abc", resume=True)
    return str(caught.value).partition("cannot go on with these: ")[2]


def test_a_resume_with_more_steps_says_what_would_work(tmp_path):
    """Not what merely follows from the steps."""
    there, here = (TrainConfig(loop=LoopOptions(steps=steps)) for steps in (30, 40))
    assert resumed_with(tmp_path, there, here) == (
        "--steps: 30 there, 40 here (a run of other length can start from its weights: "
        f"--init {tmp_path / 'run'}, with another --out)"
    )


def test_a_resume_names_what_was_given_and_not_what_follows_from_it(tmp_path):
    there = TrainConfig(data=DataOptions(text=(Path("a.txt"), Path("b.txt"))))
    here = TrainConfig(
        model=ModelOptions(model="30m"),
        quantization=QuantizationOptions(backend="xla"),
        loop=LoopOptions(eval_every=7),
    )
    assert resumed_with(tmp_path, there, here) == (
        "--model: tiny there, 30m here; --backend: not given there, xla here; "
        "--text: a.txt b.txt there, not given here; --eval-every: 90 there, 7 here"
    )


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            "rules[0]: 'haed' matches no layer; did you mean 'head'? The layers are:\n"
            "  layers.mlp.up (4 blocks, stacked)\n  head",
            "high_precision='haed' matches no layer; did you mean 'head'? (the layers are layers.mlp.up, head)",
        ),
        (
            "rules[0]: 'haed' matches no layer. The layers are:\n  head",
            "high_precision='haed' matches no layer (the layers are head)",
        ),
        (
            "rules[0]: 'haed' is not a regular expression: no",
            "high_precision='haed' is not a regular expression: no",
        ),
        (
            "rules[1]: '.*' decides no layer, since rules before it take all it matches; put it before them",
            "high_precision='haed' matches every layer, and leaves none to the recipe: give fewer",
        ),
        ("rules[1]: something else", "rules[1]: something else"),
    ],
)
def test_a_rule_that_a_setting_made_is_called_by_the_setting(rules, message):
    with pytest.raises(ValueError) as caught, naming_high_precision("haed"):
        raise ValueError(rules)
    assert str(caught.value) == message


def test_only_a_run_can_be_resumed(tmp_path):
    config = train_config((Path("a.txt"),)).resolved()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no config.json: it is not a run to resume"):
        open_run(config, "train", out=tmp_path, fingerprint="abc", resume=True)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match=r"config.json' is not JSON"):
        open_run(config, "train", out=tmp_path, fingerprint="abc", resume=True)
    (tmp_path / CONFIG).write_text('{"command": "compare", "settings": {}}')
    with pytest.raises(ConfigError, match=r"holds a run of 'compare', not of 'train'"):
        open_run(config, "train", out=tmp_path, fingerprint="abc", resume=True)
    with pytest.raises(ConfigError, match=r"notes.txt' is a file: give a folder"):
        open_run(config, "train", out=tmp_path / "notes.txt", fingerprint="abc")


def test_differences_reach_into_objects():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": None}) == {"a.c": (2, 3)}
