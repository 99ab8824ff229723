"""Which modules PEFT adapts when a configuration names none: `LoraConfig()` alone works for every family.

PEFT finds the defaults of a model type in tables of its own; ours enter the same tables, when PEFT is imported and
not before (see `auto.py`). They name the maps into and out of attention, the maps around the recurrence, and the
feed-forward layers. What makes the recurrence itself (time steps, decay, state matrices, filters, the memory's
coefficients) is in no list: adapting it changes how long a model remembers.
"""

from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Targets:
    """The defaults of one family, as endings of module names.

    Args:
        lora: for LoRA and what PEFT treats alike.
        ia3: modules whose output (of `ia3_feed_forward`: whose input) IA3 scales.
    """

    lora: tuple[str, ...]
    ia3: tuple[str, ...]
    ia3_feed_forward: tuple[str, ...]


# "attention." tells the maps of BST's tokens from those of its context states, one variant of which are no nn.Linear.
TARGETS = {
    "longhorn": Targets(
        lora=("in_proj", "out_proj", "q_proj", "v_proj"),
        ia3=("out_proj", "k_proj", "v_proj", "down_proj"),
        ia3_feed_forward=("out_proj", "down_proj"),
    ),
    "bst": Targets(
        lora=("attention.q_proj", "attention.v_proj", "attention.context_q_proj"),
        ia3=("attention.k_proj", "attention.v_proj", "fc2"),
        ia3_feed_forward=("fc2",),
    ),
    "lmu_isa": Targets(
        lora=("fc1", "fc2", "q_proj", "v_proj"),
        ia3=("k_proj", "v_proj", "fc2"),
        ia3_feed_forward=("fc2",),
    ),
    "spade": Targets(
        lora=("q_proj", "v_proj", "aggregate"),
        ia3=("k_proj", "v_proj", "fc2"),
        ia3_feed_forward=("fc2",),
    ),
}
TARGETS["spade_seq2seq"] = TARGETS["spade"]


def register(constants: ModuleType) -> None:
    """Add the families to the tables of `peft.utils.constants`; what PEFT itself knows of a model type stays.

    The tables of the methods like LoRA are those that agree with LoRA's on Llama.
    """
    suffix = "_TARGET_MODULES_MAPPING"
    lora = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    tables = [table for name, table in vars(constants).items() if name.endswith(suffix)]
    for model_type, targets in TARGETS.items():
        for table in tables:
            if table.get("llama") == lora["llama"]:
                table.setdefault(model_type, list(targets.lora))
        constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.setdefault(model_type, list(targets.ia3))
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.setdefault(
            model_type, list(targets.ia3_feed_forward)
        )
