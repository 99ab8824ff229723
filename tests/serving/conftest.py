"""The tests in `engine` need vLLM, which has an environment of its own (`make vllm`): elsewhere they are left out, and
counted as such."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import LEFT_OUT


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name != "engine" or find_spec("vllm") is not None:
        return None
    config.stash[LEFT_OUT]["tests/serving/engine"] = "vLLM is not installed: `make vllm` has an environment with it"
    return True
