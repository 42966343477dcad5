"""`fp4jax data prepare`: train a BPE on text files and write them as memory-mappable tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import operator
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import rich.console
import rich.progress
import tyro

from fp4jax.train.data.corpus import Corpus
from fp4jax.train.data.manifest import DTYPE, MANIFEST, TOKENIZER, Manifest, SourceEntry, open_corpus
from fp4jax.train.data.text import DataError, DocumentRule, file_size, naming, read_documents, source_names
from fp4jax.train.data.tokenizer import FileTokenizer, check_vocab_size, train_bpe
from fp4jax.train.errors import require


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Write text files as tokens: train a BPE on them, or take a tokenizer file, and encode them once for all runs."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """UTF-8 text files, plain or .xz. Each is one source, named after the file."""
    out: Path
    """The folder to write. It appears when all is done, or not at all."""
    vocab_size: int = 16384
    """Ids of the BPE to train, from 257 to 65536. A small text may give fewer."""
    tokenizer: Path | None = None
    """Take this tokenizer.json (of the package `tokenizers`) instead of training one."""
    documents: DocumentRule = dataclasses.field(default_factory=DocumentRule)
    """How a file is cut into documents."""
    sections: Path | None = None
    """For one file with several sources in it: JSON, {source: the words that open its first document}, in order."""
    overwrite: bool = False
    """Replace the folder if it holds a prepared corpus already."""


def prepare(options: PrepareOptions, console: rich.console.Console | None = None) -> Corpus:
    """Train a tokenizer, write the corpus and open it. The same files and options give the same bytes.

    Text is streamed: memory holds a few megabytes of it, the document boundaries, and the BPE's word counts.

    Args:
        options: what to write and where.
        console: where the progress is shown; None shows none.

    Raises:
        DataError: a vocabulary out of range, unusable text, sections or tokenizer, or a folder that is in the way.
        MissingPackageError: the package `tokenizers` is not installed.

    Example:
        >>> corpus = prepare(PrepareOptions((Path("emma.txt"),), out=Path("emma"), vocab_size=280))
        >>> corpus.vocab_size, corpus.source_names
        (280, ('emma',))
    """
    require("tokenizers", "preparing text")
    if options.tokenizer is None:
        check_vocab_size(options.vocab_size)
    names = source_names(options.files)
    sections = _read_sections(options)
    _check_target(options)
    staging = options.out.with_name(f".{options.out.name}-{secrets.token_hex(4)}")
    staging.mkdir(parents=True)
    try:
        with _Progress(options.files, console) as progress:
            if options.tokenizer is None:
                texts = (text for path in options.files for _, text in _documents(path, options, sections, progress))
                progress.start("training the tokenizer")
                train_bpe(texts, options.vocab_size, staging / TOKENIZER)
            else:
                with naming("tokenizer"):
                    FileTokenizer(options.tokenizer)  # says what is wrong with it before anything is written
                shutil.copyfile(options.tokenizer, staging / TOKENIZER)
            tokenizer = FileTokenizer(staging / TOKENIZER)
            progress.start("writing tokens")
            entries: list[SourceEntry] = []
            for name, path in zip(names, options.files):
                documents = _documents(path, options, sections, progress)
                for section, group in itertools.groupby(documents, key=operator.itemgetter(0)):
                    encoded = tokenizer.encode(text for _, text in group)
                    entries.append(_write_source(staging, len(entries), section or name, encoded))
        manifest = Manifest(
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            dtype=DTYPE,
            tokenizer_file=TOKENIZER,
            tokenizer_sha256=hashlib.sha256((staging / TOKENIZER).read_bytes()).hexdigest(),
            sources=tuple(entries),
        )
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        _commit(staging, options)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return open_corpus(options.out, verify=False)


def _documents(
    path: Path, options: PrepareOptions, sections: Mapping[str, str] | None, progress: _Progress
) -> Iterator[tuple[str | None, str]]:
    return read_documents(path, options.documents, sections=sections, on_read=progress.reading(path))


def _write_source(folder: Path, index: int, name: str, documents: Iterable[tuple[np.ndarray, int]]) -> SourceEntry:
    stem = f"{index:03d}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
    tokens_path, documents_path = folder / f"{stem}.tokens", folder / f"{stem}.documents.npy"
    digest = hashlib.sha256()
    sizes: list[tuple[int, int]] = []
    with tokens_path.open("wb") as file:
        for tokens, num_bytes in documents:
            data = tokens.astype(np.dtype(DTYPE).newbyteorder("<"), copy=False).tobytes()
            file.write(data)
            digest.update(data)
            sizes.append((len(tokens), num_bytes))
    table = np.array(sizes, "<i8")
    packed = io.BytesIO()
    np.save(packed, table, allow_pickle=False)
    documents_path.write_bytes(packed.getvalue())
    return SourceEntry(
        name=name,
        tokens_file=tokens_path.name,
        num_tokens=int(table[:, 0].sum()),
        tokens_sha256=digest.hexdigest(),
        documents_file=documents_path.name,
        num_documents=len(table),
        documents_sha256=hashlib.sha256(packed.getvalue()).hexdigest(),
        num_bytes=int(table[:, 1].sum()),
    )


def _read_sections(options: PrepareOptions) -> dict[str, str] | None:
    if options.sections is None:
        return None
    where = repr(str(options.sections))
    if len(options.files) != 1:
        raise DataError(f"sections={where} describes one file, and files has {len(options.files)}: prepare them apart")
    try:
        sections = json.loads(options.sections.read_bytes())
    except FileNotFoundError:
        raise DataError(f"no such sections file: {where}") from None
    except (ValueError, OSError) as error:
        raise DataError(f"cannot read the sections {where}: {error}") from None
    if not isinstance(sections, dict) or not sections or not all(isinstance(o, str) and o for o in sections.values()):
        raise DataError(f'sections={where} should be like {{"name": "the words that open its first document"}}')
    return sections


def _check_target(options: PrepareOptions) -> None:
    """Refuse to write where something else lies; only a prepared corpus can be replaced."""
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise DataError(f"out={str(out)!r} exists and is not a prepared corpus: choose another folder")
    if not options.overwrite:
        raise DataError(f"out={str(out)!r} holds a prepared corpus already: choose another folder or pass --overwrite")


def _commit(staging: Path, options: PrepareOptions) -> None:
    """Put the finished folder in its place: on the disk first, then under its name."""
    for path in [*staging.iterdir(), staging]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if options.out.exists():
        # A run that has the old files mapped keeps them until it ends.
        old = staging.with_name(f"{staging.name}-old")
        options.out.rename(old)
        staging.rename(options.out)
        shutil.rmtree(old)
    else:
        staging.rename(options.out)


class _Progress:
    """A bar over the bytes of all files, once for each pass over them."""

    def __init__(self, files: Iterable[Path], console: rich.console.Console | None) -> None:
        self._sizes = {path: file_size(path) for path in files}
        self._read = dict.fromkeys(self._sizes, 0)
        self._bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=console is None,
        )
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, description: str) -> None:
        self._read = dict.fromkeys(self._sizes, 0)
        self._task = self._bar.add_task(description, total=sum(self._sizes.values()))

    def reading(self, path: Path) -> Callable[[int], None]:
        def update(position: int) -> None:
            self._read[path] = position
            if self._task is not None:
                self._bar.update(self._task, completed=sum(self._read.values()))

        return update
