"""Heads and TRL

The Auto class starts from the language model's checkpoint (of SPADE, whose heads are bidirectional, from its
embeddings), ten steps lower the loss by a fifth, and the saved model has the same loss when loaded. TRL: twelve steps
of `SFTTrainer` on rows of two lengths lower the loss by a fifth.
"""

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests.matrix.checks import loss_before_and_after, rows, saved
from tests.memory import in_own_memory
from tests.tiny_models import TOKENS, batch_of, language_model, own_language_model


def _head(row, auto_class, targets):
    """The head takes a language model's checkpoint, learns, and comes back from disk."""
    with saved(language_model(row)) as folder:
        model = auto_class.from_pretrained(folder, num_labels=3)
    inputs = {"input_ids": batch_of(row)["input_ids"], **targets}
    before, after = loss_before_and_after(model, inputs, 10, 1e-2)
    assert after < 0.8 * before, f"the loss did not fall: {before:.3f} to {after:.3f}"
    with saved(model) as folder, torch.no_grad():
        loaded = in_own_memory(auto_class.from_pretrained(folder).eval())
        assert torch.equal(loaded(**inputs).loss, after), "the loaded model has another loss"


@rows("encoder-decoder")
def test_sequence_classification(row):
    _head(row, AutoModelForSequenceClassification, {"labels": torch.tensor([0, 2])})


@rows("lmu-isa")
def test_token_classification(row):
    _head(row, AutoModelForTokenClassification, {"labels": batch_of(row)["input_ids"] % 3})


@rows("bst mh s4")
def test_question_answering(row):
    spans = {"start_positions": torch.tensor([1, 5]), "end_positions": torch.tensor([4, 9])}
    _head(row, AutoModelForQuestionAnswering, spans)


@pytest.mark.limit(
    "trl",
    "exactly one of decoder_input_ids or decoder_inputs_embeds",
    "SFTTrainer is for decoder-only models: it takes the labels away, which an encoder-decoder makes its inputs from. "
    "transformers' Seq2SeqTrainer trains it (`recipes/finetune_summarization.py`).",
)
@rows("longhorn")
def test_trl_sft_trainer(row, tmp_path):
    """Token ids of two lengths, padded by TRL's collator."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    ids = [ids[:length].tolist() for ids in batch_of(row)["input_ids"] for length in (9, 14)]
    settings = trl.SFTConfig(
        output_dir=tmp_path, max_steps=12, learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], bf16=False,
        per_device_train_batch_size=4, save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=own_language_model(row),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids}),
        processing_class=_tokenizer(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}"


def _tokenizer():
    """Words "0", "1", ...; TRL trains only with a tokenizer, though the rows are token ids already."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(word): word for word in range(TOKENS["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {name.removesuffix("_id"): str(TOKENS[name]) for name in TOKENS if name.endswith("_token_id")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
