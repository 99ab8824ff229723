"""Families of transformers itself under the same harness, to compare with; `tests.upstream.report` runs them."""

import unittest

from transformers import (
    JambaConfig,
    JambaForCausalLM,
    JambaForSequenceClassification,
    JambaModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MambaModel,
)

from tests.upstream.harness import CausalFamilyTests

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


class MambaPeer(CausalFamilyTests, unittest.TestCase):
    config_class = MambaConfig
    all_model_classes = (MambaModel, MambaForCausalLM)
    tester_config = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


class JambaPeer(CausalFamilyTests, unittest.TestCase):
    config_class = JambaConfig
    all_model_classes = (JambaModel, JambaForCausalLM, JambaForSequenceClassification)
    has_attentions = True
    tester_config = {
        **ATTENTION,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    }


class LlamaPeer(CausalFamilyTests, unittest.TestCase):
    config_class = LlamaConfig
    all_model_classes = (LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification)
    has_attentions = True
    tester_config = {**ATTENTION, "hidden_size": 32, "num_hidden_layers": 2}
