"""What people do with a checkpoint, with whatever versions are installed: also in `python -m tools.versions smoke`."""

import json
from functools import cache

import pytest
import torch
from transformers import StaticCache, Trainer, TrainingArguments

from hf_hybrid_ssm.serving.context import load_context, save_context
from tests.checkpoints.golden import loaded
from tests.checkpoints.test_checkpoints import FOLDERS

OBJECTIVES = {
    folder: json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0].partition("For")[2]
    for folder in FOLDERS
}
WRITERS = [folder for folder, objective in OBJECTIVES.items() if objective in ("CausalLM", "ConditionalGeneration")]
LANGUAGE_MODELS = [folder for folder in WRITERS if OBJECTIVES[folder] == "CausalLM"]
OURS = [folder for folder in LANGUAGE_MODELS if folder.name != "llama-books"]
PROMPT = "The old man looked at"
GREEDY = {"max_new_tokens": 12, "do_sample": False}

writers = pytest.mark.parametrize("folder", WRITERS, ids=lambda folder: folder.name)
ours = pytest.mark.parametrize("folder", OURS, ids=lambda folder: folder.name)


@cache
def checkpoint(folder):
    model, tokenizer, _ = loaded(folder)
    return model, tokenizer


def greedy(folder, prompt=PROMPT, **options):
    model, tokenizer = checkpoint(folder)
    return model.generate(**tokenizer(prompt, return_tensors="pt"), **GREEDY | options)


@writers
def test_greedy_text_is_the_same_with_and_without_a_cache(folder):
    assert torch.equal(greedy(folder), greedy(folder, use_cache=False))


@pytest.mark.parametrize("folder", LANGUAGE_MODELS, ids=lambda folder: folder.name)
def test_rows_of_a_batch_write_what_each_writes_alone(folder):
    """The tokenizer pads on the left, where a language model goes on at the end."""
    model, tokenizer = checkpoint(folder)
    prompts = [PROMPT, "It was late, and nobody in the house had heard of him"]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    for row, prompt in zip(model.generate(**batch, **GREEDY), prompts):
        alone = greedy(folder, prompt)[0]
        new = alone[len(tokenizer(prompt)["input_ids"]) :]
        assert torch.equal(row[width : width + len(new)], new)


@ours
def test_static_cache_and_prompt_lookup_write_the_greedy_text(folder):
    model, tokenizer = checkpoint(folder)
    expected, ids = greedy(folder), tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for options in ({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(greedy(folder, **options), expected), options
    room = StaticCache(config=model.config, max_cache_len=ids.shape[1] + GREEDY["max_new_tokens"])
    assert torch.equal(greedy(folder, cache=room), expected)


@ours
def test_a_context_file_is_continued(folder, tmp_path):
    model, tokenizer = checkpoint(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        read = model(ids[:, :-1], use_cache=True).cache
    save_context(read, tmp_path / "read.safetensors", model)
    context = load_context(tmp_path / "read.safetensors", model)
    assert torch.equal(model.generate(ids, cache=context.cache, **GREEDY), greedy(folder))


@writers
def test_one_step_of_the_trainer(folder, tmp_path):
    model, _, _ = loaded(folder)
    examples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(5, 1000, (4, 24))]
    before = model.get_input_embeddings().weight.clone()
    settings = {"max_steps": 1, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), disable_tqdm=True, **settings), train_dataset=examples)
    loss = trainer.train().training_loss
    assert 0 < loss < 20 and not torch.equal(before, model.get_input_embeddings().weight)
