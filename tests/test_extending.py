"""What extending the package takes, done in a copy of it: the files touched here are all that a change needs."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import processes

ROOT = Path(__file__).parents[1]
WITHOUT_PACKAGE = ROOT / "tests/hub/without_package.py"


class Copy:
    """A copy of the package that can be changed, and run in a process of its own."""

    def __init__(self, folder: Path):
        self.folder, self.package = folder, folder / "src/hf_hybrid_ssm"
        shutil.copytree(ROOT / "src/hf_hybrid_ssm", self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def add(self, path: str, text: str) -> None:
        assert not (self.package / path).exists()
        (self.package / path).write_text(text)

    def replace(self, path: str, old: str, new: str) -> None:
        text = (self.package / path).read_text()
        assert text.count(old) == 1
        (self.package / path).write_text(text.replace(old, new))

    def run(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{ROOT}"}
        environment |= {"HF_MODULES_CACHE": str(self.folder / "modules"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *arguments]
        ran = processes.run(command, cwd=self.folder, env=environment)
        assert ran.returncode == 0, ran.stderr[-4000:]

    def runs_without_package(self, *saved: str) -> None:
        """What models saved with their code answer where the package is not, by `answers` and those left here."""
        here = {name: load_file(self.folder / f"{name}-answers") for name in saved}
        self.run(str(WITHOUT_PACKAGE), *(str(self.folder / name) for name in saved))
        for name in saved:
            for answer, tensor in load_file(self.folder / name / "answers").items():
                assert torch.equal(tensor, here[name][answer]), (name, answer)


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def shown(*contents: str) -> list[str]:
    """The blocks of docs/extending.md that contain these words."""
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    return [next(block for block in blocks if words in block) for words in contents]


MIXER, CONFIGURATION, MODELS, DECLARATION = shown(
    "class LeakyAverage(", "class LeakyConfig(", "class LeakyForCausalLM(", "FAMILY = Family("
)


BACKEND = '''"""For the test: the equation itself, counted."""

import torch

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY

calls = 0


def supports(device_type, dtype):
    return None if device_type == "cpu" and dtype == torch.float32 else "it is for float32 on CPUs"


def long_conv_native(*arguments, **options):
    global calls
    calls += 1
    return REGISTRY["long_conv"].builtin["reference"](*arguments, **options)


'''
USE_BACKEND = """
import torch
from hf_hybrid_ssm import doctor
from hf_hybrid_ssm.hub.export import code_of
from hf_hybrid_ssm.ops.long_conv import long_conv, native

found = doctor.examine()["ops"]["long_conv"]
assert found["cpu float32"]["selected"] == "native"
assert found["cpu float32"]["kernel_errors"]["native"] < 1e-5
native.calls = 0
u, kernel = torch.randn(2, 9, 3), torch.randn(1, 3, 9)
y, _ = long_conv(u, kernel)
assert native.calls == 1
torch.testing.assert_close(y, long_conv(u, kernel, backend="torch")[0])
assert native.calls == 1
assert not [name for name, text in code_of("bst").items() if "long_conv_native" in text]
"""


def test_a_backend_is_one_file_and_one_entry(copy):
    copy.add("ops/long_conv/native.py", BACKEND)
    copy.replace(
        "ops/long_conv/__init__.py",
        'kernels={"triton": "hf_hybrid_ssm.ops.long_conv.triton"}',
        'kernels={"triton": "hf_hybrid_ssm.ops.long_conv.triton", "native": "hf_hybrid_ssm.ops.long_conv.native"}',
    )
    copy.run("-c", USE_BACKEND)


USE_MIXER = """
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.planning import Setup, plan
from tests.hub.without_package import answer

sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
sizes |= dict(sliding_window=5, ssm_type="leaky_average", tie_word_embeddings=False, pad_token_id=0)
LEAKY = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, pad_token_id=0)
ids = torch.arange(3, 27).view(2, 12)
settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
for family, fields in {"spade": {"ssm_trainable": "all"}, "bst": {"head_dim": 8, "ssm_layers": [0]}}.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **fields)).eval()
    assert "LeakyAverage" in str(model)
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
    assert plan(model.config, Setup(batch=2, length=12)).parameters == model.num_parameters()
    model.save_pretrained(family, export_code=True)
    with backend("torch"):
        save_file(answer(model, ids), f"{family}-answers")

torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("leaky", **LEAKY)).eval()
assert type(model) is hf_hybrid_ssm.LeakyForCausalLM
assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
model.save_pretrained("leaky", export_code=True)
with backend("torch"):
    save_file(answer(model, ids), "leaky-answers")
