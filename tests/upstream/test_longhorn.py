"""transformers' own tests on Longhorn, as a pure recurrence and as a hybrid with window and full attention."""

import unittest

import torch

from hf_hybrid_ssm import LonghornConfig
from tests.tiny_models import classes_of
from tests.upstream.harness import ROPE_SCALING, CausalFamilyTests, OtherLayers, skipping

CLASSES = tuple(classes_of("longhorn").values())
WithoutRotary = skipping("a pure recurrence has no rotary embedding to scale", *ROPE_SCALING)
WithoutDynamicScaling = skipping("positions that follow from a text's length are refused", ROPE_SCALING[1])


class LonghornTest(WithoutRotary, CausalFamilyTests, unittest.TestCase):
    config_class = LonghornConfig
    all_model_classes = CLASSES
    tester_config = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


class LonghornHybridTest(WithoutDynamicScaling, CausalFamilyTests, unittest.TestCase):
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
        "layer_types": ["longhorn", "full_attention"],
        "sliding_window": 5,
    }

    def test_attention_outputs(self):
        """As upstream, but only full attention has a matrix of weights to return."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        for model_class in self.all_model_classes:
            model = model_class._from_config(config, attn_implementation="eager").eval()
            given = self._prepare_for_class(inputs, model_class)
            with torch.no_grad():
                attentions = model(**given, output_attentions=True).attentions
            batch, length = given["input_ids"].flatten(0, -2).shape
            assert [tuple(weights.shape) for weights in attentions] == [(batch, 4, length, length)]
            torch.testing.assert_close(attentions[0].sum(-1), torch.ones(batch, 4, length))


class LonghornWindowTest(OtherLayers, WithoutDynamicScaling, CausalFamilyTests, unittest.TestCase):
    config_class = LonghornConfig
    all_model_classes = CLASSES[:2]  # a head reads the last hidden states whatever computed them
    tester_config = LonghornHybridTest.tester_config | {
        "layer_types": ["longhorn", "window_attention"],
        "max_position_embeddings": 64,  # which tests of rotary scaling multiply; nothing limits this model
    }
