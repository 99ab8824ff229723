"""Generation checks for every class that can generate, in the place of the mixin the distribution lacks.

What each mode must produce is derived from plain greedy decoding without a cache wherever that is possible. Padding,
prefill in chunks, static and copied caches, drafts and embeddings are in tests/invariants, tests/programs and
tests/models, for every variant.
"""

import copy

import torch
from transformers import GenerationConfig, TextStreamer, set_seed

NEW_TOKENS = 8


class GenerationTesterMixin:
    """Mixed into a test case that has `model_tester` and `all_model_classes`."""

    max_new_tokens = NEW_TOKENS

    def _generators(self):
        for model_class in self.all_generative_model_classes:
            set_seed(0)
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class(copy.deepcopy(config)).eval()
            model.generation_config = GenerationConfig(
                pad_token_id=config.pad_token_id,
                decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
            )
            yield model, {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}

    def test_greedy_with_cache_equals_without(self):
        for model, inputs in self._generators():
            expected = model.generate(**inputs, do_sample=False, use_cache=False)
            output = model.generate(**inputs, do_sample=False, use_cache=True)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_greedy_dict_outputs(self):
        for model, inputs in self._generators():
            output = model.generate(
                **inputs,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                output_hidden_states=True,
            )
            assert len(output.scores) == len(output.logits) == NEW_TOKENS
            assert all(torch.isfinite(logits).all() for logits in output.logits)
            assert output.past_key_values is not None

    def test_sampling_is_reproducible(self):
        for model, inputs in self._generators():
            texts = []
            for _ in range(2):
                set_seed(3)
                texts.append(model.generate(**inputs, do_sample=True, top_k=20, top_p=0.9, temperature=0.7))
            torch.testing.assert_close(texts[0], texts[1], rtol=0, atol=0)

    def test_sampling_returns_several_sequences(self):
        for model, inputs in self._generators():
            rows = inputs["input_ids"].shape[0]
            assert model.generate(**inputs, do_sample=True, num_return_sequences=2).shape[0] == 2 * rows

    def test_beam_search_with_cache_equals_without(self):
        for model, inputs in self._generators():
            options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
            expected = model.generate(**inputs, **options, use_cache=False)
            torch.testing.assert_close(model.generate(**inputs, **options, use_cache=True), expected, rtol=0, atol=0)

    def test_beam_sampling(self):
        for model, inputs in self._generators():
            output = model.generate(**inputs, num_beams=2, do_sample=True)
            assert output.shape[0] == inputs["input_ids"].shape[0]

    def test_each_row_generates_as_if_alone(self):
        for model, inputs in self._generators():
            batch = model.generate(**inputs, do_sample=False)
            for row in range(batch.shape[0]):
                real = inputs["attention_mask"][row].bool()
                alone = model.generate(input_ids=inputs["input_ids"][row : row + 1, real], do_sample=False)
                torch.testing.assert_close(batch[row, -NEW_TOKENS:], alone[0, -NEW_TOKENS:], rtol=0, atol=0)

    def test_continues_from_returned_cache(self):
        for model, inputs in self._generators():
            if model.config.is_encoder_decoder:
                continue
            whole = model.generate(**inputs, do_sample=False)
            model.generation_config.max_new_tokens = model.generation_config.min_new_tokens = NEW_TOKENS // 2
            first = model.generate(**inputs, do_sample=False, return_dict_in_generate=True)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS // 2), value=1)
            second = model.generate(
                first.sequences, attention_mask=mask, past_key_values=first.past_key_values, do_sample=False
            )
            torch.testing.assert_close(second, whole, rtol=0, atol=0)

    def test_stopping_and_streaming(self):
        class Collector(TextStreamer):
            def __init__(self):
                self.tokens = []

            def put(self, value):
                self.tokens += value.flatten().tolist()

            def end(self):
                self.tokens.append("end")

        for model, inputs in self._generators():
            ids = inputs["input_ids"][1:2]
            expected = model.generate(ids, do_sample=False)[0].tolist()
            collector = Collector()
            model.generate(ids, do_sample=False, streamer=collector)
            assert collector.tokens == [*expected, "end"]
            eos = expected[-NEW_TOKENS + 3]
            model.generation_config.min_new_tokens = None
            stopped = model.generate(ids, do_sample=False, eos_token_id=eos)[0].tolist()
            assert stopped == expected[: len(stopped)]
            assert stopped[-1] == eos
            assert len(stopped) <= len(expected) - NEW_TOKENS + 4
