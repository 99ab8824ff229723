"""Writes reports/operation_counts.md: operations of one layer, decoding a token and in a training step.

    python -m tests.models.operation_counts

Counts are those of `tests/counting.py`: views and allocations are free, a kernel of this package counts once.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.counting import count_operations
from tests.reporting import made_by, table, write_page
from tests.tiny_models import STUDENTS, TOKENS, VARIANTS, WINDOW

LLAMA = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
# layer: the variant in tests/tiny_models.py, and what makes all of its layers this one
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "longhorn": ("longhorn", {}),
    "longhorn, sliding attention": (
        "longhorn + window and full attention",
        {"layer_types": ["window_attention"]},
    ),
    "bst, sliding attention": ("bst sh s4d", {"ssm_layers": None, "layer_types": ["window_attention"]}),
    "bst SH, S4D": ("bst sh s4d", {}),
    "bst SH, S5": ("bst sh s4d", {"ssm_type": "s5", "ssm_state_size": 8}),
    "bst MH, S4": ("bst mh s4", {}),
    "bst MF, S4D": ("bst mf unstructured", {"ssm_type": "s4d"}),
    "bst MF, unstructured": ("bst mf unstructured", {}),
    "block-recurrent": ("bst block-recurrent", {"layer_types": ["block_recurrent"]}),
    "spade, window": ("spade s4 window", {"ssm_layers": []}),
    "spade, chunk": ("spade s5 chunk post-norm", {"ssm_layers": []}),
    "spade, full": ("spade hyena full", {"ssm_layers": []}),
    "spade, S4 and window": ("spade s4 window", {"ssm_layers": [0]}),
    "spade, S5 and window": ("spade s4 window", {"ssm_layers": [0], "ssm_type": "s5"}),
    "spade, Hyena and window": ("spade s4 window", {"ssm_layers": [0], "ssm_type": "hyena", "filter_length": 64}),
    "spade, EMA and window": ("spade s4 window", {"ssm_layers": [0], "ssm_type": "ema", "ssm_state_size": 4}),
    "lmu-isa": ("lmu-isa", {}),
    "lmu-isa, window attention": ("lmu-isa + window attention", {}),
    "student, window with a constant sink": ("student: groups", {"student": WINDOW}),
    "student, mixed groups with a constant sink": ("student: groups", {"student": {**WINDOW, "groups": [1]}}),
    "llama": ("llama", {}),
}


def model_of(layer: str, depth: int) -> PreTrainedModel:
    """A language model of `depth` equal layers."""
    variant, fields = LAYERS[layer]
    model_type, own = VARIANTS.get(variant, (variant, LLAMA))
    fields = {**TOKENS, **own, **fields, "num_hidden_layers": depth}
    if fields.get("ssm_layers"):
        fields["ssm_layers"] = list(range(depth))
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"] * depth
    if model_type == STUDENTS:
        fields["student"] = {"layers": [fields["student"]] * depth}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))


def _of_a_layer(count: Any, layer: str) -> float:
    shallow, deep = (count(model_of(layer, depth)).total() for depth in (2, 4))
    return (deep - shallow) / 2


def decoding_count(layer: str, implementation: str | None = None) -> float:
    """Of a token after a prompt that is longer than the windows, in inference mode: the mean of two blocks of 6.

    `implementation` forces a backend, as `hf_hybrid_ssm.ops.core.dispatch.backend` does.
    """

    def count(model: PreTrainedModel) -> Any:
        model.eval()
        cache = DynamicCache(config=model.config)
        token = torch.ones(1, 1, dtype=torch.long)
        with torch.inference_mode(), backend(implementation):
            for ids in (token.expand(1, 20), token):
                model(ids, past_key_values=cache)
            return count_operations(lambda: [model(token, past_key_values=cache) for _ in range(12)])

    return _of_a_layer(count, layer) / 12


def training_count(layer: str) -> float:
    """Of the forward and backward of two rows of 64 tokens."""

    def count(model: PreTrainedModel) -> Any:
        ids = torch.ones(2, 64, dtype=torch.long)
        return count_operations(lambda: model.train()(ids, labels=ids).loss.backward())

    return _of_a_layer(count, layer)


def main() -> None:
    made = made_by("python -m tests.models.operation_counts")
    rows = [
        [
            layer,
            *(
                f"{count:.0f}"
                for count in (decoding_count(layer), decoding_count(layer, "torch"), training_count(layer))
            ),
        ]
        for layer in LAYERS
    ]
    text = (
        "Dispatched operations of one layer of a tiny model on the CPU: the difference of two depths, so that "
        "embeddings and heads are no part of it. Views and allocations are free, and a kernel of this package counts "
        "once. Decoding is the mean of 12 tokens, two blocks of the block transformers, with a dynamic cache in "
        "inference mode, with the C kernels and with torch alone; training is the forward and backward of two rows of "
        "64 tokens. "
        "`tests/models/test_operation_counts.py` keeps the bounds."
    )
    write_page(
        "operation_counts.md",
        "Operations of a layer",
        made,
        text,
        table(["layer", "decoding", "decoding, torch", "training"], rows),
    )


if __name__ == "__main__":
    main()
