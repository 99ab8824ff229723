"""transformers' own test mixins, loaded from its unpacked source distribution.

The distribution lacks modules that its mixins import; they are supplied here: the exporter and the generation mixin
(empty: their checks are not part of the distribution, and generation is in tests/models, tests/invariants and
tests/programs for every variant), a set of common configuration values, and what the FSDP mixin asks about devices.
Nothing of the distribution is copied into this repository.

The folder that holds the distribution's `tests` is named by the environment variable HF_HYBRID_SSM_UPSTREAM_TESTS
(`python -m tests.reporting upstream` downloads it and sets the variable).
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from torch._tensor_str import printoptions

PACKAGE = "transformers_upstream_tests"
VARIABLE = "HF_HYBRID_SSM_UPSTREAM_TESTS"


class GenerationTesterMixin:
    """Of what can generate, as transformers' own tests ask."""


def _module(name: str, **attributes) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module


def _load():
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"{VARIABLE} is not set; `python -m tests.reporting upstream` sets it", allow_module_level=True)
    folder = Path(root, "tests")
    if not (folder / "test_modeling_common.py").exists():
        raise FileNotFoundError(f"{VARIABLE}={root} holds no tests/test_modeling_common.py")
    if PACKAGE not in sys.modules:
        _module(PACKAGE)
        sys.modules[PACKAGE].__path__ = [str(folder)]
        _module(f"{PACKAGE}.exporters")
        _module(f"{PACKAGE}.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        _module(f"{PACKAGE}.generation")
        _module(f"{PACKAGE}.generation.test_utils", GenerationTesterMixin=GenerationTesterMixin)
        _module(f"{PACKAGE}.utils")
        common = {
            "return_dict": False,
            "output_hidden_states": True,
            "output_attentions": True,
            "dtype": "float16",
            "chunk_size_feed_forward": 5,
            "architectures": ["BertModel"],
            "id2label": {0: "label"},
            "label2id": {"label": "0"},
            "problem_type": "regression",
        }
        _module(f"{PACKAGE}.utils.test_configuration_utils", config_common_kwargs=common)
        devices = {
            "_get_distributed_backend": lambda: "gloo",
            "_get_distributed_device_type": lambda: "cpu",
            "_get_rank_device": lambda rank: torch.device("cpu"),
            "_set_rank_device": lambda rank: None,
            "_start_rank_processes": None,  # `fsdp.py` runs the checks of all models in one launch
        }
        _module(f"{PACKAGE}.distributed_testing_utils", **devices)
    common_tests = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    # It would import `transformers` from the folder beside it, as in the library's own repository.
    with patch("transformers.utils.direct_transformers_import", lambda path: transformers):
        config_tests = importlib.import_module(f"{PACKAGE}.test_configuration_common")
    training_tests = importlib.import_module(f"{PACKAGE}.test_training_mixin")
    fsdp_checks = importlib.import_module(f"{PACKAGE}.test_fsdp_mixin")
    return common_tests.ModelTesterMixin, config_tests.ConfigTester, training_tests.TrainingTesterMixin, fsdp_checks


_ModelTesterMixin, ConfigTester, TrainingTesterMixin, fsdp_checks = _load()


ROPE_SCALING = tuple(f"test_model_rope_scaling_from_config_{kind}" for kind in ("0_linear", "1_dynamic", "2_yarn"))


def skipping(reason: str, *names: str) -> type:
    """A first base of tests that leaves some of them out."""
    return type("Skipping", (), {name: unittest.skip(reason)(lambda self: None) for name in names})


class ModelTesterMixin(_ModelTesterMixin):
    """transformers' own, but for two tests."""

    def test_bc_torch_dtype(self):
        """The old name of an argument, for two classes: the same function loads the others, and every parameter
        is printed 28 times.

        Its messages are made whether needed or not; here of the corners of each parameter, as of a large one.
        """
        self.all_model_classes = self.all_model_classes[:2]
        with printoptions(threshold=0, edgeitems=1):
            super().test_bc_torch_dtype()

    def test_bc_cache_name_forward(self):
        """Of transformers 5.24."""
        self.skipTest(
            "asks for a warning of the cache's old name, which here is as good: tests/models/test_cache_names.py"
        )


class CausalTester:
    """What the mixins ask of a decoder-only family: a tiny configuration and inputs that fit it.

    Args:
        parent: the test case.
        config_class: the family's configuration.
        config: keyword arguments of the tiny configuration.
    """

    batch_size = 3
    seq_length = 7
    is_training = True
    num_labels = 3
    num_choices = 2

    def __init__(self, parent, config_class, **config):
        self.parent = parent
        self.config_class = config_class
        self.config = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config}
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            setattr(self, name, self.config[name])
        self.num_attention_heads = self.config.get("num_attention_heads")

    def get_config(self):
        return self.config_class(**self.config)

    def prepare_config_and_inputs_for_common(self):
        input_ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        attention_mask = torch.ones_like(input_ids)
        attention_mask[0, :2] = 0  # one left-padded row
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}

    def prepare_config_and_inputs_for_model_class(self, model_class):
        return self.prepare_config_and_inputs_for_common()


class CausalFamilyTests(ModelTesterMixin, GenerationTesterMixin):
    """The tests every decoder-only family runs; a family sets `tester_config` and its classes."""

    config_class = None
    tester_config: dict = {}
    has_attentions = False
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = CausalTester(self, self.config_class, **self.tester_config)
        self.config_tester = ConfigTester(
            self,
            config_class=self.config_class,
            common_properties=["hidden_size", "num_hidden_layers"],
            hidden_size=self.tester_config["hidden_size"],
        )

    def test_config(self):
        self.config_tester.run_common_tests()


class OtherLayers:
    """The first base of tests of a family with other layers, which leave out what its first class shows for them too.

    What is left out reads names of classes and embeddings, and files; forward and backward passes, initial values,
    saving and loading of every parameter, and generation stay.
    """


for _name in (
    "test_base_model_prefix_loads_base_weights",
    "test_bc_torch_dtype",
    "test_can_load_ignoring_mismatched_shapes",
    "test_can_use_safetensors",
    "test_cannot_load_with_meta_device_context_manager",
    "test_config",
    "test_from_pretrained_no_checkpoint",
    "test_load_contiguous_weights",
    "test_load_save_without_tied_weights",
    "test_load_with_mismatched_shapes",
    "test_model_weights_reload_no_missing_tied_weights",
    "test_resize_embeddings_untied",
    "test_resize_tokens_embeddings",
    "test_torch_save_load",
):
    assert callable(getattr(CausalFamilyTests, _name)), _name
    setattr(OtherLayers, _name, None)
