"""A checkpoint for every command, and a copy of it for those that change one."""

import shutil

import pytest

from tests.cli.folders import save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("cli") / "longhorn")


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")
