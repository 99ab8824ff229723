"""Export a classifier for deployment: a file that torch runs without transformers and this package.

MODEL is what examples/classify_csv.py has written. The graph reads texts of up to so many tokens, padded on the right.

python examples/deploy.py MODEL OUT.pt2 --length 128
"""

import argparse
import subprocess
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_hybrid_ssm  # noqa: F401  registers the families
from hf_hybrid_ssm.ops.core.dispatch import backend

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("out", help="ends in .pt2")
parser.add_argument("--length", type=int, default=128)
args = parser.parse_args()


class Logits(torch.nn.Module):
    """Token ids and their mask (1, L) → logits (1, labels)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


tokenizer = AutoTokenizer.from_pretrained(args.model)
options = {"padding": "max_length", "max_length": args.length, "truncation": True, "return_tensors": "pt"}
text = tokenizer("The rain had stopped before the coach came.", padding_side="right", **options)
inputs = (text["input_ids"], text["attention_mask"])
model = Logits(AutoModelForSequenceClassification.from_pretrained(args.model, dtype="float32")).eval()
with torch.no_grad(), backend("torch"):  # no kernel of this package in the graph
    wanted = model(*inputs)
    graph = torch.export.export(model, inputs)
torch._inductor.aoti_compile_and_package(graph, package_path=args.out)
torch.save((inputs, wanted), f"{args.out}.check")

elsewhere = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
inputs, wanted = torch.load(sys.argv[1] + ".check")
torch.testing.assert_close(run(*inputs), wanted, rtol=1e-3, atol=1e-3)
assert not {"transformers", "hf_hybrid_ssm"} & sys.modules.keys()
"""
subprocess.run([sys.executable, "-c", elsewhere, args.out], check=True)
print(f"{args.out} gives the logits of {args.model}")
