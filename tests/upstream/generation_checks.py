"""Generation checks for every class that can generate, in the place of the mixin the distribution lacks.

What each mode must produce is derived from plain greedy decoding without a cache wherever that is possible.
"""

import copy

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    TextStreamer,
    set_seed,
)

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

    def _decoders(self):
        """Without encoder-decoders."""
        return ((model, inputs) for model, inputs in self._generators() if not model.config.is_encoder_decoder)

    def _greedy_without_cache(self, model, inputs):
        return model.generate(**inputs, do_sample=False, use_cache=False)

    def test_greedy_with_cache_equals_without(self):
        for model, inputs in self._generators():
            expected = self._greedy_without_cache(model, inputs)
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

    def test_left_padding_changes_nothing(self):
        for model, inputs in self._decoders():
            ids = inputs["input_ids"]
            pads = torch.full((ids.shape[0], 5), model.config.pad_token_id)
            mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
            alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False)
            padded = model.generate(input_ids=torch.cat([pads, ids], 1), attention_mask=mask, do_sample=False)
            torch.testing.assert_close(padded[:, pads.shape[1] :], alone, rtol=0, atol=0)

    def test_each_row_generates_as_if_alone(self):
        for model, inputs in self._generators():
            batch = model.generate(**inputs, do_sample=False)
            for row in range(batch.shape[0]):
                real = inputs["attention_mask"][row].bool()
                alone = model.generate(input_ids=inputs["input_ids"][row : row + 1, real], do_sample=False)
                torch.testing.assert_close(batch[row, -NEW_TOKENS:], alone[0, -NEW_TOKENS:], rtol=0, atol=0)

    def test_continues_from_returned_cache(self):
        for model, inputs in self._decoders():
            whole = model.generate(**inputs, do_sample=False)
            model.generation_config.max_new_tokens = model.generation_config.min_new_tokens = NEW_TOKENS // 2
            first = model.generate(**inputs, do_sample=False, return_dict_in_generate=True)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS // 2), value=1)
            second = model.generate(
                first.sequences, attention_mask=mask, past_key_values=first.past_key_values, do_sample=False
            )
            torch.testing.assert_close(second, whole, rtol=0, atol=0)

    def test_prompt_cache_can_be_reused(self):
        for model, inputs in self._decoders():
            ids = inputs["input_ids"][:1].repeat(1, 2)
            expected = model.generate(ids, do_sample=False)
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids[:, :4], past_key_values=cache, use_cache=True)
            for _ in range(2):  # the copy must be independent of the original
                output = model.generate(ids, past_key_values=copy.deepcopy(cache), do_sample=False)
                torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_chunked_prefill(self):
        for model, inputs in self._decoders():
            expected = model.generate(**inputs, do_sample=False)
            for chunk in (1, 3):
                output = model.generate(**inputs, do_sample=False, prefill_chunk_size=chunk)
                torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_inputs_embeds(self):
        for model, inputs in self._decoders():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            expected = model.generate(**inputs, do_sample=False)[:, -NEW_TOKENS:]
            output = model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], do_sample=False)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_static_cache(self):
        for model, inputs in self._decoders():
            expected = model.generate(**inputs, do_sample=False)
            output = model.generate(**inputs, do_sample=False, cache_implementation="static")
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
            cache = StaticCache(config=model.config, max_cache_len=inputs["input_ids"].shape[1] + NEW_TOKENS)
            for _ in range(2):
                cache.reset()
                output = model.generate(**inputs, do_sample=False, past_key_values=cache)
                torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_compiled_decoding(self):
        """The step traces into one graph (`fullgraph`) and writes the same text."""
        for model, inputs in self._generators():
            if model.config.is_encoder_decoder or not model._can_compile_fullgraph:
                continue
            expected = model.generate(**inputs, do_sample=False)
            compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
            compile_config._compile_all_devices = True
            torch._dynamo.reset()
            output = model.generate(
                **inputs, do_sample=False, cache_implementation="static", compile_config=compile_config
            )
            assert hasattr(model, "_compiled_call")
            torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_logits_to_keep(self):
        for model, inputs in self._decoders():
            with torch.no_grad():
                everything = model(**inputs).logits
                torch.testing.assert_close(model(**inputs, logits_to_keep=2).logits, everything[:, -2:])
                keep = torch.tensor([0, 3])
                torch.testing.assert_close(model(**inputs, logits_to_keep=keep).logits, everything[:, keep])

    def test_prompt_lookup_equals_greedy(self):
        for model, inputs in self._decoders():
            ids = inputs["input_ids"][1:2].repeat(1, 3)
            expected = model.generate(ids, do_sample=False)
            output = model.generate(ids, do_sample=False, prompt_lookup_num_tokens=3)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)

    def test_assisted_equals_greedy(self):
        for model, inputs in self._decoders():
            ids = inputs["input_ids"][1:2]
            expected = model.generate(ids, do_sample=False)
            assistant = copy.deepcopy(model)
            for parameter in assistant.parameters():  # a draft that is often, not always, right
                parameter.data.add_(0.01 * torch.randn_like(parameter))
            for draft in (assistant, copy.deepcopy(model)):
                output = model.generate(ids, do_sample=False, assistant_model=draft)
                torch.testing.assert_close(output, expected, rtol=0, atol=0)

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

    def test_cache_of_another_batch_is_refused(self):
        for model, inputs in self._decoders():
            with torch.no_grad():
                cache = model(inputs["input_ids"], use_cache=True).past_key_values
                with pytest.raises((ValueError, RuntimeError)):
                    model(inputs["input_ids"][:1], past_key_values=cache)
