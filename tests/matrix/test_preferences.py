"""trl's trainers on preferences and rewards: a batch of padded rows has the log-probabilities of each row alone, and a
step of every trainer changes the model."""

import math

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.tiny_models import HEADED, ROWS, config_of, language_model

trl = pytest.importorskip("trl")

DECODERS = [row for row in ROWS if row != "encoder-decoder"]  # what trl's trainers take
WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, 61))]
TALKS = [
    ("w3 w4 w5 w6 w7", " w8 w9", " w10"),
    ("w11", " w12 w13 w14 w15", " w16 w17"),
    ("w18 w19", " w20", " w21 w22"),
]
QUIET = {
    "output_dir": "out",
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
}
QUIET |= {"logging_steps": 1, "learning_rate": 0.1, "disable_tqdm": True, "gradient_checkpointing": False}
QUIET |= {"lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def tokenizer():
    model = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def preferences():
    return Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*TALKS)))))


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """From a folder, from which trl loads the reference."""
    monkeypatch.chdir(tmp_path)
    language_model(request.param).save_pretrained("saved")
    return AutoModelForCausalLM.from_pretrained("saved").eval()


def log_probability(model, tokenizer, prompt, answer):
    """Of the answer and its end, in a row of their own."""
    ids = tokenizer(prompt + answer + " </s>", return_tensors="pt")["input_ids"]
    of_each = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return of_each[len(prompt.split()) - 1 :].sum().item()


@pytest.mark.parametrize("model", DECODERS, indirect=True)
def test_preferences_are_scored_as_each_row_alone(model, tokenizer, preferences):
    with torch.no_grad():
        expected = [[log_probability(model, tokenizer, row[0], answer) for answer in row[1:]] for row in TALKS]
    settings = trl.DPOConfig(**QUIET, per_device_train_batch_size=3)
    trainer = trl.DPOTrainer(model, args=settings, train_dataset=preferences, processing_class=tokenizer)
    trainer.train()
    told = trainer.state.log_history[0]
    for name, scores in zip(("chosen", "rejected"), zip(*expected)):
        assert told[f"logps/{name}"] == pytest.approx(sum(scores) / 3, abs=1e-3)
    assert told["loss"] == pytest.approx(math.log(2), abs=1e-4)  # before the step it is its own reference
    with torch.no_grad():
        after = [log_probability(model.eval(), tokenizer, *TALKS[0][:2]), expected[0][0]]
    assert abs(after[0] - after[1]) > 1e-3


@pytest.mark.parametrize("model", DECODERS, indirect=True)
@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_a_step_on_rewards_of_generated_texts(model, method, tokenizer, preferences):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(place) for place in range(len(completions))]

    before = [parameter.detach().clone() for parameter in model.parameters()]
    kind, options = (getattr(trl, f"{method}{part}") for part in ("Trainer", "Config"))
    sizes = {"per_device_train_batch_size": 6, "num_generations": 2, "max_completion_length": 5}
    arguments = options(**QUIET, **sizes)
    prompts = preferences.remove_columns(["chosen", "rejected"])
    trainer = kind(model, reward_funcs=reward, args=arguments, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    assert len(seen) == 6 and math.isfinite(trainer.state.log_history[0]["loss"])
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters()))


@pytest.mark.parametrize("variant", HEADED)
def test_a_reward_model_learns_which_answer_is_preferred(variant, tokenizer, preferences, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(variant, num_labels=1))
    arguments = trl.RewardConfig(**QUIET | {"max_steps": 8, "learning_rate": 1e-2}, per_device_train_batch_size=3)
    trl.RewardTrainer(model, args=arguments, train_dataset=preferences, processing_class=tokenizer).train()
    with torch.no_grad():
        for row in TALKS:
            better, worse = (
                model.eval()(**tokenizer(row[0] + x + " </s>", return_tensors="pt")).logits for x in row[1:]
            )
            assert better > worse
