"""Families of transformers itself under the same harness, to compare with.

python -m tests.reporting upstream tests/upstream/peers.py
"""

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
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)

from tests.upstream.generation_checks import GenerationTesterMixin
from tests.upstream.harness import CausalFamilyTests, ConfigTester, ModelTesterMixin
from tests.upstream.test_spade import Seq2SeqTester

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


class T5Peer(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (T5Model, T5ForConditionalGeneration)
    all_generative_model_classes = (T5ForConditionalGeneration,)
    is_encoder_decoder = True
    has_attentions = True
    test_resize_embeddings = True

    def setUp(self):
        sizes = {"d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        names = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "decoder_start_token_id": 0}
        self.model_tester = Seq2SeqTester(self, T5Config, **sizes, **names)
        self.model_tester.encoder_seq_length = self.model_tester.seq_length
        self.model_tester.decoder_seq_length = self.model_tester.seq_length
        self.config_tester = ConfigTester(self, config_class=T5Config, d_model=32)

    def test_config(self):
        self.config_tester.run_common_tests()
