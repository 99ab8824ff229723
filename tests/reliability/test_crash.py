"""A half-written checkpoint is never taken for a whole one; a killed run ends with the bits of one left alone.

Runs are forked from a process that has imported everything already, and go on from
`hf_hybrid_ssm.training.resume.latest_complete_checkpoint`. It is not the process of the tests, since autograd refuses
to run in the fork of one whose backward passes have started threads:

    python -m tests.reliability.test_crash FAMILY KILLS FOLDER
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_hybrid_ssm.training.resume import checkpoint_defect, latest_complete_checkpoint
from tests import processes
from tests.reporting import THOROUGH
from tests.tiny_models import config_of

FAMILIES = {"longhorn": "longhorn", "bst": "bst mh s4", "lmu_isa": "lmu-isa", "spade": "spade s4 window"}
STEPS, SAVE_EVERY = 24, 2
ROOT = Path(__file__).parents[2]


def train(family: str, output_dir: Path) -> None:
    """A short run in a random order of rows, gone on with from the newest whole checkpoint."""
    set_seed(0)
    # wide enough that writing a checkpoint takes a while
    config = config_of(FAMILIES[family], vocab_size=4000, bos_token_id=None, eos_token_id=None)
    ids = torch.randint(3, 4000, (64, 16), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(output_dir), max_steps=STEPS, save_steps=SAVE_EVERY, save_total_limit=2, learning_rate=1e-2, seed=1,
        per_device_train_batch_size=4, logging_steps=1, report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}),
    )
    trainer.train(resume_from_checkpoint=latest_complete_checkpoint(output_dir))
    trainer.save_model()


def forked(family: str, folder: Path) -> int:
    """The process id of a child that trains; its exit status is 1 if that raised."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(1)
        train(family, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill(child: int, folder: Path, chance: Random, seconds: float) -> str:
    """End a child: soon after a new checkpoint's folder appears, or at a random moment; it may be done before."""
    known, writing = set(folder.glob("checkpoint-*")), chance.random() < 0.6
    end = time.monotonic() + (seconds if writing else chance.uniform(0.05, 0.5) * seconds)
    while time.monotonic() < end and not (writing and set(folder.glob("checkpoint-*")) - known):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            break
        time.sleep(0.0005)
    else:
        time.sleep(chance.uniform(0, 0.02) * writing)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return "while a checkpoint was written" if writing else "at a random moment"


def crash(family: str, kills: int, root: Path, chance: Random) -> Counter:
    """Kill runs of one family `kills` times in all and compare each finished run with one left alone."""
    alone, folder, found = root / "alone", root / "killed", Counter()
    start = time.monotonic()
    if os.waitpid(forked(family, alone), 0)[1]:
        raise RuntimeError(f"{family}: the run that was left alone failed")
    seconds = time.monotonic() - start
    while found["kills"] < kills:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for _ in range(min(chance.randint(2, 6), kills - found["kills"])):
            found[kill(forked(family, folder), folder, chance, seconds)] += 1
            found["kills"] += 1
            newest = get_last_checkpoint(folder)
            found["left a half-written newest checkpoint"] += newest is not None and bool(checkpoint_defect(newest))
        if os.waitpid(forked(family, folder), 0)[1]:
            found["runs that did not go on"] += 1
        else:
            one, other = ((run / "model.safetensors").read_bytes() for run in (folder, alone))
            found["finished runs, equal to the bit" if one == other else "finished runs that differ"] += 1
    return found


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


@pytest.mark.parametrize("name", [None, "latest", "optim", "model"])
@pytest.mark.parametrize("kept", [0.5, None])
def test_those_of_deepspeed(checkpoint, name, kept):
    """It names the folder of its states last (0.19.8); `name` is what is cut off, or was never written."""
    states = checkpoint / f"global_step{STEPS}"
    states.mkdir()
    (checkpoint / "optimizer.pt").rename(states / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    shutil.copy(checkpoint / "scheduler.pt", states / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (checkpoint / "latest").write_text(states.name)
    if name is None:
        assert checkpoint_defect(checkpoint) is None
        assert latest_complete_checkpoint(checkpoint.parent) == str(checkpoint)
        return
    path = checkpoint / name if name == "latest" else next(states.glob(f"*{name}_states.pt"))
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[: int(kept * len(content))])
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
    for name, shards in (("model.safetensors", "pytorch_model_fsdp_0"), ("optimizer.pt", "optimizer_0")):
        (checkpoint / name).unlink()
        (checkpoint / shards).mkdir()
    for shards in ("optimizer_0", "pytorch_model_fsdp_0"):
        assert f"{shards} has no .metadata" in checkpoint_defect(checkpoint)
        (checkpoint / shards / ".metadata").write_bytes(b"")
    assert checkpoint_defect(checkpoint) is None


@pytest.mark.timeout(3000 if THOROUGH else 300)
@pytest.mark.parametrize("family", FAMILIES if THOROUGH else ["longhorn"])
def test_killed_runs_end_like_one_left_alone(family, tmp_path, record_property):
    """Ended by SIGKILL at a random moment, or while a checkpoint is written, and started again two to six times.

    A half-written newest checkpoint is what `Trainer.train(resume_from_checkpoint=True)` would take.
    """
    kills = 13 if THOROUGH else 4
    command = [sys.executable, "-m", "tests.reliability.test_crash", family, str(kills), str(tmp_path)]
    ran = processes.run(command, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = Counter(json.loads(ran.stdout.splitlines()[-1]))
    for name, count in found.items():
        record_property(name, count)
    assert found["kills"] == kills and found["finished runs, equal to the bit"] >= 1
    assert found["finished runs that differ"] == found["runs that did not go on"] == 0


if __name__ == "__main__":
    name, number, folder = sys.argv[1:]
    print(json.dumps(crash(name, int(number), Path(folder), Random(1))))


def test_checkpoints_of_adapters_are_complete(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    config = config_of(FAMILIES["longhorn"], vocab_size=64, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_steps": 1}
    arguments = TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=4, **options)
    Trainer(model, arguments, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids})).train()
    assert latest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2/adapter_model.safetensors").write_bytes(b"cut off")
    assert latest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert "checkpoint-2 cannot be resumed from" in caplog.text
