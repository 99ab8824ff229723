"""Segments of long documents in lanes: nothing is lost or reordered, states are handed on, bad settings refused."""

import pytest
import torch
from _lib.documents import DataArguments
from _lib.rows import pack
from _lib.segments import collate, in_lanes
from datasets import Dataset
from pretrain_clm import ModelArguments, pretrain
from transformers import DynamicCache

from hf_hybrid_ssm import BstConfig, BstForCausalLM
from hf_hybrid_ssm.training.segments import carry_segment
from tests.recipes.small import training as small_training
from tests.recipes.small import write_lines

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 16,
    "sliding_window": 4, "ssm_layers": [1], "ssm_state_size": 4, "dropout": 0.0, "attention_dropout": 0.0,
    "final_dropout": 0.0, "logit_scale": 1.0,
    "relative_attention_num_buckets": 4, "relative_attention_max_distance": 4,
}  # fmt: skip


def test_lanes_hold_consecutive_rows():
    documents = [[1] * 6, [2] * 8, [3] * 7]
    rows = in_lanes(Dataset.from_list(list(pack(documents, 4, 0, 9))), lanes=2)
    assert [row["input_ids"][1] for row in rows] == [1, 2, 1, 3, 2, 3]  # lane 0: rows 0 1 2; lane 1: rows 3 4 5
    assert rows["begins"] == [1, 1, 0, 1, 0, 0]  # row 4 is where document 3 begins
    batch = collate([rows[2], rows[3]])
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]] and "position_ids" not in batch
    with pytest.raises(ValueError, match="6 rows cannot fill a batch of 7"):
        in_lanes(Dataset.from_list(list(pack(documents, 4, 0, 9))), lanes=7)


def test_segments_in_lanes_equal_whole_documents():
    """The losses of batch after batch are those of one forward over each document."""
    torch.manual_seed(0)
    model = BstForCausalLM(BstConfig(vocab_size=20, eos_token_id=None, **TINY)).double().eval()
    documents = [torch.randint(0, 20, (size,)).tolist() for size in (19, 11, 30, 20)]
    texts = [document[1:] for document in documents]
    for document in documents:
        document[0] = 7  # the beginning
    rows, cache, found = in_lanes(Dataset.from_list(list(pack(texts, 8, 7, 0))), lanes=2), None, [[], []]
    for step in range(len(rows) // 2):
        batch = collate([rows[2 * step], rows[2 * step + 1]])
        if cache is not None:
            carry_segment(cache, batch["begins"].bool())
        inputs = {"seq_idx": batch["seq_idx"], "continues_documents": batch["continues_documents"]}
        output = model(batch["input_ids"], past_key_values=cache, use_cache=True, **inputs)
        cache = output.past_key_values
        for lane in range(2):
            found[lane].append(output.logits[lane])
    found = torch.cat([torch.cat(lane) for lane in found])
    half = len(found) // 2  # where the second lane begins, which knows nothing of the tokens before
    whole = [model(torch.tensor([document])).logits[0] for document in documents[:2]]
    cut = half - 30
    whole += [model(torch.tensor([documents[2][part]])).logits[0] for part in (slice(0, cut), slice(cut, None))]
    whole += [model(torch.tensor([documents[3]])).logits[0]]
    torch.testing.assert_close(found, torch.cat(whole), rtol=1e-9, atol=1e-9)


def test_no_gradient_goes_back():
    torch.manual_seed(0)
    model = BstForCausalLM(BstConfig(vocab_size=20, eos_token_id=None, **TINY)).train()
    embeddings, cache = torch.randn(1, 6, 16, requires_grad=True), DynamicCache(config=model.config)
    model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True)
    carry_segment(cache, torch.tensor([False]))
    model(torch.tensor([[3, 4]]), past_key_values=cache, use_cache=True).logits.sum().backward()
    assert embeddings.grad is None
    with pytest.raises(ValueError, match=r"begins must be bool of shape \(batch,\) = \(1,\)"):
        carry_segment(cache, torch.tensor([True, False]))


def settings(tmp_path, name, carry, **training):
    rows = [{"text": f"{word} and " * 200} for word in ("one", "two", "three", "four")]
    files = [write_lines(tmp_path / "texts.jsonl", rows)]
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 1}
    options |= {"learning_rate": 3e-3, "train_sampling_strategy": "sequential"} | training
    data = DataArguments(files, files, sequence_length=16)
    data.tokenizer_vocab_size = 300
    model = ModelArguments(model_type="bst", config=TINY, carry_segments=carry)
    return model, data, small_training(tmp_path / name, **options)


def test_recipe_carries(tmp_path):
    with_state = pretrain(*settings(tmp_path, "with", True))
    without = pretrain(*settings(tmp_path, "without", False))
    assert with_state["steps"] == 6 and with_state["train_loss"] != without["train_loss"]
    assert with_state["validation_loss"] != without["validation_loss"]


def test_shuffled_batches_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train_sampling_strategy='random' would shuffle"):
        pretrain(*settings(tmp_path, "shuffled", True, train_sampling_strategy="random"))


def test_gradient_checkpointing_is_refused(tmp_path):
    """It takes no cache: each segment would begin without a state."""
    with pytest.raises(ValueError, match="carry_segments=True carries a cache, which activation_checkpointing=true"):
        pretrain(*settings(tmp_path, "again", True, gradient_checkpointing=True))
