"""The repository's address stands nowhere in the code: the clone that builds says it, and the metadata keep it."""

import importlib.metadata
import importlib.util
import subprocess
from pathlib import Path

import pytest

from hf_hybrid_ssm import doctor
from hf_hybrid_ssm.repository import source_address

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build():
    """hatch_build.py, as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run(["git", "init", "-q", tmp_path / "clone"], check=True)
    return tmp_path / "clone"


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://host.example/me/it.git", "https://host.example/me/it"),
        ("https://host.example/me/it/", "https://host.example/me/it"),
        ("https://me:secret@host.example/group/of/it.git", "https://host.example/group/of/it"),
        ("git@host.example:me/it.git", "https://host.example/me/it"),
        ("ssh://git@host.example:2222/me/it.git", "https://host.example/me/it"),
        ("/srv/git/it.git", None),
        ("../it", None),
        ("file:///srv/git/it.git", None),
        ("", None),
    ],
)
def test_the_page_of_a_remote(build, clone, remote, page):
    assert build.web_address(remote) == page
    if remote:
        subprocess.run(["git", "-C", clone, "remote", "add", "origin", remote], check=True)
        assert build.repository(clone) == page
        hook, metadata = build.RepositoryHook(str(clone), {}), {}
        hook.update(metadata)
        assert metadata["urls"] == ({} if page is None else {"Repository": page})


def test_a_folder_that_is_no_clone_has_none_and_a_workflow_says_its_own(build, clone, monkeypatch):
    subprocess.run(["git", "-C", clone, "remote", "add", "origin", "https://host.example/me/it"], check=True)
    (clone / "unpacked").mkdir()
    assert build.repository(clone / "unpacked") is None  # the folder above is not it
    monkeypatch.setenv("PATH", "")
    assert build.repository(clone) is None
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://forge.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "fork/it")
    assert build.repository(clone / "unpacked") == "https://forge.example/fork/it"


def test_the_package_and_its_doctor_read_it_from_the_metadata(monkeypatch):
    class Metadata:
        def get_all(self, name):
            return ["Changelog, https://host.example/log", "Repository, https://host.example/me/it"]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Metadata())
    assert source_address() == "https://host.example/me/it"
    monkeypatch.undo()
    found = doctor.examine()
    assert found["sources"] == source_address()
    assert "sources: https://host.example/me/it" in doctor.report(found | {"sources": "https://host.example/me/it"})


def test_without_metadata_there_is_none(monkeypatch):
    def metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    assert source_address() is None
