"""The students that servers are tested with: every kind of layer, sink and memory, of several teachers, in float32."""

from functools import cache

import torch
from transformers import PreTrainedModel

from hf_hybrid_ssm.students.initial import student_of
from tests.students.teachers import WINDOW, teacher

# name → teacher, and the plan besides its windows
STUDENTS: dict[str, tuple[str, dict]] = {
    "student of windows": ("llama", {}),
    "student of windows and first tokens": ("qwen3", {"sink": "first_token"}),
    "student with a mixer beside windows": ("qwen3", {"memory": "longhorn"}),
    "student with mixers instead": ("llama", {"memory": "longhorn", "instead": True}),
    "student with context states": ("qwen2", {"memory": "context", "sink": None, "ssm_state_size": 4}),
}
# whose teachers' own code makes or counts something anew in each step
UNEVEN_STUDENTS: dict[str, tuple[str, dict]] = {
    "student of a teacher with capped scores": ("gemma2", {"sink": None}),
    "student of a teacher with sinks": ("gpt_oss", {}),
}
# with layers that see all tokens
FULL_STUDENTS: dict[str, tuple[str, dict]] = {
    "student of windows and full layers": ("llama", {"keep": [2], "attn_scale": 0.3, "floor_scale": 4}),
    "student of single groups": ("qwen3", {"keep": [(0, 1), 2], "sink": "first_token", "attn_scale": 0.3}),
    "student of a teacher with windows": ("gemma3_text", {"keep": [(1, 0), 3]}),
    "student of experts": ("mixtral", {"keep": [1]}),
    "student with mixers and a full layer": (
        "llama",
        {"keep": [1], "memory": "longhorn", "instead": True, "state_size": 4},
    ),
    "student with a mixer beside groups": ("llama", {"keep": [(1, 0)], "memory": "longhorn"}),
    "student all of whose layers are kept": ("phi", {"keep": [0, 1, 2, 3]}),
}

EVERY_STUDENT = STUDENTS | UNEVEN_STUDENTS | FULL_STUDENTS


@cache
def student_model(name: str, **sizes: int) -> PreTrainedModel:
    """With memories that are heard.

    Args:
        sizes: fields of the teacher's configuration.
    """
    of_teacher, plan = EVERY_STUDENT[name]
    torch.manual_seed(0)
    model = student_of(teacher(of_teacher, **sizes), window=WINDOW, **plan).float()
    with torch.no_grad():
        for parameter in (parameter for name, parameter in model.named_parameters() if ".memory." in name):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
