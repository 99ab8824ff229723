"""Summarization: the recipe memorises what it sees, scores against the best reference, and refuses bad settings."""

import json

import finetune_summarization
import pytest
from _lib.documents import documents_of_files
from finetune_summarization import SummarizationArguments, lead, rouge, summarize
from transformers import AutoTokenizer, Seq2SeqTrainingArguments

from tests.recipes import small

TEXTS = {
    "The river rose all night. By noon it had covered the fields.": "A flood came.",
    "Prices fell for the third month. Traders blamed the weather.": "Weather made trade cheaper.",
    "A new bridge opens today. It joins both halves of the town.": "The town gets a bridge.",
    "The team lost again. Its coach resigned this morning.": "The coach left.",
}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_decoder_layers": 1}
TINY |= {"num_attention_heads": 2, "sliding_window": 5, "ssm_state_size": 8}
TINY |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


@pytest.fixture
def settings(tmp_path):
    rows = [{"document": text, "summary": short, "references": ["?", short]} for text, short in TEXTS.items()]
    files = [small.write_lines(tmp_path / "rows.jsonl", rows)]
    return {"train_files": files, "validation_files": files, "max_target_length": 24}


def test_memorises_what_it_is_shown(settings, tmp_path):
    arguments = SummarizationArguments(
        **settings,
        references_column="references",
        model_type="spade_seq2seq",
        config=TINY | {"embedding_dropout": 0.0, "max_target_positions": 24},
        tokenizer_vocab_size=300,
    )
    options = {"max_steps": 100, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    training = small.training(tmp_path / "run", Seq2SeqTrainingArguments, **options)
    results = summarize(arguments, training)
    assert results["validation"]["model"]["rougeL"] > 90 > results["validation"]["first_sentence"]["rougeL"]
    lines = (tmp_path / "run/predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["references"][1] for line in lines] == list(TEXTS.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer(text_target="word")["input_ids"][-1] == tokenizer.eos_token_id
    # the saved folder goes on where this run ended, with nothing else said
    again = SummarizationArguments(**settings, model_name_or_path=str(tmp_path / "run"), overwrite=True)
    training.max_steps, training.learning_rate = 1, 0.0
    assert summarize(again, training)["validation"]["model"]["rougeL"] > 90


def test_from_the_hub_as_from_files(settings, tmp_path, monkeypatch):
    asked = []

    def load(name, config, *, revision, split):
        asked.append((name, config, revision, split))
        return documents_of_files(settings["train_files"])

    monkeypatch.setattr(finetune_summarization, "load_dataset", load)
    named = {"dataset_name": "some/data", "dataset_config": "plain", "model_type": "spade_seq2seq"}
    arguments = SummarizationArguments(**named, test_split=None, max_train_rows=2, max_eval_rows=3)
    splits = finetune_summarization.load_splits(arguments)
    assert asked == [("some/data", "plain", None, "train"), ("some/data", "plain", None, "validation")]
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 2, "validation": 3}
    files = SummarizationArguments(**settings, model_type="spade_seq2seq")
    assert {name: len(rows) for name, rows in finetune_summarization.load_splits(files).items()} == {
        "train": 4,
        "validation": 4,
    }


def test_saves_before_it_generates(settings, tmp_path, monkeypatch):
    """What goes wrong in the evaluation does not cost the training."""

    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(finetune_summarization, "scored", fail)
    arguments = SummarizationArguments(**settings, model_type="spade_seq2seq", config=TINY, tokenizer_vocab_size=300)
    with pytest.raises(RuntimeError, match="out of memory"):
        summarize(arguments, small.training(tmp_path / "run", Seq2SeqTrainingArguments, max_steps=1))
    assert (tmp_path / "run/model.safetensors").is_file()


def test_the_best_of_several_references_counts():
    assert rouge(["a cat sat"], [["dogs run", "a cat sat"]]) == {"rouge1": 100.0, "rouge2": 100.0, "rougeL": 100.0}
    assert rouge(["a cat"], [["a dog"]])["rouge1"] == 50.0
    assert lead("One. Two! Three?", 2) == "One. Two!"


def test_bad_settings(settings):
    arguments = SummarizationArguments(**settings, model_type="spade_seq2seq", source_column="text")
    with pytest.raises(ValueError, match=r"columns \['text'\]"):
        summarize(arguments, Seq2SeqTrainingArguments("unused", report_to="none", use_cpu=True))
    few = SummarizationArguments(**settings, model_type="spade_seq2seq", config=TINY | {"max_target_positions": 20})
    with pytest.raises(ValueError, match="max_target_length=24 is above the model's max_target_positions=20"):
        summarize(few, Seq2SeqTrainingArguments("unused", report_to="none", use_cpu=True))
