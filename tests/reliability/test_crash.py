"""A half-written checkpoint is never taken for a whole one; a killed run ends like one left alone."""

import json
import random
import shutil
import zipfile

import pytest
from transformers.trainer_utils import get_last_checkpoint

from hf_hybrid_ssm.training.resume import checkpoint_defect, latest_complete_checkpoint
from tests.reliability.crash import STEPS, crash, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train("longhorn", folder)
    return folder


@pytest.fixture
def checkpoint(finished, tmp_path):
    """The newest checkpoint of a run, with the one before beside it; to be damaged."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run" / f"checkpoint-{STEPS}"


def test_whole_ones_are_taken(checkpoint, tmp_path):
    assert checkpoint_defect(checkpoint) is None
    assert latest_complete_checkpoint(checkpoint.parent) == str(checkpoint)
    assert latest_complete_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json"]
)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99, None])
def test_cut_off_files_are_noticed(checkpoint, name, kept):
    """`kept` is the share of a file's bytes that was written; None is no file at all."""
    path = checkpoint / name
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[: int(kept * len(content))])
    elif name == "config.json":
        return  # Trainer does not read it
    assert checkpoint_defect(checkpoint) is not None
    assert get_last_checkpoint(checkpoint.parent) == str(checkpoint)  # what Trainer itself would take
    assert latest_complete_checkpoint(checkpoint.parent) == str(checkpoint.with_name(f"checkpoint-{STEPS - 2}"))


def test_a_changed_byte_and_a_wrong_step_are_noticed(checkpoint):
    path = checkpoint / "optimizer.pt"
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)
    assert "broken entry" in checkpoint_defect(checkpoint)
    other = checkpoint.with_name(f"checkpoint-{STEPS - 2}")
    state = json.loads((other / "trainer_state.json").read_text())
    (other / "trainer_state.json").write_text(json.dumps(state | {"global_step": 1}))
    assert checkpoint_defect(other) == "trainer_state.json is of step 1"


def test_sharded_checkpoints_end_with_their_metadata(checkpoint):
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (checkpoint / name).mkdir()
    assert "optimizer_0 has no .metadata" in checkpoint_defect(checkpoint)
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(b"")
    assert "pytorch_model_fsdp_0 has no .metadata" in checkpoint_defect(checkpoint)
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"")
    assert checkpoint_defect(checkpoint) is None


@pytest.mark.timeout(300)
def test_killed_runs_end_like_one_left_alone(tmp_path):
    found = crash("longhorn", 4, tmp_path, random.Random(1))
    assert found["kills"] == 4 and found["finished runs, equal to the bit"] >= 1
    assert found["finished runs that differ"] == found["runs that did not go on"] == 0
