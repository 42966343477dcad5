"""The circumstances of a result."""

import subprocess

import pytest

from fp4jax.train.rundir import circumstances, commit


@pytest.fixture
def checkout(tmp_path):
    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        run = ["git", "-C", str(tmp_path), *who, *args]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "file").write_text("one")
    git("init", "-q")
    git("add", "file")
    git("commit", "-qm", "one")
    return tmp_path, git("rev-parse", "--short=7", "HEAD")


def test_a_result_says_at_which_commit_it_was_made(checkout):
    folder, head = checkout
    assert commit(folder) == f" ({head})"
    (folder / "file").write_text("two")
    assert commit(folder) == f" ({head}-dirty)"


def test_what_is_no_checkout_has_no_commit(checkout):
    folder, _ = checkout
    inside = folder / "site-packages"  # of somebody's own project
    inside.mkdir()
    assert commit(inside) == ""
    (inside / ".git").write_text("damaged")
    assert commit(inside) == ""


def test_versions_name_the_package_first():
    assert circumstances()["versions"].startswith("fp4jax ")
