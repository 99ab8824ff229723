"""Folders of every origin are served: with code, converted from official checkpoints, students."""

import pytest
import torch

from hf_hybrid_ssm.cli import main
from tests.models.test_longhorn_conversion import official_state_dict
from tests.models.test_spade_conversion import GOLDEN
from tests.serving.engine.engines import (
    FAMILIES,
    SMALL,
    answered,
    engine_of,
    folder_of,
    generated,
    model_of,
    prompts_of,
    tokens_of,
)
from tests.serving.students import student_model


def exported(family, folder):
    model_of(folder_of(family)).save_pretrained(folder, export_code=True)
    assert any(folder.glob("modeling_*.py"))


def converted_longhorn(_, folder):
    source = folder.with_suffix(".pt")
    torch.save(official_state_dict(), source)
    assert main(["convert", "longhorn", str(source), str(folder)]) == 0


def converted_spade(_, folder):
    """Of fairseq's own layout, with an adaptive vocabulary."""
    assert main(["convert", "spade", str(GOLDEN / "fairseq_spade_lm.pt"), str(folder)]) == 0


def student(name, folder):
    """With its code."""
    student_model(name, head_dim=32, max_position_embeddings=512).save_pretrained(folder, export_code=True)


ORIGINS = {f"exported with its code, {family}": (exported, family) for family in FAMILIES}
ORIGINS |= {"converted, longhorn": (converted_longhorn, ""), "converted, spade": (converted_spade, "")}
ORIGINS |= {"student": (student, "student with a mixer beside groups")}


@pytest.mark.parametrize("origin", ORIGINS)
def test_origins(origin, tmp_path):
    """Prompts that are cut, and single tokens, give the text of `generate`."""
    make, family = ORIGINS[origin]
    folder = tmp_path / "folder"
    make(family, folder)
    model = model_of(folder)
    prompts = prompts_of(model, (1, 6, 70, 21), 10)
    with engine_of(folder, **SMALL, trust_remote_code=family in ("spade", "lmu-isa")) as engine:
        assert tokens_of(answered(engine, prompts)) == generated(model, prompts)
