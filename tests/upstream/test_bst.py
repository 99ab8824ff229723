"""transformers' own tests on the Block-State Transformer: one filter, a filter for each context state, Slide,
Block-Recurrent layers, Llama's layers, retrieval, and the bidirectional encoder."""

import unittest

from hf_hybrid_ssm import BstConfig, BstForCausalLM, BstModel
from tests.tiny_models import classes_of
from tests.upstream.harness import (
    ROPE_SCALING,
    CausalFamilyTests,
    CausalTester,
    ConfigTester,
    ModelTesterMixin,
    OtherLayers,
    skipping,
)

WithoutRotary = skipping(
    "positions are relative biases and blocks by default; there is no rotary embedding to scale or to cut",
    *ROPE_SCALING,
    "test_model_rope_with_partial_rotation",
)


class BstTest(WithoutRotary, CausalFamilyTests, unittest.TestCase):
    config_class = BstConfig
    all_model_classes = tuple(classes_of("bst sh s4d").values())
    tester_config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "intermediate_size": 40,
        "sliding_window": 5,
        "ssm_layers": [0],
        "num_context_states": 3,
        "ssm_state_size": 4,
        "filter_length": 16,
    }


# Other layers under the bare model and the language model. The other heads read the last hidden states whatever
# computed them: with other layers they are tested in tests/models and tests/reliability, by transformers' tests in
# BstTest, and in BstEncoderTest, where they pool in other ways.
WITHOUT_CLASSIFIERS = (BstModel, BstForCausalLM)


class BstMultiFilterTest(OtherLayers, BstTest):
    all_model_classes = WITHOUT_CLASSIFIERS
    tester_config = BstTest.tester_config | {"context_variant": "mf", "ssm_type": "unstructured"}


class BstSlideTest(OtherLayers, BstTest):
    all_model_classes = WITHOUT_CLASSIFIERS
    tester_config = BstTest.tester_config | {"ssm_layers": []}


class BlockRecurrentTest(OtherLayers, BstTest):
    all_model_classes = WITHOUT_CLASSIFIERS
    tester_config = BstTest.tester_config | {
        "ssm_layers": None,
        "layer_types": ["block_recurrent", "window_attention"],
        "recurrent_num_states": 3,
    }


class BstRetrievalTest(OtherLayers, BstTest):
    all_model_classes = WITHOUT_CLASSIFIERS
    tester_config = BstTest.tester_config | {"retrieval_k": 2, "retrieval_memory": 8}


class BstEncoderTest(WithoutRotary, ModelTesterMixin, unittest.TestCase):
    all_model_classes = tuple(classes_of("bst s5 bidirectional").values())
    has_attentions = False
    test_resize_embeddings = True

    def setUp(self):
        fields = BstTest.tester_config | {"bidirectional": True}
        self.model_tester = CausalTester(self, BstConfig, **fields)
        self.model_tester.is_training = False  # a bare encoder has no loss
        common = {"common_properties": ["hidden_size", "num_hidden_layers"], "hidden_size": 32}
        self.config_tester = ConfigTester(self, config_class=BstConfig, **common)

    def test_config(self):
        self.config_tester.run_common_tests()
