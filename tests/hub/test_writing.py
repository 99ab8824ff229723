"""What is written is whole or not there: on a full disk, when interrupted, and where a link stands in its place."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub.export import code_of
from hf_hybrid_ssm.hub.writing import whole_file, write_whole
from hf_hybrid_ssm.serving import save_context
from tests.tiny_models import build

CONTEXT = "context.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    build("longhorn", "LonghornForCausalLM").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def export(folder: Path) -> int:
    return main(["export", str(folder)])


def card(folder: Path) -> int:
    return main(["card", str(folder), "--overwrite"])


def context(folder: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(4)[None], past_key_values=cache, use_cache=True)
    try:
        save_context(cache, folder / CONTEXT, model, overwrite=True)
    except OSError:
        return 1
    return 0


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def full_disk(size: int):
    """No file grows beyond `size` bytes, as on a disk where that is all that is left."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size")
@pytest.mark.parametrize("write", [export, card, context], ids=lambda write: write.__name__)
def test_a_full_disk_leaves_what_was_there(write, folder, capsys):
    (folder / "README.md").write_text("Mine.\n" * 9)
    (folder / CONTEXT).write_bytes(b"an earlier one")
    before = files_of(folder)
    with full_disk(100):
        status = write(folder)
    assert status == 1 and files_of(folder) == before
    said = capsys.readouterr().err
    assert write is context or ("File too large" in said and said.count("\n") == 1)
    assert write(folder) == 0 and files_of(folder) != before


def test_an_export_interrupted_anywhere_is_done_by_the_next(folder, monkeypatch, capsys):
    """After each of its files in turn: those that are there are whole, and the next export and check find no fault."""
    replace, count = Path.replace, len(code_of("longhorn")) + 1
    for stop in range(count):
        left = iter(range(stop))

        def until(beside, target, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return replace(beside, target)

        copy = shutil.copytree(folder, folder.parent / str(stop))
        monkeypatch.setattr(Path, "replace", until)
        assert export(copy) == 130
        monkeypatch.setattr(Path, "replace", replace)
        assert len(list(copy.glob("*.py"))) == stop and not list(copy.glob("*.part"))
        assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()
        (copy / ".config.json.0123.part").write_text('{"model_type": "long')  # what a killed one leaves
        assert export(copy) == 0 and main(["check", str(copy)]) == 0


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("theirs")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "new")
    for path in (link, dangling):
        write_whole(path, "ours")
        assert path.read_text() == "ours" and not path.is_symlink()
    assert target.read_text() == "theirs" and not (tmp_path / "new").exists()


def write_tensors(path: Path, name: str) -> None:
    with whole_file(path) as beside:
        save_file({name: torch.ones(1)}, beside)


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
@pytest.mark.parametrize("write", [write_whole, write_tensors])
def test_permissions_are_those_of_the_file_that_was_there(tmp_path, write):
    kept = tmp_path / "kept"
    kept.touch(mode=0o640)
    write(kept, "text")
    assert kept.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    write(tmp_path / "new", "text")
    os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_an_error_while_writing_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(RuntimeError), whole_file(tmp_path / "file") as beside:
        beside.write_text("half")
        raise RuntimeError
    assert files_of(tmp_path) == {"file": b"before"}
