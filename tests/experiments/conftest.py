"""The experiments are no part of the installed package: they are imported from the root of the repository."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="module")
def kernel_script():
    """Loads `experiments/kernels/<name>.py` as a script: what lies beside it can be imported."""

    def load(name: str):
        path = Path(__file__).parents[2] / "experiments" / "kernels" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(path.parent)
            spec.loader.exec_module(module)
        return module

    return load
