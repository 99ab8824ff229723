"""transformers' own tests on SPADE: language model, encoder with classifier, encoder-decoder."""

import unittest

import torch

from hf_hybrid_ssm import (
    SpadeConfig,
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForConditionalGeneration,
    SpadeForMaskedLM,
    SpadeForMultipleChoice,
    SpadeForQuestionAnswering,
    SpadeForSequenceClassification,
    SpadeForTokenClassification,
    SpadeModel,
    SpadeSeq2SeqConfig,
    SpadeSeq2SeqModel,
)
from tests.upstream.harness import (
    ROPE_SCALING,
    CausalFamilyTests,
    CausalTester,
    ConfigTester,
    GenerationTesterMixin,
    ModelTesterMixin,
    skipping,
)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 6,
    "ssm_state_size": 8,
}


WithoutRotary = skipping(
    "positions are relative biases and states, not rotary embeddings that could be scaled", *ROPE_SCALING
)


class SpadeTest(WithoutRotary, CausalFamilyTests, unittest.TestCase):
    config_class = SpadeConfig
    all_model_classes = (SpadeModel, SpadeForCausalLM)
    tester_config = TINY


class SpadeChunkTest(WithoutRotary, CausalFamilyTests, unittest.TestCase):
    config_class = SpadeConfig
    all_model_classes = (SpadeModel, SpadeForCausalLM)
    tester_config = TINY | {"attention_type": "chunk", "chunk_size": 4, "ssm_type": "s5"}


class EncoderTester(CausalTester):
    is_training = False  # a bare encoder has no loss; the classifier's is tested in tests/models


class SpadeEncoderTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (
        SpadeEncoderModel,
        SpadeForMaskedLM,
        SpadeForSequenceClassification,
        SpadeForTokenClassification,
        SpadeForMultipleChoice,
        SpadeForQuestionAnswering,
    )
    has_attentions = False
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = EncoderTester(self, SpadeConfig, **TINY)
        self.config_tester = ConfigTester(
            self, config_class=SpadeConfig, common_properties=["hidden_size", "num_hidden_layers"], hidden_size=32
        )

    def test_config(self):
        self.config_tester.run_common_tests()


class Seq2SeqTester(CausalTester):
    """Source and target of different lengths, one padded source row."""

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        inputs["decoder_input_ids"] = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return config, inputs


class SpadeSeq2SeqTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (SpadeSeq2SeqModel, SpadeForConditionalGeneration)
    all_generative_model_classes = (SpadeForConditionalGeneration,)
    is_encoder_decoder = True
    has_attentions = False
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = Seq2SeqTester(self, SpadeSeq2SeqConfig, **TINY, num_decoder_layers=2)
        self.model_tester.encoder_seq_length = self.model_tester.seq_length
        self.model_tester.decoder_seq_length = self.model_tester.seq_length
        self.config_tester = ConfigTester(
            self,
            config_class=SpadeSeq2SeqConfig,
            common_properties=["hidden_size", "num_hidden_layers"],
            hidden_size=32,
            num_attention_heads=4,
        )

    def test_config(self):
        self.config_tester.run_common_tests()
