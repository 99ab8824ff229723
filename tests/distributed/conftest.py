"""One launch of two processes for all tests of this folder."""

from pathlib import Path

import pytest

from tests.distributed import resuming, tensor_parallel
from tests.distributed.launching import in_two_processes


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """The folder with what two processes found."""
    folder = tmp_path_factory.mktemp("two_processes")
    for job in (tensor_parallel, resuming):
        job.prepare(folder)
    in_two_processes(Path(__file__).with_name("worker.py"), folder)
    return folder
