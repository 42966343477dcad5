"""`train --init`: another model's weights, shape and tokens; what contradicts them; and a resume that needs no init."""

import dataclasses
import gc
import io
import json
import re
import shutil
import weakref

import jax
import numpy as np
import pytest
from flax import nnx
from micro import assert_bit_equal, train_config
from rich.console import Console

from fp4jax import interop
from fp4jax.cli import main
from fp4jax.models import MODELS, Llama, LlamaConfig
from fp4jax.train import job
from fp4jax.train.arm import Arm
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.config import DistributedOptions, ModelOptions, OptimizerOptions, TrainConfig
from fp4jax.train.errors import ConfigError
from fp4jax.train.initial import _nearest_size, load_text, open_initial
from fp4jax.train.job import train
from fp4jax.train.model_files import TrainedModel, open_model
from fp4jax.train.model_options import SHAPE

pytestmark = pytest.mark.usefixtures("program_cache")

SHAPED = LlamaConfig(
    vocab_size=40, num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=48, max_seq_len=24,
    rope_base=5e4, norm_eps=1e-6, tie_embeddings=True,
)  # fmt: skip
"""Nothing of it is what a flag has by default."""


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def words_tokenizer(size: int):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["the", "whale", "sea", "ship", "captain", "old", "white", "deep", "men", "boat", "harpoon", "wind"]
    vocabulary = {"<|endoftext|>": 0, "<unk>": 1} | {word: i for i, word in enumerate(words, start=2)}
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Hugging Face folder whose vocabulary is larger than its tokenizer's."""
    folder = tmp_path_factory.mktemp("models") / "hf"
    interop.save_hf(folder, SHAPED, Llama(SHAPED, rngs=nnx.Rngs(3)), tokenizer=words_tokenizer(32))
    return folder


def settings(paths, init, out=None, **changes) -> TrainConfig:
    """The micro run, but for the model."""
    changes = {"model": ModelOptions(), "init": str(init), "recipe": "bf16"} | changes
    return dataclasses.replace(train_config(paths, out), **changes)


@pytest.fixture(scope="module")
def run(paths, hf, tmp_path_factory):
    """A run of six steps from the folder, checkpoints every other step."""
    out = tmp_path_factory.mktemp("runs") / "run"
    console = quiet()
    train(settings(paths, hf, out), console)
    return out, console.file.getvalue()


def test_shape_tokens_and_weights_are_the_models(run, hf, paths):
    folder, output = run
    record = json.loads((folder / "config.json").read_text())["settings"]
    assert record["init"] == str(hf)
    assert {name: record["model"][name] for name in SHAPE} == {name: getattr(SHAPED, name) for name in SHAPE}
    assert "weights of" in output
    config = settings(paths, hf).resolved()
    initial = open_initial(config)
    arm = Arm(config, "bf16", (0,), load_text(config, initial))
    state, drawn = arm.init(initial.params), arm.init()
    assert_bit_equal(state.params, interop.load_hf(hf)[1])
    assert_bit_equal(dataclasses.replace(state, params=drawn.params), drawn)  # all else is as it would be
    tokens = load_text(config, initial).split.train.read(0, 50)
    assert 0 < tokens.max() < 32
    # An untrained model has a loss near that of an even guess among its 40 tokens; bytes would not fit into it.
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(np.log(40), abs=0.5)


def test_the_host_holds_its_weights_no_longer_while_training(hf, paths, tmp_path, monkeypatch):
    models, held = [], []

    def opened(config):
        model = open_initial(config)
        models.append(weakref.ref(model))
        return model

    def trained(*_, **__):
        gc.collect()
        held.extend(model() for model in models)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "open_initial", opened)
    monkeypatch.setattr(job, "train_arm", trained)
    with pytest.raises(KeyboardInterrupt):
        train(settings(paths, hf, tmp_path / "run"), quiet())
    assert held == [None]


def test_a_resume_needs_the_init_no_more(run, hf, paths, tmp_path):
    """The model is gone; the command that started the run, with --resume-step, comes to the same end."""
    folder, _ = run
    copy = shutil.copytree(folder, tmp_path / "copy")
    rows = (copy / "metrics.jsonl").read_text().splitlines()
    hidden = hf.rename(hf.with_name("gone"))
    try:
        config = settings(paths, hf, copy)
        resume = dataclasses.replace(config.checkpoint, resume_step=2)
        train(dataclasses.replace(config, checkpoint=resume), quiet())
        opened = open_model(str(copy))  # as fp4jax eval does
    finally:
        hidden.rename(hf)
    untimed = lambda lines: [{k: v for k, v in json.loads(r).items() if k != "tokens_per_second"} for r in lines]
    assert untimed((copy / "metrics.jsonl").read_text().splitlines()) == untimed(rows)
    assert (opened.tokenizer.get_vocab_size(), dataclasses.replace(opened.config, dtype="bfloat16")) == (32, SHAPED)
    other = dataclasses.replace(config, init="smollm2", checkpoint=resume)
    with pytest.raises(ConfigError, match=r"with these: --init: .*hf there, smollm2 here$"):
        train(other, quiet())


