"""Machines without a compiler, processes that are spawned, folders with spaces and other letters."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import processes

ROOT = Path(__file__).parents[1]
SPECIAL = "vocab_size=32, pad_token_id=0, bos_token_id=None, eos_token_id=None, hidden_size=16, num_hidden_layers=2"
FAMILIES = {
    "longhorn": {},
    "bst": {"num_attention_heads": 2, "head_dim": 8, "sliding_window": 4, "intermediate_size": 32},
    "spade": {"num_attention_heads": 2, "sliding_window": 5, "intermediate_size": 32},
    "lmu_isa": {"lmu_order": 10, "lmu_theta": 20.0, "num_attention_heads": 2, "post_intermediate_size": 32},
}
STEP = f"""
import json, logging, sys, torch
import hf_hybrid_ssm
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(0)
ids = torch.randint(1, 32, (2, 12))
found = {{}}
for family, fields in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, {SPECIAL}, **fields))
    loss = model(ids, labels=ids).loss
    loss.backward()
    text = model.eval().generate(ids, max_new_tokens=5, do_sample=False)
    found[family] = [loss.item(), text.tolist()]
print(json.dumps([missing_compiler(), found]))
"""


def answers(tmp_path, families=tuple(FAMILIES), **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HYBRID_SSM_CACHE": str(tmp_path / "kernels")}
    environment = {name: value for name, value in (environment | variables).items() if value is not None}
    command = [sys.executable, "-c", STEP, json.dumps({name: FAMILIES[name] for name in families})]
    done = processes.run(command, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_without_a_compiler_the_torch_backend_gives_the_same(tmp_path):
    """As on macOS and Windows; a warning for each op says what is missing, once."""
    (missing, bare), said = answers(tmp_path, PATH=str(tmp_path), CC="no-such-compiler", HF_HYBRID_SSM_BACKEND=None)
    assert missing is None or "no C compiler was found" in missing
    if missing is None:
        pytest.skip("Python's own configuration names a compiler by its whole path")
    assert not (tmp_path / "kernels").exists()
    (_, forced), _ = answers(tmp_path, HF_HYBRID_SSM_BACKEND="torch")
    assert bare == forced
    warned = [line for line in said.splitlines() if "no C compiler was found" in line]
    assert warned and len(warned) == len(set(warned))


def test_kernels_are_compiled_into_folders_with_other_letters(tmp_path):
    folder = tmp_path / "Größe und Maß" / "日本"
    (missing, compiled), _ = answers(folder, ["longhorn"])  # compiling takes longer than all of the rest
    if missing:
        pytest.skip(missing)
    assert list((folder / "kernels").glob("**/*.so")), "nothing was compiled"
    (_, plain), _ = answers(tmp_path, ["longhorn"], HF_HYBRID_SSM_BACKEND="torch")
    for family, (loss, text) in plain.items():
        assert compiled[family][0] == pytest.approx(loss, rel=1e-5) and compiled[family][1] == text


SPAWNED = """
import torch
import hf_hybrid_ssm

def answer(model, ids, queue):
    queue.put(model(ids).logits.detach().numpy())

if __name__ == "__main__":
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments  # what is spawned needs none

    torch.manual_seed(0)
    config = AutoConfig.for_model("longhorn", vocab_size=32, hidden_size=16, num_hidden_layers=1)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.randint(1, 32, (2, 12))
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=answer, args=(model, ids, queue))
    process.start()
    there = torch.from_numpy(queue.get(timeout=120))
    process.join()
    assert torch.equal(there, model(ids).logits)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = dict(max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no")
    workers = dict(dataloader_num_workers=1, dataloader_persistent_workers=True)
    torch.multiprocessing.set_start_method("spawn", force=True)
    Trainer(model, TrainingArguments("aus gabe", **options, **workers), train_dataset=rows).train()
    print("done")
"""


def test_spawned_processes_compute_and_load_the_same(tmp_path):
    """As macOS and Windows start them: the model is pickled, the package imported anew."""
    script = tmp_path / "mein skript ü.py"
    script.write_text(SPAWNED, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = processes.run([sys.executable, script], cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
