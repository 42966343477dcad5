"""A trained model wherever it lies: a run folder of `fp4jax train`, a Hugging Face folder, packed weights, a GGUF."""

import contextlib
import dataclasses
import json
import tempfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fp4jax import interop
from fp4jax.interop.packed import MANIFEST
from fp4jax.models import LlamaConfig
from fp4jax.train.arm import Arm, Text
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.checkpoint.directory import StepDirectory
from fp4jax.train.checkpoint.errors import UnusableStepError
from fp4jax.train.config import TrainConfig
from fp4jax.train.data import ByteTokenizer, Corpus, DataOptions, FileTokenizer, Split, embedded, load
from fp4jax.train.data.manifest import TOKENIZER
from fp4jax.train.errors import ConfigError
from fp4jax.train.rundir import CHECKPOINTS, CONFIG
from fp4jax.train.step import Params


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model that came from a folder or file.

    Args:
        name: what it was found under, and the step of a run.
        config: its shape.
        params: nested dicts of NumPy float32 arrays.
        tokenizer: its `tokenizers.Tokenizer`; None where there is none, as for a model of bytes.
        seq_len: tokens in a sequence of its run; else as many as it takes, up to 1024.
        data: the text of its run.
    """

    name: str
    config: LlamaConfig
    params: Params
    tokenizer: Any
    seq_len: int
    data: DataOptions | None = None


@contextlib.contextmanager
def readable_errors(prefix: str = "") -> Iterator[None]:
    """What goes wrong with a model's files, as the errors that the command line prints in one line."""
    try:
        yield
    except interop.InteropError as error:
        raise ConfigError(f"{prefix}{error}") from error


@dataclasses.dataclass(frozen=True)
class Asked:
    """A model as somebody asked for it, for messages that name what they gave.

    Args:
        path: where it lies.
        step: of a run's checkpoint; None is the newest.
        argument: the setting that gave the path, if its name helps; the step's is then `<argument>_step`.
    """

    path: str
    step: int | None
    argument: str | None = None

    def __str__(self) -> str:
        return repr(self.path) if self.argument is None else f"{self.argument}={self.path!r}"

    @property
    def step_argument(self) -> str:
        """`step`, or `init_step`."""
        return "step" if self.argument is None else f"{self.argument}_step"

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """`readable_errors` that begin with the argument."""
        return readable_errors("" if self.argument is None else f"{self}: ")

    def refuse_what_is_no_model(self) -> None:
        """Refuse a step of what is no run, and a folder that holds no model of any kind."""
        if self.step is not None:
            raise ConfigError(
                f"{self.step_argument}={self.step}: {self.path!r} is no run of `fp4jax train`, and has no checkpoints"
            )
        folder = Path(self.path)
        if folder.is_dir() and not (folder / MANIFEST).exists() and not (folder / CONFIG).exists():
            raise ConfigError(
                f"{self} holds neither {CONFIG} (Hugging Face) nor {MANIFEST} (packed by fp4jax), nor is it the folder "
                "of a run of `fp4jax train`"
            )


def open_model(path: str, *, step: int | None = None, dtype: Any = None, argument: str | None = None) -> TrainedModel:
    """Find out what lies at `path`, and read it.

    Args:
        path: a run folder, a Hugging Face folder, a folder of packed weights, a .gguf file, or "smollm2".
        step: of a run's checkpoint; None is the newest.
        dtype: of the activations; None is the run's own, or bfloat16.
        argument: the setting that gave the path, for messages: "init", with which `step` is "init_step".

    Raises:
        ConfigError: no model there, one that cannot be used, a step of what is no run.
        CheckpointError: the checkpoint is damaged, or not of the model that the settings say.
        MissingPackageError: an optional package is absent.
    """
    asked = Asked(path, step, argument)
    if (settings := _run_settings(asked)) is not None:
        return _open_run(asked, settings, dtype)
    asked.refuse_what_is_no_model()
    with asked.errors():
        config, params, tokenizer = interop.initial_params(path, **({} if dtype is None else {"dtype": dtype}))
    return TrainedModel(path, config, params, tokenizer, min(config.max_seq_len, 1024))


def open_shape(path: str, *, step: int | None = None, argument: str | None = None) -> tuple[LlamaConfig, int | None]:
    """The shape of the model at `path`, and of a run the step whose weights are meant.

    Asks JAX for no device, so that processes may still find each other. Of folders it reads no weights.

    Args:
        path, argument: as in `open_model`.
        step: of a run's checkpoint; None is the newest.

    Raises:
        ConfigError, CheckpointError, MissingPackageError: as `open_model` does.
    """
    folder, asked = Path(path), Asked(path, step, argument)
    if (settings := _run_settings(asked)) is not None:
        file = _tokenizer_file(folder, settings.data)
        vocab_size = ByteTokenizer.vocab_size if file is None else FileTokenizer(file).vocab_size
        if not (committed := StepDirectory(folder / CHECKPOINTS).committed()):
            raise ConfigError(f"{asked}: there is no checkpoint in {folder / CHECKPOINTS}")
        return settings.model.build(vocab_size, settings.plan.seq_len), committed[-1] if step is None else step
    asked.refuse_what_is_no_model()
    with asked.errors():
        if (packed := _read_record(folder / MANIFEST)) is not None and isinstance(packed.get("config"), dict):
            return interop.from_hf_config(packed["config"], where=f"config in {str(folder / MANIFEST)!r}"), None
        if (record := _read_record(folder / CONFIG)) is not None:
            return interop.from_hf_config(record, where=str(folder / CONFIG)), None
        return interop.initial_params(path).config, None


