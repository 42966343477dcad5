"""Reading text: documents, sections, and one clear line for every file that cannot be used."""

import itertools
import lzma
import os
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4jax.train.data.text import (
    DataError,
    DocumentRule,
    cut_documents,
    file_size,
    read_documents,
    source_names,
)


def documents(path: Path, rule: DocumentRule | None = None, **options) -> list[str]:
    return [text for _, text in read_documents(path, rule or DocumentRule(min_chars=0), **options)]


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_blank_lines_end_documents_that_are_long_enough():
    text = "one\n\ntwo\n \t\n\nthree\nfour\n\n"
    assert list(cut_documents([text], DocumentRule(min_chars=0))) == ["one", "two", "three\nfour"]
    assert list(cut_documents([text], DocumentRule(min_chars=4))) == ["one\n\ntwo", "three\nfour"]


def test_a_delimiter_is_taken_literally_and_ignores_min_chars():
    rule = DocumentRule(delimiter="<|.|>", min_chars=100)
    assert list(cut_documents(["a<|.|>b\n\nc<|x|>d<|.|><|.|>\n"], rule)) == ["a", "b\n\nc<|x|>d"]


def test_long_documents_are_cut_at_line_ends_then_spaces_then_anywhere():
    rule = DocumentRule(min_chars=0, max_chars=10)
    assert list(cut_documents(["aaaa\nbbbb\ncccc\ndddd"], rule)) == ["aaaa\nbbbb", "cccc\ndddd"]
    assert list(cut_documents(["aaaa bbbb cccc"], rule)) == ["aaaa ", "bbbb cccc"]
    assert list(cut_documents(["aaaaaaaa\nb c\n"], rule)) == ["aaaaaaaa", "b c"]
    assert list(cut_documents(["a" * 25], rule)) == ["a" * 10, "a" * 7, "a" * 8]


