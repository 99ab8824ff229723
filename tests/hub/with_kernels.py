"""What somebody does with exported folders who has transformers, torch and a folder of kernels, and not this package.

    python with_kernels.py OUTPUT FOLDER [FOLDER ...]

The folder of kernels is on the path; with KERNELS_FOLDER set, the `kernels` library loads it. Writes logits, gradients
and which kernels ran to OUTPUT.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # whatever is installed: importing it fails here
    sys.modules["hf_hybrid_ssm"] = None  # type: ignore[assignment]

import torch
from transformers import AutoModelForCausalLM


def main(output: Path, folders: list[str]) -> None:
    if folder := os.environ.get("KERNELS_FOLDER"):
        from kernels import get_local_kernel

        get_local_kernel(Path(folder))
    found = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        ids = torch.arange(3, 27).view(2, 12)
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        dispatch = sys.modules[f"{type(model).__module__.rpartition('.')[0]}.dispatch"]
        selected = {
            name: op.select("cpu", torch.float32).__name__ for name, op in dispatch.REGISTRY.items() if op.kernels
        }
        found[Path(folder).name] = {"logits": result.logits.detach(), "gradients": gradients, "selected": selected}
    torch.save(found, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
