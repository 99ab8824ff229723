"""A student of a teacher that is at hand: the same weights, and what its layers have beyond them."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from hf_hybrid_ssm.students.configuration import HybridStudentConfig
from hf_hybrid_ssm.students.modeling import student_class


@torch.no_grad()
def student_of(teacher: PreTrainedModel, config: HybridStudentConfig | None = None, **plan: Any) -> Any:
    """A student with copies of its teacher's weights.

    Args:
        teacher: a language model of transformers; not changed.
        config: of the student; None: made of the teacher's and `plan`, as of `HybridStudentConfig.from_teacher`.

    Returns:
        The student, in the teacher's dtype, on its device and in its mode.

    Raises:
        ValueError: the teacher cannot be one, or has no such layers or groups.
    """
    config = HybridStudentConfig.from_teacher(teacher.config, **plan) if config is None else config
    with init.no_init_weights():
        student = student_class(type(teacher))._from_config(config, dtype=teacher.dtype)
    student.tie_weights()
    student.to(teacher.device)
    found = student.load_state_dict(teacher.state_dict(), strict=False)
    if found.unexpected_keys:
        raise ValueError(f"the teacher has {found.unexpected_keys[0]}, which its class does not: give a plain model.")
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.train(teacher.training)
