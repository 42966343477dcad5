"""The documentation is true: its examples run, its links resolve, and the names and files it mentions exist."""

import doctest
import importlib
import io
import re
from pathlib import Path

import jax
import pytest

import fp4jax
from fp4jax.estimators import ESTIMATORS
from fp4jax.formats import FORMATS
from fp4jax.rounding import ROUNDINGS

ROOT = Path(__file__).parents[1]
# Pages whose examples run here; the other pages are run by the tests of what they describe.
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/numerics.md", "docs/recipes.md",
    "docs/model.md", "docs/checkpoints.md", "docs/training.md", "docs/peers.md", "docs/README.md", "docs/cookbook.md",
    "docs/api.md",
)  # fmt: skip
MARKDOWN = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md", "notebooks/**/*.md")
    for page in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(?P<words>[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")  # of images too
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def text_of(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def examples_of(page: str) -> list[tuple[int, str]]:
    """(line, source) of the Python blocks of a page. One marked `python no-run` trains for minutes, or needs a GPU."""
    whole = (ROOT / page).read_text(encoding="utf-8")
    return [(whole.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(whole) if m["words"].strip() == "python"]


def run(page: str, line: int, source: str, names: dict) -> None:
    """Runs one block in the namespace of its page; prompts are compared with what they print."""
    if ">>>" not in source:
        exec(compile("\n" * line + source, page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(source, {}, page, page, line)
    test.globs = names  # get_doctest copies what it is given
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    assert runner.failures == 0, f"{page}, block at line {line}:\n{report.getvalue()}"


def anchors_of(page: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def broken_links(page: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(text_of(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        inside = file.suffix == ".md" and file.exists() and anchor
        if not file.exists() or (inside and anchor not in anchors_of(str(file.resolve().relative_to(ROOT)))):
            broken.append(target)
    return broken


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or " "):
                raise
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.fixture
def registries():
    """Takes out of the registries what a page put in; a page must do so itself."""
    listed = [FORMATS, ROUNDINGS, ESTIMATORS, fp4jax.recipes.RECIPES, fp4jax.dot.BACKENDS]
    before = [dict(registry) for registry in listed]
    yield
    after = [dict(registry) for registry in listed]
    for registry, rows in zip(listed, before, strict=True):
        registry.clear()
        registry.update(rows)
    assert after == before, "an example leaves a row in a registry"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("registries")
def test_examples_run_and_print_what_they_say(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for line, source in examples_of(page):
            run(page, line, source, names)


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_between_pages_resolve(page):
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_names_in_prose_exist(page):
    tokens = {token for token in CODE.findall(text_of(page)) if re.fullmatch(r"[\w./*-]+", token)}
    files = {t for t in tokens if re.match(r"(fp4jax|tests|docs|experiments|notebooks)/", t)}
    missing = {t for t in files if not any(ROOT.glob(t.rstrip("/")))}
    names = {t for t in tokens - files if t.startswith("fp4jax.")}
    assert not missing | {t for t in names if not resolves(t)}


def test_a_wrong_output_a_dead_link_and_a_lost_name_are_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](page.md#one) [b](page.md#two) [c](gone.md) ![d](gone.png)\n```python\n>>> 1 + 1\n3\n\n```\n"
    )
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    assert broken_links("page.md") == ["page.md#two", "gone.md", "gone.png"]
    ((line, source),) = examples_of("page.md")
    assert line == 3
    with pytest.raises(AssertionError, match=r"page.md, block at line 3:(.|\n)*Expected:\n +3\n +Got:\n +2"):
        run("page.md", line, source, {})
    assert resolves("fp4jax.scaling.PerBlock")
    assert not resolves("fp4jax.scaling.PerBloc")
    assert not resolves("fp4jax.scalin")


def test_the_newest_entry_of_the_changelog_is_this_version():
    versions = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == fp4jax.__version__


def test_the_table_of_recipes_is_complete():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(fp4jax.recipes.RECIPES)


def test_the_map_of_the_pages_is_complete():
    listed = re.findall(r"^\| \[\w+\]\(([\w.]+)\) \|", (ROOT / "docs" / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted([*listed, "README.md"]) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_contents_of_the_cookbook_are_its_headings():
    page = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^\d+\. \[(.+)\]\(", page, re.MULTILINE) == re.findall(r"^## (.+)$", page, re.MULTILINE)
