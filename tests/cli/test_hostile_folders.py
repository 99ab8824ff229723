"""What a folder can do to whoever opens it: nothing. Every command, with every folder of `hostile.py`.

None hangs, fills the memory, asks for code from elsewhere, or touches what is not in the folder.
"""

import os
import re
import shutil
import signal
import socket
import sys

import pytest
from transformers import modeling_utils

from hf_hybrid_ssm import LonghornForCausalLM
from hf_hybrid_ssm.cli import main
from tests.cli.folders import save_checkpoint
from tests.cli.hostile import ALL, CHECKING, HOSTILE, edited

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pipes, and links are not for everybody")
SECONDS = 20  # each needs a fraction of one
SMALL = {
    "generate": ("--prompt", "one a", "--max-new-tokens", "1"),
    "read": ("{text}", "--context", "{context}"),
    "plan": ("--batch", "1", "--length", "8"),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """With full attention, whose implementation a configuration can choose."""
    return save_checkpoint(tmp_path_factory.mktemp("hostile") / "hybrid", "longhorn + window and full attention")


@pytest.fixture
def nothing_is_fetched(monkeypatch):
    """As where the package `kernels` is installed; no kernel is asked for, and no connection opened."""

    def asked(*arguments, **_):
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_, **__: True, raising=False)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", asked)
    monkeypatch.setattr(socket.socket, "connect", asked)


@pytest.fixture
def in_time():
    def late(*_):
        raise AssertionError(f"still running after {SECONDS} seconds")

    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
@pytest.mark.usefixtures("nothing_is_fetched", "in_time")
def test_every_command(hostile, hybrid, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "text.txt").write_text("one two three four")
    for command in ALL if hostile.refusing == ALL else CHECKING:  # `plan` reads config.json alone
        folder = shutil.copytree(hybrid, tmp_path / command)
        hostile.change(folder, outside)
        before = snapshot(outside)
        places = {"text": outside / "text.txt", "context": folder / "context.safetensors"}
        options = [option.format(**places) for option in SMALL.get(command, ())]
        status = main([command, str(folder), *options])
        said = capsys.readouterr()
        assert snapshot(outside) == before, command
        assert "s3cret" not in said.out + said.err
        assert status == (command in hostile.refusing), (command, said.err[-500:])
        if status:
            assert said.err.count("\n") == 1 and len(said.err) < 2500, (command, said.err[-500:])
            assert re.search(hostile.message, said.err), (command, said.err)
        for name in ("README.md", "config.json", "configuration_longhorn.py"):  # written into the folder
            if command in ("card", "export") and not status and os.path.lexists(folder / name):
                assert not (folder / name).is_symlink()
        if any(path.name in ("config.json", "model.safetensors", "tokenizer.json") for path in outside.iterdir()):
            for path in outside.iterdir():  # back, for the next copy
                path.unlink()
            (outside / "text.txt").write_text("one two three four")


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation"])
@pytest.mark.usefixtures("nothing_is_fetched")
def test_a_model_is_not_loaded_with_code_that_its_folder_names(name, hybrid, tmp_path):
    """By any way of loading it; who loads it may choose."""
    folder = shutil.copytree(hybrid, tmp_path / "copy")
    assert LonghornForCausalLM.from_pretrained(folder, attn_implementation="eager")
    edited(folder / "config.json", **{name: "someone/kernels"})
    with pytest.raises(ValueError, match="which transformers has inside"):
        LonghornForCausalLM.from_pretrained(folder)
    with pytest.raises(AssertionError, match="asked for"):  # the user's own choice
        LonghornForCausalLM.from_pretrained(hybrid, attn_implementation="someone/kernels")


def test_the_file_that_is_checked_is_the_one_that_is_loaded(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert main(["check", str(folder)]) == 1
    edited(folder / "config.json", transformers_weights="other.safetensors")
    assert main(["check", str(folder), "--values"]) == 0
    assert main(["generate", str(folder), "--prompt", "one", "--max-new-tokens", "2"]) == 0
    whole = (folder / "other.safetensors").read_bytes()
    (folder / "other.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"other\.safetensors is not a complete"):
        LonghornForCausalLM.from_pretrained(folder)


def test_weights_may_lie_elsewhere_for_who_loads_them(copy, tmp_path, capsys):
    """People link large files; commands, which are given folders of others, follow no such link."""
    (tmp_path / "elsewhere").mkdir()
    (copy / "model.safetensors").rename(tmp_path / "elsewhere/weights")
    (copy / "model.safetensors").symlink_to(tmp_path / "elsewhere/weights")
    assert LonghornForCausalLM.from_pretrained(copy)
    assert main(["check", str(copy)]) == 1 and "leads out of its folder" in capsys.readouterr().err


def test_a_folder_of_the_hubs_cache_is_whole(checkpoint, tmp_path):
    """Its files are links to those beside it, by their hashes."""
    blobs, snapshot_of = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot_of.mkdir(parents=True)
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot_of / path.name).symlink_to(f"../../blobs/{number}")
    assert main(["check", str(snapshot_of)]) == 0


def test_other_links_within_a_folder_are_read(copy):
    (copy / "config.json").rename(copy / "real.json")
    (copy / "config.json").symlink_to("real.json")
    real = (copy / "real.json").read_bytes()
    assert main(["check", str(copy)]) == 0
    assert main(["export", str(copy)]) == 0  # replaces the link
    assert (copy / "real.json").read_bytes() == real and not (copy / "config.json").is_symlink()
