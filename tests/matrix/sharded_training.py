"""Two steps of a Trainer, alone or as one of several processes whose parameters DeepSpeed shards (ZeRO).

python sharded_training.py STAGE FOLDER OUT, with the environment of `torchrun`
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer, TrainingArguments

import hf_hybrid_ssm  # noqa: F401 - registers the families

ROWS = 4


def train(stage: int, folder: Path, out: Path) -> None:
    """The language model of `folder`, in float32 and without dropout; a log and the weights are written to `out`.

    The arguments come first, as in a script: with the third stage the model is then loaded in parts.
    """
    sharding = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero = {"zero_optimization": sharding | {"stage3_gather_16bit_weights_on_model_save": stage == 3}}
    zero |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero |= {"gradient_clipping": "auto", "zero_allow_untested_optimizer": True}
    rows = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        str(out), max_steps=2, per_device_train_batch_size=rows, logging_steps=1,
        learning_rate=0.01, lr_scheduler_type="constant", optim="sgd", save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
        deepspeed=zero if stage else None,
    )  # fmt: skip
    of_two_texts = AutoConfig.from_pretrained(folder).is_encoder_decoder
    model = (AutoModelForSeq2SeqLM if of_two_texts else AutoModelForCausalLM).from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    texts = torch.randint(3, 61, (2 * ROWS, 20), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        (out / "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
