"""Sweeps keep what they finished, and only for the same settings; training starts from float32 weights."""

import json
from functools import partial

import finetune_glue
import finetune_summarization
import pretrain_clm
import pretrain_seq2seq
import pytest
import torch
from _lib.documents import train_tokenizer
from _lib.sweeps import claim, once
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import hf_hybrid_ssm  # noqa: F401 - registers the families

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"sliding_window": 5}


def test_a_stopped_sweep_goes_on(tmp_path):
    made = []

    def run(number):
        made.append(number)
        return {"loss": number}

    def sweep(settings, overwrite=False, stop_after=3):
        claim(tmp_path, settings, overwrite, "*/run.json")
        for number in range(stop_after):
            once(tmp_path / str(number) / "run.json", partial(run, number))

    sweep({"rate": 1}, stop_after=1)
    sweep({"rate": 1})
    assert made == [0, 1, 2] and json.loads((tmp_path / "2/run.json").read_text()) == {"loss": 2}
    with pytest.raises(FileExistsError, match="overwrite"):
        sweep({"rate": 2})
    sweep({"rate": 2}, overwrite=True)
    assert made == [0, 1, 2, 0, 1, 2]
    sweep({"rate": 2}, overwrite=True, stop_after=1)
    assert not (tmp_path / "1/run.json").exists()


def built_from(folder, kind, tokenizer):
    """The model that a recipe trains, of a checkpoint in `folder`."""
    given = {"model_name_or_path": str(folder)}
    if kind == "classification":
        texts = {"sentence": ["a", "b"], "label": [0, 1]}
        return finetune_glue.build(finetune_glue.GlueArguments(**given), finetune_glue.TASKS["sst2"], texts)[0]
    if kind == "summarization":
        arguments = finetune_summarization.SummarizationArguments(train_files=["x"], **given)
        return finetune_summarization.build(arguments, {})[0]
    if kind == "spans":
        return pretrain_seq2seq.build_model(pretrain_seq2seq.SpanArguments(**given), tokenizer, 8)
    return pretrain_clm.build_model(pretrain_clm.ModelArguments(**given), tokenizer)


@pytest.mark.parametrize("kind", ["language", "classification", "summarization", "spans"])
def test_weights_stored_in_bfloat16_are_trained_in_float32(kind, tmp_path):
    is_decoder = kind in ("summarization", "spans")
    auto_class = {"language": AutoModelForCausalLM, "classification": AutoModelForSequenceClassification}.get(kind)
    tokenizer = train_tokenizer(["some text of words"], 300)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    family = "spade_seq2seq" if is_decoder else "spade"
    config = AutoConfig.for_model(family, **TINY, **ids, **({"num_decoder_layers": 1} if is_decoder else {}))
    torch.manual_seed(0)
    (auto_class or AutoModelForSeq2SeqLM).from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = built_from(tmp_path, kind, tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_from_scratch_takes_the_configuration_alone(tmp_path):
    tokenizer = train_tokenizer(["some text of words"], 300)
    config = AutoConfig.for_model("spade", **TINY, vocab_size=len(tokenizer), pad_token_id=0)
    stored = AutoModelForSequenceClassification.from_config(config)
    stored.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"model_name_or_path": str(tmp_path), "config": {"pooling": "mean"}}
    texts = {"sentence": ["a", "b"], "label": [0, 1]}
    weights = {}
    for from_scratch in (False, True):
        arguments = finetune_glue.GlueArguments(from_scratch=from_scratch, **options)
        model, _ = finetune_glue.build(arguments, finetune_glue.TASKS["sst2"], texts)
        assert model.config.pooling == "mean" and model.config.num_hidden_layers == 1
        weights[from_scratch] = model.state_dict()
    name = next(key for key in weights[True] if key.endswith("q_proj.weight"))
    assert torch.equal(weights[False][name], stored.state_dict()[name])
    assert weights[True][name].shape == weights[False][name].shape
    assert not torch.equal(weights[True][name], weights[False][name])
    for refused in (finetune_glue.GlueArguments, finetune_summarization.SummarizationArguments):
        with pytest.raises(ValueError, match=r"from_scratch.*model_name_or_path"):
            refused(model_type="spade", from_scratch=True)
