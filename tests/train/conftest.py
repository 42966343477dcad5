"""What the tests of runs share."""

from pathlib import Path

import pytest
from micro import write_text


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two text files."""
    return write_text(tmp_path_factory.mktemp("text"))
