"""Training that is killed at random, and goes on: the finished run has the bits of one that was left alone.

    python -m tests.reliability.crash --kills 50

Writes docs/reliability/crash.md. Every process is forked from this one, which has imported everything already, and is
ended by SIGKILL: at a random moment, or a random moment after a checkpoint's folder appeared, while it is written.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.training.resume import checkpoint_defect, latest_complete_checkpoint
from tests.invariants.variants import VARIANTS
from tests.reliability.reporting import table, write_page

FAMILIES = {"longhorn": "longhorn", "bst": "bst mh s4", "lmu_isa": "lmu-isa", "spade": "spade s4 window"}
STEPS, SAVE_EVERY = 24, 2


def train(family: str, output_dir: Path) -> None:
    """A short run in a random order of rows, gone on with from the newest whole checkpoint."""
    set_seed(0)
    model_type, fields = VARIANTS[FAMILIES[family]]
    # wide enough that writing a checkpoint takes a while
    config = AutoConfig.for_model(model_type, **{**fields, "vocab_size": 4000, "pad_token_id": 0})
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


def forked(function: Callable[[], None], quiet: bool = True) -> int:
    """The process id of a child that runs `function` and ends; its exit status is 1 if that raised."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if quiet:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
        torch.set_num_threads(1)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def digest(folder: Path) -> str:
    """Of the finished weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def kill_while_writing(child: int, folder: Path, chance: random.Random) -> None:
    """Wait for a checkpoint's folder that was not there, then a little."""
    known = set(folder.glob("checkpoint-*"))
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if set(folder.glob("checkpoint-*")) - known:
            time.sleep(chance.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.0005)


def kill_at_random(child: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def crash(family: str, kills: int, root: Path, chance: random.Random) -> Counter:
    """Kill runs of one family `kills` times in all and compare each finished run with one left alone."""
    alone = root / f"{family}-alone"
    start = time.monotonic()
    status = os.waitpid(forked(partial(train, family, alone)), 0)[1]
    seconds = time.monotonic() - start
    if status:
        raise RuntimeError(f"{family}: the run that was left alone failed")
    found: Counter = Counter()
    while found["kills"] < kills:
        folder = root / f"{family}-killed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for _ in range(min(chance.randint(2, 6), kills - found["kills"])):
            child = forked(partial(train, family, folder))
            if chance.random() < 0.6:
                kill_while_writing(child, folder, chance)
                found["while a checkpoint was written"] += 1
            else:
                kill_at_random(child, chance.uniform(0.05, 0.5) * seconds)
                found["at a random moment"] += 1
            found["kills"] += 1
            newest = get_last_checkpoint(folder)
            if newest is not None and checkpoint_defect(newest) is not None:
                found["left a half-written newest checkpoint"] += 1
        if os.waitpid(forked(partial(train, family, folder)), 0)[1]:
            found["runs that did not go on"] += 1
        elif digest(folder) == digest(alone):
            found["finished runs, equal to the bit"] += 1
        else:
            found["finished runs that differ"] += 1
    return found


COLUMNS = (
    "kills", "while a checkpoint was written", "at a random moment", "left a half-written newest checkpoint",
    "finished runs, equal to the bit", "finished runs that differ", "runs that did not go on",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for number, family in enumerate(FAMILIES):
            share = arguments.kills // len(FAMILIES) + (number < arguments.kills % len(FAMILIES))
            found[family] = crash(family, share, Path(root), chance)
            print(family, dict(found[family]))
    total = sum(found.values(), Counter())
    rows = [[name, *(counts[column] for column in COLUMNS)] for name, counts in {**found, "all": total}.items()]
    write_page(
        "crash",
        "Training that is killed",
        f"`make crash`: runs of {STEPS} steps with a checkpoint each {SAVE_EVERY}, ended by SIGKILL and started again "
        "from `hf_hybrid_ssm.training.resume.latest_complete_checkpoint`, two to six times each; then the run "
        "finishes and its weights are compared with those of a run that was left alone.",
        table(["family", *COLUMNS], rows),
        "A half-written newest checkpoint is what `Trainer.train(resume_from_checkpoint=True)` would take.",
    )
    return 1 if total["finished runs that differ"] or total["runs that did not go on"] else 0


if __name__ == "__main__":
    sys.exit(main())
