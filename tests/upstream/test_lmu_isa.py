"""transformers' own tests on LMU-ISA, with a feed-forward layer and with global attention before the memory."""

import unittest

from hf_hybrid_ssm import (
    LmuIsaConfig,
    LmuIsaForCausalLM,
    LmuIsaForMultipleChoice,
    LmuIsaForQuestionAnswering,
    LmuIsaForSequenceClassification,
    LmuIsaForTokenClassification,
    LmuIsaModel,
)
from tests.upstream.harness import CausalFamilyTests, OtherLayers


class LmuIsaTest(CausalFamilyTests, unittest.TestCase):
    config_class = LmuIsaConfig
    all_model_classes = (
        LmuIsaModel,
        LmuIsaForCausalLM,
        LmuIsaForSequenceClassification,
        LmuIsaForTokenClassification,
        LmuIsaForMultipleChoice,
        LmuIsaForQuestionAnswering,
    )
    tester_config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "lmu_order": 8,
        "lmu_reduced_order": 2,
        "lmu_theta": 10.0,
        "post_intermediate_size": 40,
    }

    @unittest.skip("the memory knows the order of tokens; there is no rotary embedding to scale")
    def test_model_rope_scaling_from_config_0_linear(self): ...

    @unittest.skip("the memory knows the order of tokens; there is no rotary embedding to scale")
    def test_model_rope_scaling_from_config_1_dynamic(self): ...

    @unittest.skip("the memory knows the order of tokens; there is no rotary embedding to scale")
    def test_model_rope_scaling_from_config_2_yarn(self): ...


class LmuIsaGlobalTest(OtherLayers, LmuIsaTest):
    all_model_classes = LmuIsaTest.all_model_classes[:2]  # a head reads the last hidden states whatever computed them
    tester_config = LmuIsaTest.tester_config | {"first_sublayer": "global_attention", "num_attention_heads": 4}
