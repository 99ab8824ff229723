"""`AutoModel` of an exported folder, without the package: the base model whose weights the folder holds."""

import os
import sys

from transformers import AutoConfig

import hf_hybrid_ssm
from tests import processes
from tests.tiny_models import CASES, SIZES

SCRIPT = """
import sys
sys.modules["hf_hybrid_ssm"] = None
from transformers import AutoModel
for folder in sys.argv[1:]:
    model, report = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"], report
    print(type(model).__name__, type(model).__module__.startswith("transformers_modules"))
    model.save_pretrained(folder + "-again")
    again = AutoModel.from_pretrained(folder + "-again", trust_remote_code=True)
    print(type(again).__name__, type(again).__module__.startswith("transformers_modules"))
"""
HEADS = ("SpadeForCausalLM", "SpadeForTokenClassification", "SpadeSeq2SeqForSequenceClassification")
BASES = ("SpadeModel", "SpadeEncoderModel", "SpadeSeq2SeqEncoderModel")


def test_the_base_of_an_exported_checkpoint(tmp_path):
    for name in HEADS:
        model_class = getattr(hf_hybrid_ssm, name)
        model_type = "spade_seq2seq" if "Seq2Seq" in name else "spade"
        config = AutoConfig.for_model(model_type, **SIZES | CASES[model_type][1])
        model_class(config).save_pretrained(tmp_path / name, export_code=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, *(tmp_path / name for name in HEADS)]
    ran = processes.run(command, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == [f"{base} True" for base in BASES for _ in range(2)]
