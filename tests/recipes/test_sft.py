"""Supervised fine-tuning: formats, the chat template, and packed rows with the loss and the weights of padded ones."""

import io
import json

import pytest
import torch
from _lib.documents import train_tokenizer
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("trl")
pytest.importorskip("peft")

from sft import (
    PLAIN,
    SftArguments,
    SFTConfig,
    finetune,
    question_of,
    rows_of,
    set_chat_template,
    trainer_of,
)

from hf_hybrid_ssm.cli import main
from tests.cli.test_next_commands import words_after_next
from tests.recipes import small

TALKS = [
    [("user", f"How much is {a} and {b}?"), ("assistant", f"It is {a + b}, of course." + " Truly so." * (a % 4))]
    for a in range(6)
    for b in range(4)
]
VARIANTS = {
    "longhorn": {},
    "bst": {"num_attention_heads": 2, "head_dim": 8, "sliding_window": 8, "intermediate_size": 32},
    "spade": {"num_attention_heads": 2, "sliding_window": 8, "intermediate_size": 32},
    "lmu_isa": {"lmu_order": 10, "lmu_theta": 20.0, "num_attention_heads": 2, "post_intermediate_size": 32},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for talk in TALKS for _, text in talk] + ["User: Assistant: System:"], 320)


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    """A small model of a family with its tokenizer."""

    def make(family="longhorn"):
        torch.manual_seed(0)
        ids = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2}
        config = AutoConfig.for_model(family, **sizes, **ids, **VARIANTS[family])
        for name in config.to_dict():
            if name.endswith("dropout"):
                setattr(config, name, 0.0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return make


@pytest.fixture
def files(tmp_path):
    talks = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    for name, rows in (("train", talks[4:]), ("validation", talks[:4])):
        small.write_lines(tmp_path / f"{name}.jsonl", rows)
    return {"train_files": [str(tmp_path / "train.jsonl")], "validation_files": [str(tmp_path / "validation.jsonl")]}


def settings(folder, **options):
    fixed = {"learning_rate": 1e-2, "bf16": False, "logging_steps": 1, "max_length": 2048}
    return small.training(folder, SFTConfig, **fixed | options)


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("only_answers", [False, True])
def test_packed_and_padded_rows_have_the_same_loss_and_gradients(family, only_answers, checkpoint, files, tmp_path):
    arguments = SftArguments(checkpoint(family), **files)
    rows = rows_of(arguments.train_files, 12)
    found = {}
    for packing in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        set_chat_template(tokenizer)
        options = {"packing": packing, "per_device_train_batch_size": 1 if packing else 12, "max_steps": 1}
        options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        training = settings(tmp_path / "run", assistant_only_loss=only_answers, **options)
        trainer = trainer_of(arguments, training, rows, None, tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))
        assert batch["input_ids"].shape[0] == (1 if packing else 12)
        trainer.train()
        found[packing] = trainer.state.log_history[0]["loss"], trainer.model.state_dict()
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    for name, value in found[False][1].items():  # one step away, by the gradient itself
        torch.testing.assert_close(found[True][1][name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_trains_and_answers(lora_rank, checkpoint, files, tmp_path, monkeypatch, capsys):
    from peft import PeftModel

    base = checkpoint()
    arguments = SftArguments(base, **files, lora_rank=lora_rank, new_tokens=8)
    run = settings(tmp_path / "run", packing=True, num_train_epochs=12, per_device_train_batch_size=1, max_length=512)
    figures = finetune(arguments, run)
    losses = [loss for loss in figures.values() if isinstance(loss, float)]
    assert figures["steps"] > 0 and all(torch.tensor(losses).isfinite())
    lines = (tmp_path / "run/answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 4 and answers[0]["question"] == "User: How much is 0 and 0?\nAssistant:"
    assert json.loads((tmp_path / "run/results.json").read_text()) == figures
    folder = tmp_path / "run" / ("merged" if lora_rank else "")
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert AutoTokenizer.from_pretrained(folder).chat_template == PLAIN
    if lora_rank:
        assert figures["trained_parameters"] < 0.5 * whole.num_parameters()
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run").eval()
        ids = torch.arange(3, 23).view(2, 10)
        torch.testing.assert_close(whole(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    words = words_after_next(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO("How much is 1 and 1?\n"))
    assert words == ["chat", str(folder)] and main([*words, "--json", "--max-new-tokens", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] > 0


@pytest.mark.parametrize("first, second", [(2, 0), (0, 2)])
def test_of_an_overwritten_run_nothing_is_left(first, second, checkpoint, files, tmp_path):
    """transformers would put the adapters of one on top of the weights of the other."""
    base, folder = checkpoint(), tmp_path / "run"
    for rank in (first, second):
        finetune(SftArguments(base, **files, lora_rank=rank, answers=0, overwrite=True), settings(folder, max_steps=1))
    assert (
        (folder / "adapter_config.json").is_file() == (folder / "merged/model.safetensors").is_file() == (second > 0)
    )
    assert (folder / "model.safetensors").is_file() == (second == 0)


def test_the_plain_template(tokenizer):
    set_chat_template(tokenizer)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert asked == "System: Be brief.\nUser: Hi\nAssistant:"
    talk.append({"role": "assistant", "content": "Hello."})
    answered = tokenizer.apply_chat_template([*talk, talk[1]], tokenize=False)
    assert answered == f"{asked} Hello.{tokenizer.eos_token}\nUser: Hi\n"
    masked = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    trained = [token for token, one in zip(masked["input_ids"], masked["assistant_masks"], strict=True) if one]
    assert tokenizer.decode(trained) == f" Hello.{tokenizer.eos_token}"
    for other in (
        {"content": None},
        {"content": [{"type": "text", "text": "Hi"}]},
        {"content": "", "tool_calls": [1]},
    ):
        with pytest.raises(TemplateError, match="content must be text, without tool_calls"):
            tokenizer.apply_chat_template([{"role": "assistant", **other}], tokenize=False)


def test_a_template_of_ones_own(tokenizer, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    set_chat_template(tokenizer, str(tmp_path / "mine.jinja"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
    tokenizer.chat_template = None


def test_formats_of_rows(tmp_path, tokenizer):
    def rows(**row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        return rows_of([str(tmp_path / "rows.jsonl")])

    row = rows(prompt="2 + 2 =", completion=" 4", note="x")[0]
    assert row == {"completion": " 4", "prompt": "2 + 2 ="} and question_of(row, tokenizer) == "2 + 2 ="
    assert question_of(rows(text="one two three four five six seven eight nine")[0], tokenizer).endswith("eight")
    with pytest.raises(ValueError, match="messages; completion and prompt; text"):
        rows(question="?")
    with pytest.raises(ValueError, match="have the column 'tools', which is not read"):
        rows(messages=[{"role": "user", "content": "Hi"}], tools=[{"name": "search"}])
    with pytest.raises(ValueError, match="lora_rank=-1"):
        SftArguments("x", ["y"], lora_rank=-1)
