"""A script that knows no family, unchanged, by `hf-hybrid-ssm run` and by the plain import.

The script is our own, after the example of transformers that trains a causal language model: its own examples are in
neither its wheel nor its source distribution, so that pip cannot fetch them as `tests/upstream/fetch.py` fetches its
tests.
"""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.folders import environment, forked, python

SCRIPT = Path(__file__).with_name("stock_training.py")
IS_KNOWN = "from transformers import AutoConfig; print(AutoConfig.from_pretrained(sys.argv[1]).model_type)"
OPTIONS = ["--max_steps", "2", "--report_to", "none", "--use_cpu", "--save_strategy", "no", "--seed", "3"]


def training(checkpoint: Path, output: Path) -> list[str]:
    text = output.with_suffix(".txt")
    text.write_text("\n".join(["one two three four five six seven"] * 30), encoding="utf-8")
    data = ["--model_name_or_path", str(checkpoint), "--train_file", str(text), "--output_dir", str(output)]
    return [*data, *OPTIONS]


def test_run_is_the_plain_import(checkpoint, tmp_path):
    """The same weights as by the script after an import, to the bit; from a checkpoint and from scratch."""
    command = ["-m", "hf_hybrid_ssm", "run", SCRIPT]
    ran = forked(*command, *training(checkpoint, tmp_path / "run"), with_transformers=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads((tmp_path / "run/eval_results.json").read_text())["eval_loss"] > 0
    code = f"import hf_hybrid_ssm, runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    ran = forked("-c", code, *training(checkpoint, tmp_path / "import"))
    assert ran.returncode == 0, ran.stderr[-2000:]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "import"))
    assert first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)


def test_run_from_scratch_by_model_type(checkpoint, tmp_path):
    given = training(checkpoint, tmp_path / "new")
    given[:2] = ["--model_type", "longhorn", "--tokenizer_name", str(checkpoint), "--config_overrides"]
    given.insert(5, "vocab_size=300,hidden_size=16,num_hidden_layers=1,state_size=4")
    ran = forked("-m", "hf_hybrid_ssm", "run", SCRIPT, *given)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads((tmp_path / "new/config.json").read_text())["model_type"] == "longhorn"


def test_run_of_modules_commands_and_statuses(checkpoint, tmp_path):
    """What runs is as if it ran alone: its name, its arguments, its neighbours, its exit status."""
    (tmp_path / "neighbour.py").write_text("NAME = 'here'\n")
    (tmp_path / "script.py").write_text(
        "import sys, neighbour\nfrom transformers import AutoConfig\n"
        "if __name__ == '__main__':\n    print(__file__.endswith('script.py'), sys.argv[1:], neighbour.NAME,"
        " AutoConfig.from_pretrained(sys.argv[1]).model_type)\n    sys.exit(7)\n"
    )
    for target in ([str(tmp_path / "script.py")], ["-m", "script"]):
        ran = forked("-m", "hf_hybrid_ssm", "run", *target, checkpoint, "--help", cwd=tmp_path)
        assert ran.returncode == 7, ran.stderr
        assert ran.stdout.split() == ["True", f"['{checkpoint}',", "'--help']", "here", "longhorn"]
    ran = forked("-m", "hf_hybrid_ssm", "run", "transformers", "version", cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout.strip()[0].isdigit()
    (tmp_path / "broken.py").write_text("raise ValueError('of the script')\n")
    ran = forked("-m", "hf_hybrid_ssm", "run", "broken.py", cwd=tmp_path)
    assert ran.returncode == 1 and "Traceback" in ran.stderr and "of the script" in ran.stderr


def test_an_import_at_the_start_of_python_is_enough(checkpoint, tmp_path):
    """In `sitecustomize.py`; torch is imported by who needs it."""
    (tmp_path / "sitecustomize.py").write_text("import hf_hybrid_ssm\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    ran = python(
        "-c", f"import sys; print('torch' in sys.modules); {IS_KNOWN}", checkpoint, env=environment(PYTHONPATH=path)
    )
    assert ran.stdout.split() == ["False", "longhorn"], ran.stderr


def test_classes_are_found_by_their_names_in_the_library():
    """Servers and pipelines look up `architectures`; transformers' own names stay its own."""
    code = """
import hf_hybrid_ssm, transformers
from hf_hybrid_ssm.models import FAMILIES
for family in FAMILIES:
    for name in family.names:
        assert getattr(transformers, name) is getattr(hf_hybrid_ssm, name), name
assert transformers.LlamaConfig.__module__.startswith("transformers.")
import transformers.processing_utils  # puts another module `transformers` in the place of this one
assert sys.modules["transformers"].BstForMaskedLM is transformers.BstForMaskedLM is hf_hybrid_ssm.BstForMaskedLM
"""
    for before in (False, True):
        first = f"import sys; assert ('transformers' in sys.modules) is {before}"
        ran = forked("-c", first + code, with_transformers=before)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("order", ["hf_hybrid_ssm, transformers", "transformers, hf_hybrid_ssm"])
def test_registration_does_without_torch(order):
    ran = python("-c", f"import {order}, sys; assert 'torch' not in sys.modules")
    assert ran.returncode == 0, ran.stderr
