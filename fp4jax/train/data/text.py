"""Text in, documents out: read UTF-8 files, plain or .xz, and cut them into documents."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import itertools
import lzma
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 20
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_XZ_MAGIC = b"\xfd7zXZ\x00"


class DataError(ValueError):
    """Text or a corpus that cannot be used. The message is one line: what, where, and what would work."""


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """Within it, what cannot be used names the argument that gave it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{argument}: {error}") from error


@dataclasses.dataclass(frozen=True)
class DocumentRule:
    r"""How a file is cut into documents, the units that a validation split holds out whole.

    Example:
        >>> rule = DocumentRule(min_chars=4, max_chars=12)
        >>> list(cut_documents(["one\n\ntwo\n\nthree\nfour\nfive\nsix\n"], rule))
        ['one\n\ntwo', 'three\nfour', 'five\nsix']

    Raises:
        ValueError: an empty delimiter, or sizes out of order.
    """

    delimiter: str | None = None
    """Text that stands between two documents, such as '<|endoftext|>'. By default a document ends at a blank line."""
    min_chars: int = 2048
    """Blank lines end a document only once it has this many characters: in prose they stand between paragraphs."""
    max_chars: int = 16384
    """A longer document is cut at line ends into contiguous pieces, which then count as documents."""

    def __post_init__(self) -> None:
        """Refuse rules that cannot cut."""
        if self.delimiter == "":
            raise ValueError("delimiter='' separates nothing: give a text, or None for blank lines")
        if self.min_chars < 0 or self.max_chars < max(2, self.min_chars):
            raise ValueError(
                f"min_chars={self.min_chars} and max_chars={self.max_chars} must satisfy 0 <= min_chars <= max_chars"
                " and max_chars >= 2"
            )


