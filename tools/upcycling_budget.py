"""Memory of distilling and decoding upcycled models of two common sizes, for docs/upcycling.md.

python tools/upcycling_budget.py
"""

from transformers import LlamaConfig

from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.upcycle import student_config

TEACHERS = {
    "1B": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "7B": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    ),
}  # fmt: skip
TRAINING = Setup(length=4096, batch=1, gpus=8, sharding="fsdp2", mixed_precision=True, checkpointing=True)
DECODING = Setup(length=32768, batch=1, dtype="bfloat16")


def main() -> None:
    print("| teacher | layers with attention | parameters, 10⁹ | GiB a device | GFLOP a token | cache, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, teacher in TEACHERS.items():
        for keep in (1.0, 0.5, 0.25, 0.0):
            config = student_config(teacher, keep)
            step = plan(config, TRAINING)
            cells = [
                f"{keep:.0%}",
                f"{step.parameters / 1e9:.2f}",
                f"{step.total / 2**30:.1f}",
                f"{step.step_flops / (TRAINING.tokens * TRAINING.gpus) / 1e9:.0f}",
                f"{plan(config, DECODING).state / 2**20:,.0f}",
            ]
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
