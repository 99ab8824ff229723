"""Which checkpoint of an interrupted `Trainer` run to resume from.

`Trainer` writes a checkpoint file by file into its final place, so a process that is killed while writing leaves an
incomplete folder as the newest checkpoint; `resume_from_checkpoint=True` would use it.
"""

import logging
import os
import re
import zipfile
from pathlib import Path

from hf_hybrid_ssm.hub.reading import read_any_json, read_json
from hf_hybrid_ssm.hub.verify_files import ADAPTER_CONFIG, tensors_of, tensors_of_adapter

logger = logging.getLogger(__name__)
NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")


def latest_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The folder to give to `Trainer.train(resume_from_checkpoint=...)`; None if there is none to resume from.

    Every file of a checkpoint is read once, newest folder first, until one is complete. A warning tells of each
    that is passed over.
    """
    folder = Path(output_dir)
    saved = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _STEP.fullmatch(path.name))]
    for _, path in sorted(saved, reverse=True):
        if (defect := checkpoint_defect(path)) is None:
            return str(path)
        logger.warning("%s cannot be resumed from: %s.", path, defect)
    return None


_STEP = re.compile(r"checkpoint-(\d+)")


def checkpoint_defect(checkpoint: str | os.PathLike) -> str | None:
    """What is wrong with a `Trainer` checkpoint, in a sentence; None if it is complete.

    One that was saved with `save_only_model=True` is incomplete: resuming from it would not repeat the run.
    """
    folder = Path(checkpoint)
    # FSDP saves both in folders, through torch.distributed
    sharded = sorted(path for name in ("pytorch_model_fsdp_*", "optimizer_*") for path in folder.glob(name))
    if sharded:
        if missing := [path.name for path in sharded if not (path / ".metadata").is_file()]:
            return f"{missing[0]} has no .metadata, which is written last"
        needed: tuple[str, ...] = ("trainer_state.json", "scheduler.pt")
    elif (folder / "latest").is_file():  # DeepSpeed, which names there the folder of weights and states, last
        states = folder / (folder / "latest").read_text(encoding="utf-8").strip()
        if not any(states.glob("*optim_states.pt")) or not any(states.glob("*model_states.pt")):
            return f"{states.name} lacks its states"
        for path in sorted(states.glob("*.pt")):
            if reason := _archive_damage(path):
                return reason
        needed = ("trainer_state.json",)
    else:
        needed = NEEDED
        try:
            (tensors_of_adapter if (folder / ADAPTER_CONFIG).is_file() else tensors_of)(folder)
        except ValueError as error:
            return str(error)
    if missing := [name for name in needed if not (folder / name).is_file()]:
        return f"{missing[0]} is missing"
    try:
        step = read_json(folder / "trainer_state.json").get("global_step")
    except ValueError as error:
        return str(error)
    if folder.name != f"checkpoint-{step}":
        return f"trainer_state.json is of step {step}"
    if not list(folder.glob("rng_state*.pth")):
        return "rng_state.pth is missing"
    for path in (*folder.glob("*.pt"), *folder.glob("rng_state*.pth")):
        if reason := _archive_damage(path):
            return reason
    for path in folder.glob("*.json"):
        try:
            read_any_json(path)
        except ValueError as error:
            return str(error)
    return None


def _archive_damage(path: Path) -> str | None:
    """`torch.save` writes zip archives: a directory at the end, a checksum for each entry. Nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return f"{path.name} is not a complete archive: {error}"
    return f"{path.name} has a broken entry {broken}" if broken else None
