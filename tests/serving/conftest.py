"""The tests in `engine` need vLLM, which has an environment of its own (`make vllm`); elsewhere none is collected."""

from importlib.util import find_spec
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name == "engine" and find_spec("vllm") is None else None
