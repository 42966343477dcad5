"""`fp4jax eval` and `fp4jax export`: a run's own validation again, sums by hand, other models, and clear refusals."""

import dataclasses
import io
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from micro import assert_bit_equal, train_config, write_text
from rich.console import Console

import fp4jax
from fp4jax import interop
from fp4jax.cli import main
from fp4jax.models import Llama, LlamaConfig, token_nll
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.config import TrainConfig, to_json
from fp4jax.train.data import DataError, DataOptions, PrepareOptions, load, prepare
from fp4jax.train.errors import ConfigError
from fp4jax.train.evaluate import EvalConfig, Score, evaluate, score, score_tables
from fp4jax.train.job import train
from fp4jax.train.model_files import from_json, open_model, read_text

BYTES = LlamaConfig(
    vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16, max_seq_len=32,
    dtype="float32",
)  # fmt: skip


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of six steps, with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    config = train_config(write_text(folder), folder / "run")
    _, result = train(config, quiet())
    return folder / "run", result


@pytest.fixture(scope="module")
def model():
    """A model of bytes."""
    return Llama(BYTES, rngs=nnx.Rngs(0))


@pytest.fixture
def hf(tmp_path, model):
    """The same as a Hugging Face folder, and a text."""
    interop.save_hf(tmp_path / "hf", BYTES, model)
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 40)
    return tmp_path / "hf"


def test_a_run_gets_its_own_validation_loss_again(run, tmp_path, capsys):
    folder, result = run
    out = tmp_path / "scores.json"
    flags = ["--recipes", "fp4", "bf16", "--batch-size", "4", "--max-tokens", "128", "--out", str(out)]
    assert main(["eval", str(folder), *flags]) == 0
    shown = capsys.readouterr().out
    record = json.loads(out.read_text())
    scores = record["recipes"]["fp4"]
    # The same windows, parameters and program as in training.
    assert scores["all"]["loss"] == pytest.approx(result.loss, rel=1e-6)
    assert {name: scores[name]["loss"] for name in result.by_source} == pytest.approx(result.by_source, rel=1e-6)
    assert scores["all"]["loss"] != record["recipes"]["bf16"]["all"]["loss"]
    assert record["seq_len"] == 16
    assert record["settings"]["model"] == str(folder)
    for words in ("run, step 6 on 1", "gap to fp4 (%)", "ahab", "ishmael", f"{scores['all']['loss']:.4f}", "bf16"):
        assert words in shown.replace("\n", " "), shown


def test_a_score_is_the_sum_over_windows_by_hand(model, tmp_path):
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    (tmp_path / "b.txt").write_text("Äußerst kurz: ½ €. " * 3)
    corpus = load(DataOptions(text=(tmp_path / "a.txt", tmp_path / "b.txt")))
    scores = score(
        BYTES, nnx.to_pure_dict(nnx.state(model, nnx.Param)), [(".*", None)], corpus, seq_len=8, batch_size=3
    )
    total, count = 0.0, 0
    for i, name in enumerate(corpus.source_names):
        stream = corpus.only(i)
        tokens = stream.read(0, stream.num_tokens)
        losses = [token_nll(model(window[None, :-1])[0], window[1:]) for window in windows(tokens, 8)]
        mine = float(sum(np.asarray(nll, np.float64).sum() for nll in losses))
        assert scores[name].tokens == len(tokens) - 1
        assert scores[name].loss == pytest.approx(mine / (len(tokens) - 1), rel=1e-5)
        # A byte is a token here, and one more token ends the document.
        assert scores[name].bytes_per_token == (len(tokens) - 1) / len(tokens)
        total, count = total + mine, count + len(tokens) - 1
    assert scores["all"].loss == pytest.approx(total / count, rel=1e-5)
    assert scores["all"].tokens == count


def windows(tokens: np.ndarray, size: int):
    return [jnp.asarray(tokens[start : start + size + 1]) for start in range(0, len(tokens) - 1, size)]


def test_the_units_of_a_score():
    s = Score(loss=math.log(16), tokens=10, bytes_per_token=2.0)
    assert (s.perplexity, s.bits_per_byte) == (pytest.approx(16), pytest.approx(2))
    assert Score(1e4, 1, 1.0).perplexity == math.inf
    tables = score_tables({"bf16": {"all": s, "a": s}, "fp4": {"all": dataclasses.replace(s, loss=3.0), "a": s}}, "m")
    assert len(tables) == 1  # one source is the whole


def test_tables_of_many_recipes_are_cut_rather_than_squeezed():
    s = Score(loss=3.0, tokens=10, bytes_per_token=2.0)
    results = {f"fp4:alpha=0.99{i}": {"all": s, "a-rather-long-name-of-a-source": s, "b": s} for i in range(7)}
    console = Console(file=io.StringIO(), width=100)
    for table in score_tables(results, "m"):
        console.print(table)
    shown = console.file.getvalue()
    assert all(shown.count(f" {name} ") >= 2 for name in results), shown
    assert "…" not in shown