def test_a_run_goes_on_from_a_step_of_another_on_a_mesh(run, paths, tmp_path):
    """And eval opens what was trained on a mesh, with moments in eight bits."""
    folder, _ = run
    devices = DistributedOptions(mesh="data=2,fsdp=2,tensor=2")
    optimizer = OptimizerOptions(optimizer="fp8_adamw", learning_rate=1e-3, weight_decay=0.0)
    config = settings(paths, folder, tmp_path / "second", init_step=4, devices=devices, optimizer=optimizer)
    train(dataclasses.replace(config, loop=dataclasses.replace(config.loop, steps=1)), quiet())
    with Checkpointer(folder / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [2, 4, 6]  # untouched
    before, after = open_model(str(folder), step=4), open_model(str(tmp_path / "second"))
    assert after.name.endswith("second, step 1")
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        # Adam's first step is the learning rate, whatever the gradient; a part in another place would be far off.
        assert 0 < np.abs(new - old).max() <= 1.1e-3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 3", r"num_layers=3 contradicts init='.*hf', which has 1: leave it out"),
        ("--no-tie-embeddings", r"tie_embeddings=False contradicts init='.*hf', which has True: leave it out"),
        ("--rope-base 1e4", r"rope_base=10000.0 contradicts init='.*hf', which has 50000.0: leave it out"),
        ("--model 30m", r"model='30m' has num_layers=\d+, and init='.*hf' has 1: leave --model out"),
        ("--seq-len 25", r"seq_len=25 is more than max_seq_len=24, which the model takes"),
        ("--init-step 3", r"init_step=3: '.*hf' is no run of `fp4jax train`, and has no checkpoints"),
        ("--tokenizer OTHER", r"tokenizer='.*other.json' contradicts init: '.*hf' has another one; leave it out"),
        (
            "--init nothing",
            r"init='nothing': no such model: 'nothing' is neither a file nor a folder, nor is it 'smollm2'",
        ),
        ("--init RUN --init-step 5", r"init_step=5: there is no step 5 in .*; it holds steps 2, 4, 6"),
        (
            "--init .",
            r"init='.' holds neither config.json .* nor manifest.json .*, nor is it the folder of a run of .*",
        ),
    ],
)
def test_what_contradicts_the_model_is_one_line(run, hf, paths, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    words_tokenizer(33).save("other.json")
    words = flags.replace("OTHER", "other.json").replace("RUN", str(run[0])).split()
    init = [] if "--init" in words else ["--init", str(hf)]
    assert main(["train", *init, *words, "--steps", "1", "--no-tensorboard", "--text", *map(str, paths)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert re.fullmatch(rf"fp4jax: {message}\n", errors), errors
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_a_damaged_start_names_the_flag_of_another(run, paths, tmp_path, capsys):
    folder = shutil.copytree(run[0], tmp_path / "broken")
    piece = max((folder / "checkpoints" / "6").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    piece.write_bytes(piece.read_bytes()[:-1] + b"!")
    text = ["--text", *map(str, paths)]
    assert main(["train", "--init", str(folder), "--steps", "1", "--out", str(tmp_path / "out"), *text]) == 2
    assert capsys.readouterr().err.endswith("is step 4, pass --init-step 4 / init_step=4\n")


def test_a_run_on_bytes_takes_bytes_alone(paths, tmp_path):
    config = train_config(paths)
    initial = TrainedModel("bytes, step 1", SHAPED, {}, None, 16, config.data)
    words_tokenizer(20).save(str(tmp_path / "words.json"))
    data = dataclasses.replace(config.data, tokenizer=tmp_path / "words.json")
    with pytest.raises(ConfigError, match=r"words.json' contradicts init: 'bytes, step 1' reads bytes, so give it"):
        load_text(dataclasses.replace(config, data=data), initial)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_preset_is_that_of_the_nearest_size(name):
    assert _nearest_size(MODELS[name]) == name
    assert _nearest_size(dataclasses.replace(MODELS[name], vocab_size=49_152, tie_embeddings=True)) == name


def test_sequences_are_cut_to_what_the_model_takes(hf):
    config = TrainConfig(init=str(hf)).resolved()
    assert (config.model.model, config.plan.seq_len) == ("tiny", 24)
    with pytest.raises(ConfigError, match="init_step=3 needs init=FOLDER"):
        TrainConfig(init_step=3).resolved()