@given(
    text=st.text(alphabet="ab \n\t—", max_size=300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    min_chars=st.integers(0, 8),
    max_chars=st.integers(8, 30),
    delimiter=st.sampled_from([None, "ab", "a"]),
)
def test_documents_hold_the_text_in_order_whatever_the_blocks(text, cuts, min_chars, max_chars, delimiter):
    rule = DocumentRule(delimiter, min_chars, max_chars)
    whole = list(cut_documents([text], rule))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert list(cut_documents([text[a:b] for a, b in itertools.pairwise(edges)], rule)) == whole
    assert all(0 < len(document) <= max_chars for document in whole)
    kept = text.replace(delimiter, "") if delimiter else text
    assert re.sub(r"\s", "", "".join(whole)) == re.sub(r"\s", "", kept)


@pytest.mark.parametrize("packed", [False, True])
def test_file_is_streamed_in_blocks_and_normalized(tmp_path, packed):
    text = "".join(f"line {i} — é\r\n" + "\r\n" * (i % 7 == 0) for i in range(200_000))
    data = b"\xef\xbb\xbf" + text.encode()
    path = write(tmp_path / "a.txt", lzma.compress(data, preset=0) if packed else data)
    seen: list[int] = []
    found = documents(path, on_read=seen.append)
    assert len(found) > 1000
    assert "".join(found).replace("\n", "") == text.replace("\r\n", "")
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size == file_size(path)


def test_character_across_two_blocks(tmp_path):
    path = write(tmp_path / "a.txt", "x" * ((1 << 20) - 1) + "—tail")
    assert documents(path, DocumentRule(max_chars=1 << 21))[0].endswith("x—tail")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"'.*a\.txt' is empty: give a file with text"),
        (lzma.compress(b""), r"'.*a\.txt' is empty: give a file with text"),
        (b" \n\n\t\n", r"'.*a\.txt' holds nothing but white space"),
        (b"caf\xe9 au lait", r"'.*a\.txt' is not UTF-8: byte 0xe9 at position 3 \(invalid continuation byte\)"),
        (b"\xff\xfeh\x00i\x00", r"is not UTF-8: byte 0xff at position 0 \(invalid start byte\); convert it"),
        ("ok —".encode()[:-1], r"is not UTF-8: byte 0xe2 at position 3 \(unexpected end of data\)"),
        (b"y" * ((1 << 20) - 1) + b"\xe2\x80x", r"byte 0xe2 at position 1048575 \(invalid continuation byte\)"),
        (b"y" * (1 << 20) + b"z\xc3\x28", r"byte 0xc3 at position 1048577 \(invalid continuation byte\)"),
        (lzma.compress(b"z" * 70 + b"\xff"), r"byte 0xff at position 70 \(invalid start byte\)"),
        (lzma.compress(b"some text")[:-9], r"'.*a\.txt' is a damaged \.xz file: "),
        (lzma.compress(b"some text" * 99)[:20] + b"?" * 99, r"'.*a\.txt' is a damaged \.xz file: "),
    ],
)
def test_one_clear_line_for_unusable_text(tmp_path, data, message):
    path = write(tmp_path / "a.txt", data)
    with pytest.raises(DataError, match=message) as caught:
        documents(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    for use in (documents, file_size):
        with pytest.raises(DataError, match=r"^no such text file: '.*nowhere\.txt'$"):
            use(tmp_path / "nowhere.txt")
        with pytest.raises(DataError, match="is a folder: give text files, or one folder that `fp4jax data prepare`"):
            use(tmp_path)


def test_pipes_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a pipe or a device, and text is read more than once: write it to a file"):
        documents(tmp_path / "pipe")


def test_bad_rules():
    with pytest.raises(ValueError, match="delimiter='' separates nothing"):
        DocumentRule(delimiter="")
    with pytest.raises(ValueError, match="min_chars=10 and max_chars=5 must satisfy 0 <= min_chars <= max_chars"):
        DocumentRule(min_chars=10, max_chars=5)


SECTIONS = {"numbers": "one", "letters": "alpha\nbeta", "late": "omega"}


@pytest.mark.parametrize("filler", [3, (1 << 20) - 20, 1 << 20])
def test_sections_start_where_a_document_opens_with_their_words(tmp_path, filler):
    text = f"one omega\n\ntwo {'z ' * (filler // 2)}\n\nalpha\nbeta gamma\n\ndelta\n\nomega\n"
    path = write(tmp_path / "a.txt", text)
    found: dict[str | None, list[str]] = {}
    for section, document in read_documents(path, DocumentRule(min_chars=0), sections=SECTIONS):
        found.setdefault(section, []).append(document)
    assert list(found) == list(SECTIONS)
    assert found["numbers"][0] == "one omega"
    assert found["letters"] == ["alpha\nbeta gamma", "delta"]
    assert found["late"] == ["omega"]
    # Short documents are joined, but never over the start of a section.
    joined = [name for name, _ in read_documents(path, DocumentRule(min_chars=2048), sections=SECTIONS)]
    assert set(joined) == set(SECTIONS)


def test_missing_sections_are_named(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo")
    with pytest.raises(DataError, match="no document after the start of section 'numbers' opens with 'alpha"):
        documents(path, sections=SECTIONS)
    with pytest.raises(DataError, match="does not open with 'two', the opening of its first section 'numbers'"):
        documents(path, sections={"numbers": "two"})


def test_names_of_sources(tmp_path):
    assert source_names([Path("b/emma.txt.xz"), Path("notes.md")]) == ["emma", "notes.md"]
    assert source_names([Path("a/x.txt"), Path("b/x.txt"), Path("y")]) == ["a/x.txt", "b/x.txt", "y"]
    with pytest.raises(DataError, match=r"'a/\.\./x' is given twice, so its text would be both trained on and held"):
        source_names([Path("x"), Path("a/../x")])
    with pytest.raises(DataError, match="no text files given"):
        source_names([])


def test_alphabet_survives():
    text = string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")
    assert list(cut_documents([text], DocumentRule())) == [text.strip("\n")]
