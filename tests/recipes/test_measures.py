"""What a recipe reports is what it says: the measure, the run that it chooses, answers without a row's padding."""

import finetune_glue
import pytest
import torch
from _lib.documents import train_tokenizer
from _lib.training import say_figures
from finetune_glue import GlueArguments, glue
from finetune_summarization import rouge
from sft import answers_of
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments


def test_rouge_is_the_mean_of_precision_and_recall_that_is_called_f1():
    said, wanted = "a cat", "a cat sat on some mats"  # precision 2/2, recall 2/6
    found = rouge([said], [[wanted]])
    assert found["rouge1"] == pytest.approx(100 * 2 * (1.0 * 2 / 6) / (1.0 + 2 / 6))
    assert found == rouge([wanted], [[said]])  # F1 alone is symmetric


def test_figures_are_a_table(capsys):
    say_figures(
        {"steps": 1200, "loss": 2.34567, "test": {"rouge_1": 0.5}, "cut": False, "layers": [1, 2], "all": [0] * 9}
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[4:]]
    assert rows == [
        ["steps", "1,200"],
        ["loss", "2.346"],
        ["test rouge 1", "0.5"],
        ["cut", "False"],
        ["layers", "1, 2"],
    ]


def test_the_first_measure_chooses_the_run_of_the_grid(monkeypatch, tmp_path):
    """mrpc: F1 first, accuracy last; here they disagree."""
    of_rate = {0.1: {"f1": 90.0, "accuracy": 50.0}, 0.2: {"f1": 70.0, "accuracy": 80.0}}

    def finetune(name, arguments, options):
        measures = {"validation": of_rate[options.learning_rate]}
        return {"measures": measures, "majority": measures, "seconds": 0.0, "predictions": {"validation": [1]}}

    monkeypatch.setattr(finetune_glue, "finetune", finetune)
    monkeypatch.setattr(finetune_glue, "load_task", lambda name, folder: {})
    monkeypatch.setattr(finetune_glue, "check_task", lambda name, splits: None)
    grid = {"learning_rate": [0.2, 0.1]}
    arguments = GlueArguments(["mrpc"], model_type="longhorn", grid=grid)
    found = glue(arguments, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))["mrpc"]
    assert found["best"]["settings"] == {"learning_rate": 0.1}
    assert "| mrpc | f1 / accuracy | 90.0 / 50.0 |" in (tmp_path / "results.md").read_text()


def test_a_row_of_a_batch_is_answered_as_if_it_were_alone():
    """Also by a tokenizer that pads on the right, where an answer would begin after the padding."""
    questions = ["one two three four five six", "one"]
    tokenizer = train_tokenizer(questions, 270)
    ids = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **sizes, **ids))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    alone = []
    for question in questions:
        inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        output = model.eval().generate(**inputs, max_new_tokens=12, do_sample=False)
        alone.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    tokenizer.padding_side = "right"
    assert alone[0] != alone[1] and answers_of(model, tokenizer, questions, 12) == alone
