"""transformers' own tests on Longhorn, as a pure recurrence and as a hybrid with window attention."""

import unittest

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM, LonghornForSequenceClassification, LonghornModel
from tests.upstream.harness import CausalFamilyTests

CLASSES = (LonghornModel, LonghornForCausalLM, LonghornForSequenceClassification)


class LonghornTest(CausalFamilyTests, unittest.TestCase):
    config_class = LonghornConfig
    all_model_classes = CLASSES
    tester_config = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_attention_heads": 4}


class LonghornHybridTest(CausalFamilyTests, unittest.TestCase):
    config_class = LonghornConfig
    all_model_classes = CLASSES
    has_attentions = True
    tester_config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mlp_intermediate_size": 48,
        "block_types": ["linear_attention", "sliding_attention"],
        "sliding_window": 5,
    }