def source_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: without folder, .xz and .txt, or the path as given where that names two files.

    Raises:
        DataError: no files, or one given twice (its text would be on both sides of a split).
    """
    if not files:
        raise DataError("no text files given")
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise DataError(f"{str(path)!r} is given twice, so its text would be both trained on and held out")
        seen.add(path.resolve())
    names = [path.name.removesuffix(".xz").removesuffix(".txt") or path.name for path in files]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, files)]


def file_size(path: Path) -> int:
    """Bytes of a text file on the disk.

    Raises:
        DataError: missing, a folder, or unreadable.
    """
    with _open(path) as file:
        return os.fstat(file.fileno()).st_size


def read_documents(
    path: Path,
    rule: DocumentRule,
    *,
    sections: Mapping[str, str] | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Iterator[tuple[str | None, str]]:
    """Yield (section, document) for every document of a UTF-8 file, in order, holding about 2 MB of it at a time.

    Args:
        path: a plain or .xz file; which of the two is seen from its first bytes. CR LF and CR become LF, a byte order
            mark is dropped, and so are delimiters and the blank lines around a document.
        rule: where documents end.
        sections: for a file that holds several sources one after another: section name -> the words that open its
            first document, in the order of the file. The first must open the file. Without it `section` is None.
        on_read: called with the number of bytes of the file (compressed, if it is) read so far.

    Raises:
        DataError: the file is missing, unreadable, empty, blank, not UTF-8, a damaged .xz, or lacks a section.
    """
    blocks = _blocks(path, on_read)
    if sections:
        named = _sections(path, blocks, rule.delimiter or "\n\n", sections)
    else:
        named = ((None, block) for block in blocks)
    found = False
    for name, group in itertools.groupby(named, key=operator.itemgetter(0)):
        for document in cut_documents((block for _, block in group), rule):
            found = True
            yield name, document
    if not found:
        raise DataError(f"{str(path)!r} holds nothing but white space: give a file with text")


def cut_documents(blocks: Iterable[str], rule: DocumentRule) -> Iterator[str]:
    """Yield the documents of a text that arrives in blocks. Where the blocks end does not matter."""
    pattern = re.compile(re.escape(rule.delimiter)) if rule.delimiter else _BLANK_LINES
    at_least = 0 if rule.delimiter else rule.min_chars
    # A search looks no further than this, so that a long text without delimiters costs one pass.
    reach = 2 * rule.max_chars + len(rule.delimiter or "\n\n")
    held, start = "", 0
    for block, last in _mark_last(blocks):
        held, start = held[start:] + block, 0
        while start < len(held):
            if len(held) < start + reach and not last:
                break
            match = pattern.search(held, start + at_least, start + reach)
            end, resume = match.span() if match else (len(held), len(held))
            if end - start > rule.max_chars:
                end = resume = _cut(held, start, end, rule.max_chars)
            document = held[start:end].strip("\n")
            start = resume
            if document and not document.isspace():
                yield document


def _cut(text: str, start: int, end: int, max_chars: int) -> int:
    """Where to cut text[start:end], which is too long: after a line end, else after a space, else anywhere.

    At full length while much is left; what makes just two pieces is cut near the middle, so that none is tiny.
    """
    high = start + max_chars
    low, target = (end - max_chars, (start + end) // 2) if high + max_chars >= end else (high - max_chars // 2, high)
    for mark in "\n ":
        for found in (text.rfind(mark, low - 1, target), text.find(mark, target, high)):
            if found >= 0:
                return found + 1
    return target


def _mark_last(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    iterator = iter(blocks)
    block = next(iterator, "")
    for following in iterator:
        yield block, False
        block = following
    yield block, True


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder: give text files, or one folder that `fp4jax data prepare` wrote")
    if path.exists() and not path.is_file():
        raise DataError(
            f"{str(path)!r} is a pipe or a device, and text is read more than once: write it to a file first"
        )
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(f"no such text file: {str(path)!r}") from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _raw_blocks(path: Path, on_read: Callable[[int], None] | None) -> Iterator[bytes]:
    """Read a file block by block, unpacking it if it is an .xz."""
    with _open(path) as file:
        packed = file.read(len(_XZ_MAGIC)) == _XZ_MAGIC
        file.seek(0)
        with lzma.LZMAFile(file) if packed else contextlib.nullcontext(file) as stream:
            while True:
                try:
                    block = stream.read(_BLOCK)
                except (lzma.LZMAError, EOFError) as error:
                    raise DataError(f"{str(path)!r} is a damaged .xz file: {error}") from None
                if on_read:
                    on_read(file.tell())
                if not block:
                    return
                yield block


def _blocks(path: Path, on_read: Callable[[int], None] | None) -> Iterator[str]:
    """Decode a file block by block, naming the byte at fault (of the unpacked text) if it is not UTF-8."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    position = 0
    for block in itertools.chain(_raw_blocks(path, on_read), [b""]):
        pending = len(utf8.getstate()[0])
        try:
            text = newlines.decode(utf8.decode(block, final=not block), final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{str(path)!r} is not UTF-8: byte {error.object[error.start]:#04x} at position"
                f" {position - pending + error.start} ({error.reason}); convert it to UTF-8 first"
            ) from None
        yield text.removeprefix("\ufeff") if position == 0 else text
        position += len(block)
    if position == 0:
        raise DataError(f"{str(path)!r} is empty: give a file with text")


def _sections(
    path: Path, blocks: Iterator[str], separator: str, openings: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Name the section of every block, cutting blocks where the next section's opening follows a separator."""
    names = list(openings)
    first = openings[names[0]]
    held = ""
    while len(held) < len(first) and (block := next(blocks, None)) is not None:
        held += block
    if not held.startswith(first):
        raise DataError(f"{str(path)!r} does not open with {first!r}, the opening of its first section {names[0]!r}")
    for name, following in itertools.pairwise(names):
        needle = separator + openings[following]
        while (found := held.find(needle)) < 0:
            keep = max(0, len(held) - len(needle) + 1)  # the needle may lie across two blocks
            yield name, held[:keep]
            block = next(blocks, None)
            if block is None:
                raise DataError(
                    f"{str(path)!r}: no document after the start of section {name!r} opens with"
                    f" {openings[following]!r}, the opening of section {following!r}"
                )
            held = held[keep:] + block
        yield name, held[:found]
        held = held[found + len(separator) :]
    yield names[-1], held
    for block in blocks:
        yield names[-1], block
