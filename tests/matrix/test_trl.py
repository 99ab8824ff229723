"""TRL

Twelve steps of `SFTTrainer` on rows of two lengths lower the loss by a fifth.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.matrix.checks import rows
from tests.tiny_models import TOKENS, batch_of, own_language_model


@pytest.mark.limit(
    "trl",
    "exactly one of decoder_input_ids or decoder_inputs_embeds",
    "SFTTrainer is for decoder-only models: it takes the labels away, which an encoder-decoder makes its inputs from. "
    "transformers' Seq2SeqTrainer trains it (`recipes/finetune_summarization.py`).",
)
@rows("longhorn")
def test_sft_trainer(row, tmp_path):
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
