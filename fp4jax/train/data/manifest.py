"""The format of a prepared corpus: a folder with a manifest, a tokenizer and, for each source, two binary files.

- manifest.json: `Manifest`, with the size and hash of every other file
- tokenizer.json: vocabulary and merges (package `tokenizers`)
- 000-emma.tokens: uint16, little-endian, nothing else, ready to be memory-mapped
- 000-emma.documents.npy: int64 [documents, 2], tokens and UTF-8 bytes of each document
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fp4jax.train.data.corpus import Corpus, Source, spans_of_lengths
from fp4jax.train.data.text import DataError
from fp4jax.train.data.tokenizer import FileTokenizer

FORMAT = "fp4jax corpus"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DTYPE = "uint16"


@dataclasses.dataclass(frozen=True)
class SourceEntry:
    """One source of a manifest: its files, their sizes and hashes."""

    name: str
    tokens_file: str
    num_tokens: int
    tokens_sha256: str
    documents_file: str
    num_documents: int
    documents_sha256: str
    num_bytes: int
    """UTF-8 bytes of the text."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What manifest.json holds, beside `format` and `version`."""

    vocab_size: int
    end_of_document: int
    dtype: str
    tokenizer_file: str
    tokenizer_sha256: str
    sources: tuple[SourceEntry, ...]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a manifest.json.

        Raises:
            DataError: missing, not JSON, of another format or version, or with missing, unknown or ill-typed fields.
        """
        where = repr(str(path))
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"no manifest at {where}: give a folder that `fp4jax data prepare` wrote to the end"
            ) from None
        except (ValueError, OSError) as error:
            raise DataError(f"cannot read {where}: {error}") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise DataError(f"{where} is not the manifest of a prepared corpus: it lacks 'format': {FORMAT!r}")
        if (version := fields.pop("version", None)) != VERSION:
            raise DataError(
                f"{where} has version {version!r}, and this fp4jax reads version {VERSION}: prepare the text again"
            )
        entries = fields.pop("sources", None)
        if not isinstance(entries, list) or not entries:
            raise DataError(f"{where} lists no sources")
        manifest = cls(**_checked(cls, {**fields, "sources": tuple(_source_entry(e, where) for e in entries)}, where))
        if manifest.dtype != DTYPE:
            raise DataError(f"{where} has dtype {manifest.dtype!r}, and this fp4jax reads {DTYPE!r}")
        return manifest


def open_corpus(folder: Path, *, verify: bool = True) -> Corpus:
    """Open a folder that `fp4jax data prepare` wrote. The tokens are memory-mapped, not read.

    Args:
        folder: where manifest.json lies.
        verify: also hash the token files (about 1.5 GB/s). Sizes and the small files are always checked.

    Raises:
        DataError: a missing, cut or altered file (with its name), or a manifest that does not fit.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    manifest = Manifest.read(folder / MANIFEST)
    tokenizer_path = folder / manifest.tokenizer_file
    _check_hash(tokenizer_path, manifest.tokenizer_sha256)
    tokenizer = FileTokenizer(tokenizer_path)
    expected = manifest.vocab_size, manifest.end_of_document
    if (found := (tokenizer.vocab_size, tokenizer.end_of_document)) != expected:
        raise DataError(
            f"{str(tokenizer_path)!r} has vocab_size and end_of_document {found}, and the manifest says {expected}"
        )
    return Corpus(tuple(_open_source(folder, entry, verify) for entry in manifest.sources), tokenizer)


def _open_source(folder: Path, entry: SourceEntry, verify: bool) -> Source:
    path = folder / entry.tokens_file
    expected = entry.num_tokens * np.dtype(DTYPE).itemsize
    size = _size(path)
    if size != expected:
        raise DataError(
            f"{str(path)!r} has {size} bytes, and the manifest says {expected} ({entry.num_tokens} tokens):"
            " the file was cut or altered; prepare the text again"
        )
    if verify:
        _check_hash(path, entry.tokens_sha256)
    documents_path = folder / entry.documents_file
    _check_hash(documents_path, entry.documents_sha256)
    documents = np.load(documents_path, allow_pickle=False)
    found = documents.shape, *(int(total) for total in documents.sum(axis=0))
    if found != ((entry.num_documents, 2), entry.num_tokens, entry.num_bytes):
        raise DataError(f"{str(documents_path)!r} does not fit the manifest: prepare the text again")
    tokens = np.memmap(path, dtype=np.dtype(DTYPE).newbyteorder("<"), mode="r")
    return Source(
        entry.name, tokens, spans_of_lengths(documents[:, 0]), documents[:, 1].copy(), sha256=entry.tokens_sha256
    )


def _source_entry(fields: Any, where: str) -> SourceEntry:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a source is {fields!r}, and should be an object")
    return SourceEntry(**_checked(SourceEntry, fields, where))


def _checked(cls: type, fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a dataclass, if all are there, none is unknown, types are right and files lie in the folder."""
    kinds = {"int": int, "str": str}
    names = {field.name: kinds.get(str(field.type), object) for field in dataclasses.fields(cls)}
    if missing := names.keys() - fields.keys():
        raise DataError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := fields.keys() - names.keys():
        raise DataError(f"{where} has unknown fields: {', '.join(sorted(unknown))}")
    for name, kind in names.items():
        value = fields[name]
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 0)):
            raise DataError(f"{where}: {name}={value!r} should be {'a count' if kind is int else 'a text'}")
        if name.endswith("_file") and Path(value).name != value:
            raise DataError(f"{where}: {name}={value!r} should name a file of the same folder")
    return fields


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}, which the manifest names: {error.strerror}") from None


def _check_hash(path: Path, expected: str) -> None:
    _size(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{str(path)!r} has sha256 {found[:12]}…, and the manifest says {expected[:12]}…:"
            " the file was altered; prepare the text again"
        )
