"""A share of the matrix that `python -m tests.matrix.report` asks in full, and the machinery of its page."""

import subprocess
import sys

import pytest
import torch
from peft.utils import constants

from hf_hybrid_ssm.auto import FAMILIES, register
from tests.matrix import compiling, offloading
from tests.matrix import peft as peft_columns
from tests.matrix.cells import Answer, ask
from tests.matrix.columns import Column
from tests.matrix.footnotes import Footnotes
from tests.matrix.report import ANSWERS, GROUPS, PAGE, group_of, held, section
from tests.matrix.rows import ROWS, check_generation, model_of


def kills_its_process(row: str) -> None:
    import os

    os.kill(os.getpid(), 9)


def waits(row: str) -> None:
    import time

    time.sleep(60)


def test_a_cell_survives_a_crash_and_a_hang():
    crash = ask(Column("crash", kills_its_process, "torch"), "Longhorn", 30)
    assert crash.kind == "no" and "exit code -9" in crash.error
    hang = ask(Column("hang", waits, "torch"), "Longhorn", 0.5)
    assert hang.kind == "no" and "TimeoutError" in hang.error
    absent = ask(Column("absent", waits, "torch", ("no-such-distribution",)), "Longhorn", 30)
    assert absent == Answer("not installed", "no-such-distribution is not installed")


def test_errors_that_no_limit_explains_are_told():
    footnotes, column = Footnotes(), Column("column", waits, "torch")
    marks = [footnotes.mark(row, column, Answer("no", "ValueError: ours | `x`")) for row in ("one", "two")]
    assert marks == ["no [1]", "no [1]"]
    assert footnotes.text() == "1. **column**: `ValueError: ours | 'x'`"
    assert footnotes.unexplained == ["one, column: ValueError: ours | `x`", "two, column: ValueError: ours | `x`"]


def test_page_tells_the_answers_held_and_a_limit_explains_every_red_one():
    answers, footnotes, page = held(ANSWERS), Footnotes(), PAGE.read_text(encoding="utf-8")
    for name in (name for name in GROUPS if name in answers):
        assert section(group_of(name), answers[name], footnotes) in page, name
    assert footnotes.lines
    assert footnotes.unexplained == []


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("check", [peft_columns.lora_defaults, peft_columns.ia3_defaults])
def test_peft_needs_no_module_names(check, row):
    check(row)


@pytest.mark.parametrize("check", [peft_columns.dora, peft_columns.ia3, peft_columns.prompt_tuning])
@pytest.mark.parametrize("row", ["Longhorn", "BST, S4, context by head", "SPADE encoder-decoder"])
def test_adapters_on_every_linear_map(check, row):
    check(row)


@pytest.mark.parametrize("row", ROWS)
def test_linear_maps_see_three_dimensions_at_most(row):
    """The 8-bit ones of bitsandbytes fail on more."""
    model, seen = model_of(row), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dim()))
    check_generation(model, row)
    assert seen and max(seen) <= 3


def test_step_compiles_once():
    torch._dynamo.reset()  # the graphs of other tests count against a limit
    compiling.one_token("LMU-ISA")


@pytest.mark.parametrize("row", ["Longhorn", "BST, free filter", "LMU-ISA", "SPADE, S4", "SPADE, Hyena"])
def test_weights_on_disk_change_no_bit(row):
    offloading.everything_on_disk(row)


def test_automatic_device_map_divides_a_model():
    offloading.cpu_and_disk("SPADE encoder-decoder")


def test_peft_learns_the_families_when_it_is_imported():
    lines = """
import sys, hf_hybrid_ssm
assert "peft" not in sys.modules and "torch" not in sys.modules
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as lora
assert "hf_hybrid_ssm.models.longhorn.modeling_longhorn" not in sys.modules
assert all(family.model_type in lora for family in hf_hybrid_ssm.FAMILIES)
assert lora["llama"] == ["q_proj", "v_proj"]
"""
    subprocess.run([sys.executable, "-c", lines], check=True)


def test_families_enter_tables_that_are_there_already(monkeypatch):
    tables = [name for name in vars(constants) if name.endswith(("_TARGET_MODULES_MAPPING", "_MODULES_MAPPING"))]
    ours = {family.model_type for family in FAMILIES}
    full = {name: dict(getattr(constants, name)) for name in tables}
    for name in tables:
        known = {key: value for key, value in full[name].items() if key not in ours}
        monkeypatch.setattr(constants, name, known | {"bst": ["PEFT's own"]} if "IA3" in name else known)
    register()
    for name in tables:
        expected = full[name] | {"bst": ["PEFT's own"]} if "IA3" in name else full[name]
        assert getattr(constants, name) == expected, name
    assert "longhorn" in constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