def test_max_tokens_spreads_over_the_text_and_zero_takes_all(hf, model):
    config = EvalConfig(model=str(hf), recipes=("bf16",), text=(hf.parent / "text.txt",), seq_len=16, batch_size=2)
    few = evaluate(dataclasses.replace(config, max_tokens=64), quiet())["bf16"]["all"].tokens
    every = evaluate(dataclasses.replace(config, max_tokens=0), quiet())["bf16"]["all"].tokens
    assert (few, every) == (64, 17 * 40)  # the document loses nothing, and gains its end


def test_a_model_without_tokenizer_takes_bytes_only_if_it_is_one(tmp_path):
    config = dataclasses.replace(BYTES, vocab_size=300)
    interop.save_hf(tmp_path / "hf", config, Llama(config, rngs=nnx.Rngs(0)))
    opened = open_model(str(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=r"hf' has no tokenizer.json beside it: say tokenizer=FILE"):
        read_text(opened)


def words_tokenizer(size: int):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "<unk>": 1} | {f"word{i}": i for i in range(2, size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def test_the_tokenizer_beside_the_weights_reads_the_text(tmp_path, model):
    interop.save_hf(tmp_path / "hf", BYTES, model, tokenizer=words_tokenizer(20))
    (tmp_path / "text.txt").write_text("word3 word4 word19")
    corpus = read_text(open_model(str(tmp_path / "hf")), DataOptions(text=(tmp_path / "text.txt",)))
    assert corpus.read(0, 4).tolist() == [3, 4, 19, 0]
    words_tokenizer(300).save(str(tmp_path / "large.json"))
    large = DataOptions(text=(tmp_path / "text.txt",), tokenizer=tmp_path / "large.json")
    with pytest.raises(ConfigError, match=r"the text has 300 different tokens, and .* knows 256"):
        read_text(open_model(str(tmp_path / "hf")), large)


def test_a_run_is_exported_whole_and_packed(run, tmp_path, capsys):
    folder, _ = run
    assert main(["export", str(folder), str(tmp_path / "hf"), "--dtype", "float32", "--step", "4"]) == 0
    opened = open_model(str(folder), step=4)
    config, params = interop.load_hf(tmp_path / "hf")
    assert config == opened.config
    assert_bit_equal(params, dict(opened.params))
    newest = open_model(str(folder))
    assert newest.name.endswith("step 6")
    assert not np.array_equal(newest.params["norm"]["scale"], opened.params["norm"]["scale"])

    assert main(["export", str(folder), str(tmp_path / "packed"), "--format", "packed", "--dtype", "float32"]) == 0
    assert "bits a quantized weight" in capsys.readouterr().out
    rules = fp4jax.nn.default_rules(fp4jax.recipes.fp4())
    expected = interop.quantize_params(newest.config, newest.params, rules)
    assert_bit_equal(jax.tree.leaves(interop.load_packed(tmp_path / "packed")[1]), jax.tree.leaves(expected))
    flags = ["--recipe", "fp4", "--dtype", "float32"]
    assert main(["export", str(folder), str(tmp_path / "plain"), *flags]) == 0
    assert_bit_equal(interop.load_hf(tmp_path / "plain")[1], interop.dequantize_params(expected))


def test_a_run_opens_where_its_text_no_longer_is(run, tmp_path):
    folder, _ = run
    moved = shutil.copytree(folder, tmp_path / "moved")
    record = json.loads((moved / "config.json").read_text())
    record["settings"]["data"]["text"] = [str(tmp_path / "gone.txt")]
    (moved / "config.json").write_text(json.dumps(record))
    opened = open_model(str(moved))
    (tmp_path / "new.txt").write_text("the white whale")
    assert read_text(opened, DataOptions(text=(tmp_path / "new.txt",))).num_tokens == 16
    with pytest.raises(DataError, match=r"no such text file: .*gone.txt"):
        read_text(opened)


def test_settings_come_back_from_json():
    config = train_config((), None).resolved()
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config))), "config.json") == config
    with pytest.raises(ConfigError, match=r"config.json has settings that this fp4jax does not know: depth"):
        from_json(TrainConfig, {"model": {"depth": 3}}, "config.json")


