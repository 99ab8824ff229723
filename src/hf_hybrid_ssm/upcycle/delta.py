"""A student as what it has beyond its teacher: saved as a delta, loaded where the teacher is at hand.

A delta names its teacher, and a name is no permission: nothing outside of the folder is read or fetched until the user
says where the teacher is, by an argument or in the environment. The fingerprint decides whether it is the right one.
"""

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_hybrid_ssm.hub.cards import card_of_folder
from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.delta_files import (
    DELTA_WEIGHTS,
    Delta,
    is_delta,
    read_delta,
    replacing,
)
from hf_hybrid_ssm.hub.fingerprint import fingerprint_of
from hf_hybrid_ssm.hub.verify import check_tensors, own_tensors
from hf_hybrid_ssm.hub.writing import write_whole
from hf_hybrid_ssm.upcycle.early import refuse_own_folder
from hf_hybrid_ssm.upcycle.loading import TeacherFiles, open_teacher, weights_as_saved
from hf_hybrid_ssm.upcycle.teacher import Teacher

TEACHER = "HF_HYBRID_SSM_TEACHER"
"""The environment variable that says where the teacher is when no argument does."""
RECORDED = "recorded"
"""Given as the teacher: the name on the Hub that the delta gives, and never a path."""


def save_delta(
    student: PreTrainedModel,
    folder: str | os.PathLike,
    teacher: Teacher | str | os.PathLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Delta:
    """Save a student without the tensors that are still its teacher's: those of the same name and values.

    Args:
        student: of this package, made by `upcycle`, trained or not.
        folder: to write into; made where it does not exist.
        teacher: what the student was made from: as `load_teacher` gives it, or a folder, a name on the Hub or a GGUF
            file, which is read. Its last part is recorded, and no other part of a path.
        tokenizer: saved beside, for programs that ask the folder for it; a delta without takes its teacher's in
            this package's commands.
        dtype: of the saved tensors of matrices, such as bfloat16 to halve the file; by default the student's, and then
            the student comes back exactly.
        overwrite: replace what is in the folder.

    Returns:
        What was written into `delta.json`.

    Raises:
        FileExistsError: the folder holds something.
        ValueError: the teacher is at hand only, the student shares no tensor with it, or one of its own is not finite.
    """
    where = Path(folder)
    if where.is_dir() and any(where.iterdir()) and not overwrite:
        raise FileExistsError(f"folder={str(folder)!r} is not empty: name another one, or give overwrite=True.")
    source = teacher.source if isinstance(teacher, Teacher) else teacher
    if source is None:
        raise ValueError("the teacher has no source that a delta could name: give its folder, name or file.")
    refuse_own_folder(where, source)
    _check_is_whole(student)
    if isinstance(teacher, Teacher) and teacher.is_as_saved:
        weights = teacher.model.state_dict()
    else:
        weights = weights_as_saved(source)
    tensors, tied = student.state_dict(), _tied(student)
    own = {
        name: (value if dtype is None or value.dim() < 2 else value.to(dtype)).detach().cpu().contiguous()
        for name, value in tensors.items()
        if name not in tied and not _is_same(value, weights, name)
    }
    if not tensors.keys() & weights.keys() - own.keys():
        raise ValueError(f"teacher={str(source)!r} has no tensor that the student still has: save the student whole.")
    if wrong := [name for name, value in own.items() if not value.isfinite().all()]:
        raise ValueError(f"{wrong[0]} of the student holds NaN or infinite numbers: nothing is written.")
    is_on_hub = not Path(source).exists()
    name = str(source) if is_on_hub else Path(source).resolve().name
    delta = Delta(name, is_on_hub, fingerprint_of(weights), fingerprint_of(own))
    config = copy.deepcopy(student.config)
    config.architectures, config.dtype = [type(student).__name__], student.dtype
    if hasattr(config, "auto_map"):
        del config.auto_map  # a delta does not carry code
    with replacing(where) as beside:
        config.save_pretrained(beside)
        if student.can_generate():
            student.generation_config.save_pretrained(beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        save_file(own, beside / DELTA_WEIGHTS, metadata={"format": "pt"})
        delta.write(beside)
    return delta


def _check_is_whole(student: PreTrainedModel) -> None:
    """
    Raises:
        ValueError: it has other tensors than a model of its configuration, which is what a delta is read into.
    """
    config = copy.deepcopy(student.config)
    wanted, found = without_memory(lambda: AutoModelForCausalLM.from_config(config)).state_dict(), student.state_dict()
    if other := sorted(name for name in found.keys() ^ wanted.keys()):
        raise ValueError(
            f"{other[0]} is {'not ' if other[0] in wanted else ''}in the student, against its configuration: give the "
            "model inside of a wrapper, and merge adapters before (merge_and_unload)."
        )


def _tied(student: PreTrainedModel) -> set[str]:
    """The tensors that are others by another name.

    Raises:
        ValueError: the configuration ties them, and they have values of their own.
    """
    tensors, found = student.state_dict(), set()
    for name, other in (getattr(student, "all_tied_weights_keys", None) or {}).items():
        if tensors[name].data_ptr() == tensors[other].data_ptr():
            found.add(name)
        elif getattr(student.config, "tie_word_embeddings", False) and not torch.equal(tensors[name], tensors[other]):
            raise ValueError(
                f"tie_word_embeddings=True of the student, but {name} differs from {other}: set it False."
            )
    return found


def _is_same(value: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether the teacher has a tensor of that name with these values, in the student's type."""
    own = weights.get(name)
    return own is not None and own.shape == value.shape and torch.equal(own.to(value), value)


def loading_arguments(folder: Any, teacher: Any, others: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `from_pretrained` with which a delta becomes a model; None for what is no delta.

    Args:
        folder: the first argument of `from_pretrained`.
        teacher: where the user says the teacher is; None: see the environment variable `HF_HYBRID_SSM_TEACHER`.
        others: the other arguments.

    Raises:
        ValueError: as of `weights_of`; or a teacher was given for a folder that is no delta.
    """
    if "state_dict" in others or others.get("subfolder") or not is_delta(folder):
        if teacher is not None:
            raise ValueError(f"teacher={teacher!r} is for a delta, and {str(folder)!r} is none: leave it out.")
        return None
    where = Path(folder)
    options = dict(others) | {"state_dict": weights_of(where, teacher)}
    options["config"] = others.get("config") or str(where)
    return options


def set_generation(model: Any, folder: str | os.PathLike, others: Mapping[str, Any]) -> None:
    """The settings of `generate` of a delta, as `from_pretrained` would set those of a folder: given to it they could
    not always be saved again."""
    where = Path(folder)
    if others.get("generation_config") is None and (where / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(where)


def weights_of(folder: str | os.PathLike, teacher: str | os.PathLike | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the student, by name: those of the delta, and the teacher's in the type they were saved in.

    Raises:
        ValueError: nobody said where the teacher is, it is another one than the delta's, or the files are damaged.
    """
    where = Path(folder)
    delta = read_delta(where)
    shapes = check_tensors(where, config_of_folder(where))
    own = own_tensors(where)
    files = teacher_of(where, teacher)
    weights = weights_as_saved(files)
    if (fingerprint := fingerprint_of(weights)) != delta.fingerprint:
        raise ValueError(
            f"teacher={files.source!r} is not the teacher of {str(where)!r}: its weights have the fingerprint "
            f"{fingerprint[:16]}, those of {delta.teacher!r} had {delta.fingerprint[:16]}."
        )
    whole = {**weights, **own}
    if wrong := [name for name, value in whole.items() if name in shapes and tuple(value.shape) != shapes[name]]:
        raise ValueError(
            f"{where / 'config.json'}: {wrong[0]} of the teacher is {tuple(whole[wrong[0]].shape)}, not "
            f"{shapes[wrong[0]]}."
        )
    return _with_memory_of_their_own({name: value for name, value in whole.items() if name in shapes})


def _with_memory_of_their_own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No two share any: what the teacher ties may be trained apart."""
    used: set[int] = set()
    found = {}
    for name, value in tensors.items():
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone() if place in used else value
        used.add(place)
    return found


def teacher_of(folder: Path, teacher: str | os.PathLike | None = None) -> TeacherFiles:
    """The teacher of a delta, where the user says that it is: by the argument, else by the environment.

    Raises:
        ValueError: nobody said it, or it was recorded without a name on the Hub; or as of `open_teacher`.
    """
    delta = read_delta(folder)
    source = os.environ.get(TEACHER) if teacher is None else teacher
    if not source:
        raise ValueError(
            f"{str(folder)!r} is a delta of the teacher {delta.teacher!r}, and nothing outside of the folder is read "
            f"unasked: give teacher=PATH_OR_NAME, or set {TEACHER}"
            + (f"; {RECORDED!r} there takes that name, on the Hub." if delta.is_on_hub else ".")
        )
    if str(source) != RECORDED:
        return open_teacher(source)
    if not delta.is_on_hub:
        raise ValueError(
            f"teacher={RECORDED!r} takes a name on the Hub, and {str(folder)!r} was made of the folder or file "
            f"{delta.teacher!r}: give its path."
        )
    return open_teacher(delta.teacher, on_hub=True)


def write_full(
    folder: str | os.PathLike, target: str | os.PathLike, teacher: str | os.PathLike | None = None
) -> PreTrainedModel:
    """Write the whole model of a delta, with its code, tokenizer and card, as an ordinary folder.

    Args:
        folder: the delta.
        target: to write into; an earlier model there, with its tokenizer, goes once this one is whole.
        teacher: where the user says that the teacher is; None: see the environment variable `HF_HYBRID_SSM_TEACHER`.

    Raises:
        ValueError: `folder` is no delta, or as of `weights_of`.
    """
    where, to = Path(folder), Path(target)
    if not is_delta(where):
        raise ValueError(f"{str(where)!r} is no delta: it is whole already.")
    if to.resolve() == where.resolve():
        raise ValueError(f"target={str(to)!r} is the delta's own folder: name another one.")
    refuse_own_folder(to, os.environ.get(TEACHER) if teacher is None else teacher)
    tokenizer = tokenizer_of(where, teacher)
    model = AutoModelForCausalLM.from_pretrained(where, teacher=teacher)
    with replacing(to) as beside:
        model.save_pretrained(beside, export_code=True)
        tokenizer.save_pretrained(beside)
    if (where / "results.json").is_file():
        shutil.copyfile(where / "results.json", to / "results.json")
    write_whole(to / "README.md", card_of_folder(to))
    return model


def tokenizer_of(folder: str | os.PathLike, teacher: str | os.PathLike | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in a delta's folder; without one its teacher's, where the user says that this is.

    Raises:
        ValueError: nobody said it, or there is no tokenizer either.
    """
    where = Path(folder)
    if (where / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    return teacher_of(where, teacher).load_tokenizer()
