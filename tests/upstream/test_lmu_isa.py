"""transformers' own tests on LMU-ISA, with a feed-forward layer and with global attention before the memory."""

import unittest

from hf_hybrid_ssm import LmuIsaConfig
from tests.tiny_models import classes_of
from tests.upstream.harness import ROPE_SCALING, CausalFamilyTests, OtherLayers, skipping

WithoutRotary = skipping("the memory knows the order of tokens; there is no rotary embedding to scale", *ROPE_SCALING)


class LmuIsaTest(WithoutRotary, CausalFamilyTests, unittest.TestCase):
    config_class = LmuIsaConfig
    all_model_classes = tuple(classes_of("lmu-isa").values())
    tester_config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "lmu_order": 8,
        "lmu_reduced_order": 2,
        "lmu_theta": 10.0,
        "post_intermediate_size": 40,
    }


class LmuIsaGlobalTest(OtherLayers, LmuIsaTest):
    all_model_classes = LmuIsaTest.all_model_classes[:2]  # a head reads the last hidden states whatever computed them
    tester_config = LmuIsaTest.tester_config | {"first_sublayer": "global_attention", "num_attention_heads": 4}