def read_text(model: TrainedModel, text: DataOptions | None = None) -> Corpus:
    """A text in the tokens of a model.

    Args:
        model: from `open_model`.
        text: which. None is what the model's run held out, or the novels in the package. A tokenizer it names takes the
            place of the model's.

    Raises:
        ConfigError: the model has no tokenizer, or fewer tokens than the text, or a prepared folder has another's.
        DataError: unusable text.
    """
    if text is None and model.data is not None:
        return Text.load(model.data).split.validation
    text = text or DataOptions()
    if text.tokenizer is not None or is_prepared(text):
        corpus = load(text)
        # A prepared folder holds numbers of tokens, which another tokenizer's model would read as other words.
        if text.tokenizer is None and not same_tokens(text.text[0] / TOKENIZER, model):
            raise ConfigError(
                f"{str(text.text[0])!r} was prepared with another tokenizer than that of {model.name!r}: "
                "give the text itself"
            )
    elif model.tokenizer is not None:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / TOKENIZER
            model.tokenizer.save(str(file))
            corpus = load(dataclasses.replace(text, tokenizer=file))
    elif model.config.vocab_size == ByteTokenizer.vocab_size:
        corpus = load(text)
    else:
        raise ConfigError(f"{model.name!r} has no tokenizer.json beside it: say tokenizer=FILE")
    if corpus.vocab_size > (known := model.config.vocab_size):
        raise ConfigError(f"the text has {corpus.vocab_size} different tokens, and {model.name!r} knows {known}")
    return corpus


def same_tokens(file: Path, model: TrainedModel) -> bool:
    """Whether a tokenizer.json numbers tokens as the model does, or nothing is known of how the model does."""
    if model.tokenizer is None:
        return True
    with readable_errors():
        return interop.load_tokenizer(file).get_vocab() == model.tokenizer.get_vocab()


def from_json[T](kind: type[T], values: Any, where: str) -> T:
    """A configuration from what `fp4jax.train.config.to_json` made of it. What is absent has its default.

    Raises:
        ConfigError: a field that this version does not have.

    Example:
        >>> from fp4jax.train.config import TrainConfig, to_json
        >>> from_json(TrainConfig, to_json(TrainConfig(recipe="bf16", out=Path("a"))), "config.json").out
        PosixPath('a')
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{where} has settings that this fp4jax does not know: {', '.join(unknown)}")
    return kind(**{name: _value(hints[name], value, where) for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value, where)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in value)
    return Path(value) if hint is Path else value


def _read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whatever it is, what reads it next says what is wrong
    return record if isinstance(record, dict) else None


def _run_settings(asked: Asked) -> TrainConfig | None:
    """The settings of the run in a folder; None if it holds none."""
    path = Path(asked.path) / CONFIG
    record = _read_record(path)
    if record is None or not isinstance(record.get("settings"), dict):
        return None
    if record.get("command") != "train":
        raise ConfigError(f"{asked} is a run of {record.get('command')!r}, which keeps no checkpoints")
    return from_json(TrainConfig, record["settings"], str(path)).resolved()


def _open_run(asked: Asked, settings: TrainConfig, dtype: Any) -> TrainedModel:
    folder, step = Path(asked.path), asked.step
    data, file = settings.data, _tokenizer_file(folder, settings.data)
    if not is_prepared(data):
        data = dataclasses.replace(data, tokenizer=file)
    if dtype is not None:
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, dtype=dtype))
    # The state is restored into the shapes that training gave it. They depend on the text by its vocabulary alone, so
    # that a run can be opened where its text no longer is.
    stand_in = embedded(tokenizer=file)
    arm = Arm(settings, settings.recipe, (settings.seed,), Text(Split(stand_in, stand_in), stand_in.fingerprint))
    with Checkpointer(folder / CHECKPOINTS) as checkpointer:
        try:
            step = checkpointer.latest() if step is None else step
            state, _ = checkpointer.restore(jax.tree.map(_on_host, arm.abstract_state), step)
        except FileNotFoundError as error:
            given = asked if asked.step is None else f"{asked.step_argument}={asked.step}"
            raise ConfigError(f"{given}: {error}") from error
        except UnusableStepError as error:
            raise error.advising(asked.step_argument) from error
    with readable_errors():
        tokenizer = None if file is None else interop.load_tokenizer(file)
    return TrainedModel(f"{folder}, step {step}", arm.model, state.params, tokenizer, settings.plan.seq_len, data)


def _on_host(like: jax.ShapeDtypeStruct) -> Any:
    """A target that has the checkpointer leave a leaf in NumPy, which has no type for keys."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return like
    return np.empty(like.shape, like.dtype)


def _tokenizer_file(folder: Path, data: DataOptions) -> Path | None:
    """The tokenizer.json of a run's text; None for bytes. The run keeps one that came with its initial weights."""
    if (folder / TOKENIZER).exists():
        return folder / TOKENIZER
    return data.text[0] / TOKENIZER if is_prepared(data) else data.tokenizer


def is_prepared(data: DataOptions) -> bool:
    """Whether the text is a folder that `fp4jax data prepare` wrote, with a tokenizer of its own."""
    return len(data.text) == 1 and data.text[0].is_dir()
