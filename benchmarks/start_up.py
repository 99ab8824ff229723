"""How long does `import hf_hybrid_ssm` take on top of torch and transformers, and how many megabytes?"""

import statistics
import subprocess
import sys

from timing import write_results

ROUNDS = 5
# what anybody who loads a model has imported anyway
BASE = "import torch; from transformers import AutoModelForCausalLM, PreTrainedModel"
PROBE = """
import resource, time
{base}
begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import hf_hybrid_ssm
{use}
print(time.perf_counter() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
USES = {
    "import": "",
    "import and build a config": "from transformers import AutoConfig; AutoConfig.for_model('longhorn')",
    "import and a first small model": (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('longhorn', vocab_size=50, hidden_size=16, num_hidden_layers=1, "
        "bos_token_id=0, eos_token_id=0, pad_token_id=0)\n"
        "import torch\nAutoModelForCausalLM.from_config(config)(torch.zeros(1, 4, dtype=torch.long))"
    ),
}


def probe(use: str) -> tuple[float, float]:
    code = PROBE.format(base=BASE, use=use)
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return float(found[-2]), float(found[-1])


def main() -> None:
    figures: dict[str, dict[str, float]] = {}
    for name, use in USES.items():
        runs = [probe(use) for _ in range(ROUNDS)]
        figures[name] = {
            "seconds": round(statistics.median(seconds for seconds, _ in runs), 3),
            "megabytes": round(statistics.median(megabytes for _, megabytes in runs), 1),
        }
    write_results("start_up", {"on top of torch and transformers": figures})


if __name__ == "__main__":
    main()