"""


def test_a_mixer_is_one_file_and_two_entries_and_a_family_around_it_a_folder(copy):
    """Those that docs/extending.md shows."""
    copy.add("layers/mixers/leaky_average.py", MIXER)
    path = "layers/mixers/registry.py"
    anchor = "from hf_hybrid_ssm.layers.mixers.lstm import LSTM\n"
    copy.replace(path, anchor, f"from hf_hybrid_ssm.layers.mixers.leaky_average import LeakyAverage\n{anchor}")
    copy.replace(path, '    "lstm": LSTM,\n', '    "lstm": LSTM,\n    "leaky_average": LeakyAverage,\n')
    types = "layers/mixers/types.py"
    copy.replace(types, '    "lstm": MixerType(),\n', '    "lstm": MixerType(),\n    "leaky_average": MixerType(),\n')

    (copy.package / "models/leaky").mkdir()
    copy.add("models/leaky/configuration_leaky.py", CONFIGURATION)
    copy.add(
        "models/leaky/modeling_leaky.py",
        "from hf_hybrid_ssm.layers.mixers.leaky_average import LeakyAverage\n"
        f"from hf_hybrid_ssm.models.leaky.configuration_leaky import LeakyConfig\n{MODELS}",
    )
    without_registration = [line for line in DECLARATION.splitlines() if "register_family" not in line]
    attached = (copy.package / "models/bst/__init__.py").read_text().partition("FAMILIES = ")
    lines = [*without_registration, "from hf_hybrid_ssm.lazy import attach", "".join(attached[1:])]
    copy.add("models/leaky/__init__.py", "\n".join(lines))
    copy.replace("models/__init__.py", '    "longhorn",\n', '    "longhorn",\n    "leaky",\n')
    copy.run("-c", USE_MIXER)
    copy.runs_without_package("bst", "leaky")


OUTSIDE = """
from dataclasses import replace

import peft.utils.constants
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

import leaky_outside
from hf_hybrid_ssm import register_family
from hf_hybrid_ssm.hub import card_of_folder, check_folder, export_code
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.planning.presets import preset_names

config = AutoConfig.for_model("leaky", vocab_size=40, hidden_size=16, num_hidden_layers=2, pad_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).eval()
assert type(model) is leaky_outside.LeakyForCausalLM is transformers.LeakyForCausalLM
ids = torch.arange(3, 27).view(2, 12)
settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
text = model.generate(ids, **settings)
assert torch.equal(text, model.generate(ids, use_cache=False, **settings))
padded, mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1), torch.ones(2, 15)
mask[:, :3] = 0
assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], text)
packed = model(ids.view(1, -1), seq_idx=torch.tensor([[0] * 12 + [1] * 12])).logits
torch.testing.assert_close(packed.view(2, 12, -1), model(ids).logits)
assert model(ids, labels=ids).loss.isfinite()

model.save_pretrained("saved")
classifier = AutoModelForSequenceClassification.from_pretrained("saved", num_labels=3)
assert type(classifier) is leaky_outside.LeakyForSequenceClassification
assert torch.equal(AutoModelForCausalLM.from_pretrained("saved").generate(ids, **settings), text)
check_folder("saved")
card = card_of_folder("saved")
assert "`LeakyForCausalLM`" in card and "Layers 0 to 1: leaky average." in card
assert plan(config, Setup(batch=2, length=12)).parameters == model.num_parameters()
assert "leaky/tiny" in preset_names()
assert peft.get_peft_model(model, peft.LoraConfig()).get_nb_trainable_parameters()[0] > 0
assert "leaky" in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

for save in (lambda: export_code("saved"), lambda: model.save_pretrained("again", export_code=True)):
    with pytest.raises(ValueError, match="outside"):
        save()
family = leaky_outside.FAMILY
register_family(family)  # again, as a notebook's cell
refused = {
    "model_type='bst' is taken, by hf_hybrid_ssm.models.bst": replace(family, model_type="bst"),
    "model_type='llama' is taken, by LlamaConfig": replace(family, model_type="llama"),
    r"transformers has no MODEL_FOR_DREAMS_MAPPING": replace(family, heads={"MODEL_FOR_DREAMS": "LeakyModel"}),
    "package='leaky_outside' has no LeakierModel": replace(family, heads={"MODEL": "LeakierModel"}),
}
for message, wrong in refused.items():
    with pytest.raises(ValueError, match=message):
        register_family(wrong)
with pytest.raises(TypeError, match="family must be a Family .*, got str"):
    register_family("leaky")
assert AutoConfig.for_model("leaky").model_type == "leaky"
"""


def test_a_family_from_outside_is_registered(tmp_path):
    """The one that docs/extending.md shows, in a module of its own."""
    (tmp_path / "leaky_outside.py").write_text("\n".join((MIXER, CONFIGURATION, MODELS, DECLARATION)))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    ran = processes.run([sys.executable, "-c", OUTSIDE], cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