def refused(capsys, *arguments: str) -> str:
    """The one line that a command line ends with."""
    assert main(["eval", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fp4jax: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_bad_settings_are_refused_before_anything_is_read(capsys, tmp_path):
    (tmp_path / "there.json").write_text("{}")
    for flags, message in (
        (["--recipes", "fp5"], "recipe 'fp5' is unknown; choose from bf16"),
        (["--recipes", "fp4", "fp4"], "must name at least one, and none twice"),
        (["--max-tokens", "-1"], "max_tokens=-1 must be positive, or 0 for the whole text"),
        (["--batch-size", "0"], "batch_size=0 must be a positive integer"),
        (["--out", str(tmp_path / "there.json")], "there.json' is there already: give a new file"),
        (["--out", str(tmp_path / "gone" / "a.json")], "is in no folder that exists: give a new file"),
        (["--min-chars", "9", "--max-chars", "5"], "min_chars=9 and max_chars=5 must satisfy"),
    ):
        assert message in refused(capsys, "nosuchmodel", *flags)
    assert "required" in refused(capsys)


def test_what_is_no_model_or_no_text_is_refused(capsys, hf, run, tmp_path):
    folder, _ = run
    text = ["--text", str(hf.parent / "text.txt")]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        (["nosuchmodel"], "no such model: 'nosuchmodel' is neither a file nor a folder, nor is it 'smollm2'"),
        ([str(tmp_path / "folder")], "holds neither config.json (Hugging Face) nor manifest.json"),
        ([str(tmp_path / "folder")], "nor is it the folder of a run of `fp4jax train`"),
        ([str(tmp_path / "empty.txt")], "is not a GGUF file: it opens with b''"),
        ([str(hf), "--text", str(tmp_path / "empty.txt")], "is empty: give a file with text"),
        ([str(hf), "--text", str(tmp_path / "gone.txt")], "text: no such text file"),
        ([str(hf), *text, "--step", "3"], "step=3: "),
        ([str(hf), *text, "--seq-len", "64"], "seq_len=64 is more than the 32 that"),
        ([str(hf), *text, "--high-precision", "nolayer"], "fp4jax: high_precision='nolayer' matches no layer"),
        ([str(hf), *text, "--tokenizer", str(tmp_path / "gone.json")], "tokenizer: no such tokenizer file"),
        ([str(hf), *text, "--backend", "abacus"], "abacus"),
        ([str(folder), "--step", "3"], "there is no step 3"),
    ):
        assert message in refused(capsys, *arguments)


def test_runs_that_keep_no_checkpoints_are_named(capsys, run, tmp_path):
    folder, _ = run
    (tmp_path / "none").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "none")
    assert "there is no checkpoint in" in refused(capsys, str(tmp_path / "none"))
    record = json.loads((folder / "config.json").read_text()) | {"command": "compare"}
    (tmp_path / "none" / "config.json").write_text(json.dumps(record))
    assert "is a run of 'compare', which keeps no checkpoints" in refused(capsys, str(tmp_path / "none"))


def test_a_damaged_checkpoint_is_named(capsys, run, tmp_path):
    folder, _ = run
    broken = shutil.copytree(folder, tmp_path / "broken")
    with Checkpointer(broken / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [2, 4, 6]
    piece = max((broken / "checkpoints" / "6").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    piece.write_bytes(piece.read_bytes()[:-1] + b"!")
    message = refused(capsys, str(broken))
    assert "step 6" in message
    assert "is damaged" in message
    assert message.endswith("is step 4, pass --step 4 / step=4\n")


def test_a_folder_prepared_with_another_tokenizer_is_refused(tmp_path, model):
    (tmp_path / "text.txt").write_text("word3 word4 word19 " * 9)
    words_tokenizer(20).save(str(tmp_path / "tokenizer.json"))
    options = PrepareOptions(
        files=(tmp_path / "text.txt",), out=tmp_path / "text", tokenizer=tmp_path / "tokenizer.json"
    )
    prepare(options)
    text = DataOptions(text=(tmp_path / "text",))
    for name, size in (("same", 20), ("other", 30)):
        interop.save_hf(tmp_path / name, BYTES, model, tokenizer=words_tokenizer(size))
    assert read_text(open_model(str(tmp_path / "same")), text).num_tokens == 28
    with pytest.raises(ConfigError, match=r"text' was prepared with another tokenizer than that of .*other'"):
        read_text(open_model(str(tmp_path / "other")), text)


def test_weights_that_are_not_finite_score_nan(model, tmp_path):
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params["norm"]["scale"] = jnp.full_like(params["norm"]["scale"], jnp.nan)
    interop.save_hf(tmp_path / "hf", BYTES, params)
    (tmp_path / "text.txt").write_text("Call me Ishmael.")
    config = EvalConfig(
        model=str(tmp_path / "hf"), recipes=("bf16",), text=(tmp_path / "text.txt",), out=tmp_path / "a.json", seq_len=8
    )
    s = evaluate(config, quiet())["bf16"]["all"]
    assert math.isnan(s.loss)
    assert math.isnan(s.perplexity)
    assert json.loads((tmp_path / "a.json").read_text())["recipes"]["bf16"]["all"]["loss"] is None
