"""Score a model on a task of your own in lm-eval, through its chat template.

The task is a JSONL file whose lines have `question`, `choices` and `answer` (the number of the right choice).

python examples/own_lm_eval_task.py TASK.jsonl checkpoints/longhorn-books
"""

import argparse

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task")
parser.add_argument("model")
args = parser.parse_args()

task = {
    "task": "own",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": args.task}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
device = "cuda" if torch.cuda.is_available() else "cpu"
model = HFLM(pretrained=args.model, dtype="float32", batch_size=8, device=device)
results = lm_eval.simple_evaluate(model=model, tasks=[task], apply_chat_template=True, bootstrap_iters=1000)
print(make_table(results))
