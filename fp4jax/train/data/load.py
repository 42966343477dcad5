"""Where a corpus comes from: the text inside the package, text files, or a prepared folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from fp4jax.train.data.corpus import Corpus, Source
from fp4jax.train.data.manifest import open_corpus
from fp4jax.train.data.text import DataError, DocumentRule, naming, read_documents, source_names
from fp4jax.train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

_WORKS = Path(__file__).parent / "works"


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which text to train on."""

    text: tuple[Path, ...] = ()
    """UTF-8 files (.xz too), or one folder that `fp4jax data prepare` wrote. By default the novels in the package."""
    tokenizer: Path | None = None
    """A tokenizer.json (of the package `tokenizers`) for text files. By default the tokens are bytes."""
    documents: DocumentRule = dataclasses.field(default_factory=DocumentRule)
    """How a text file is cut into documents."""
    validation_fraction: float = 0.05
    """The share of the tokens to hold out, in whole documents."""


def load(options: DataOptions) -> Corpus:
    """The corpus that `options` names, whole: split it by `corpus.split(options.validation_fraction)`.

    Raises:
        DataError: unusable text, tokenizer or folder.

    Example:
        >>> load(DataOptions()).source_names[0]
        'moby-dick'
    """
    folders = [path for path in options.text if path.is_dir()]
    if not folders:
        with naming("tokenizer"):
            encoder = _encoder(options.tokenizer)
        if not options.text:
            return _embedded(encoder)
        with naming("text"):
            return _from_text(options.text, encoder, options.documents)
    if len(options.text) > 1:
        raise DataError(
            f"{str(folders[0])!r} is a folder, and {len(options.text)} paths were given: give text files, or one folder"
            " that `fp4jax data prepare` wrote"
        )
    if options.tokenizer is not None:
        raise DataError(f"tokenizer={str(options.tokenizer)!r}: the folder {str(folders[0])!r} has its own tokenizer")
    return open_corpus(folders[0])


def embedded(*, tokenizer: Path | None = None) -> Corpus:
    """The default corpus: `Moby-Dick` and five novels of Jane Austen, each a source, its chapters the documents.

    4.8 MB in the public domain; docs/data.md and works/manifest.json say where it comes from.

    Args:
        tokenizer: a tokenizer.json; by default tokens are bytes.
    """
    return _embedded(_encoder(tokenizer))


def from_text(files: Sequence[Path], *, tokenizer: Path | None = None, rule: DocumentRule | None = None) -> Corpus:
    """Read text files into memory as one corpus, each file a source. For much text use `prepare` instead.

    Args:
        files: UTF-8 text, plain or .xz.
        tokenizer: a tokenizer.json; by default tokens are bytes (vocabulary 256, see `ByteTokenizer`).
        rule: how a file is cut into documents; by default `DocumentRule()`.

    Raises:
        DataError: a file is missing, empty, not UTF-8 (with the position), or given twice; or an unusable tokenizer.

    Example:
        >>> from_text([Path("emma.txt")]).vocab_size
        256
    """
    return _from_text(files, _encoder(tokenizer), rule or DocumentRule())


def _encoder(tokenizer: Path | None) -> Tokenizer:
    return ByteTokenizer() if tokenizer is None else FileTokenizer(tokenizer)


def _embedded(encoder: Tokenizer) -> Corpus:
    works = json.loads((_WORKS / "manifest.json").read_text(encoding="utf-8"))["works"]
    chapters = DocumentRule(max_chars=1 << 16)  # the longest has 44,854
    return _from_text([_WORKS / work["file"] for work in works], encoder, chapters)


def _from_text(files: Sequence[Path], encoder: Tokenizer, rule: DocumentRule) -> Corpus:
    sources = []
    for name, path in zip(source_names(files), files):
        documents = (document for _, document in read_documents(path, rule))
        sources.append(Source.from_documents(name, encoder.encode(documents)))
    return Corpus(tuple(sources), encoder)
