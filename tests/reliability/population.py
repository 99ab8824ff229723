"""Every class of every family in its variants, tiny: what the checks of this folder go through."""

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

import hf_hybrid_ssm
from hf_hybrid_ssm.auto import FAMILIES
from tests.invariants.variants import BST, SPADE, TOKENS, VARIANTS

SEQ2SEQ = {**SPADE, "num_decoder_layers": 2, "max_target_positions": 64}
MORE: dict[str, tuple[str, dict]] = {
    "bst s5 bidirectional": ("bst", {**BST, "ssm_type": "s5", "bidirectional": True, "ssm_state_size": 8}),
    "spade s4 trained": ("spade", {**SPADE, "ssm_trainable": "all"}),
    "spade s4d output": ("spade", {**SPADE, "ssm_type": "s4d", "ssm_trainable": "output"}),
    "spade ema": ("spade", {**SPADE, "ssm_type": "ema", "ssm_state_size": 4}),
    "spade lstm": ("spade", {**SPADE, "ssm_type": "lstm"}),
    "spade adaptive": ("spade", {**SPADE, "adaptive_cutoffs": [20, 40], "adaptive_factor": 2}),
    "spade frozen hyena": (
        "spade",
        {**SPADE, "ssm_type": "hyena", "ssm_trainable": "none", "filter_length": 16},
    ),
    "spade batchnorm": ("spade", {**SPADE, "norm_type": "batchnorm"}),
    "encoder-decoder": ("spade_seq2seq", SEQ2SEQ),
    "encoder-decoder relative window": (
        "spade_seq2seq",
        {
            **SEQ2SEQ,
            "decoder_attention_type": "window",
            "decoder_ssm_layers": [0],
            "decoder_position_embedding_type": "relative",
            "ssm_trainable": "all",
        },
    ),
    "longhorn untied": ("longhorn", {**VARIANTS["longhorn"][1], "tie_word_embeddings": False}),
    "lmu-isa untied": ("lmu_isa", {**VARIANTS["lmu-isa"][1], "tie_word_embeddings": False}),
}
EVERY = VARIANTS | MORE
# each family once, for what is slow
FEW = ["longhorn + window and full attention", "bst mh s4", "lmu-isa", "spade s4 trained", "encoder-decoder"]


def config_of(variant: str, **fields) -> PreTrainedConfig:
    model_type, own = EVERY[variant]
    return AutoConfig.for_model(model_type, **{**TOKENS, **own, **fields})


def classes_of(variant: str) -> dict[str, type[PreTrainedModel]]:
    """Class name → class, all that a variant's configuration can build."""
    family = next(family for family in FAMILIES if family.model_type == EVERY[variant][0])
    names = list(dict.fromkeys(family.heads.values()))
    if EVERY[variant][1].get("bidirectional"):  # looks ahead, hence no language model
        names = [name for name in names if "CausalLM" not in name]
    if "adaptive_cutoffs" in EVERY[variant][1]:
        names = [name for name in names if "CausalLM" in name]
    return {name: getattr(hf_hybrid_ssm, name) for name in names}


COMBINATIONS = [(variant, name) for variant in EVERY for name in classes_of(variant)]


def build(variant: str, class_name: str) -> PreTrainedModel:
    """A model whose every parameter and saved buffer was moved away from its initial value."""
    torch.manual_seed(0)
    model = classes_of(variant)[class_name](config_of(variant)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.parameters()}.values():
            tensor.mul_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            tensor.add_(0.01 * torch.randn(tensor.shape, generator=generator))
        saved = model.state_dict()
        for name, tensor in model.named_buffers():  # running statistics: variances stay positive, counts whole
            if name in saved:
                tensor.add_(torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else 3)
    return model


def inputs_for(model: PreTrainedModel, seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids that the model takes; the target too where it has a decoder."""
    ids = torch.randint(3, TOKENS["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
    decodes = model.config.is_encoder_decoder and "Classification" not in type(model).__name__
    decodes = decodes and "Encoder" not in type(model).__name__
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if decodes else {})


def class_with_loss(variant: str) -> str:
    """The class that a variant is most trained as: the one that generates, else the classifier."""
    names = classes_of(variant)
    generating = [name for name in names if "ForCausal" in name or "ForCond" in name]
    return (generating or [name for name in names if "Classification" in name])[0]


def labels_for(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """What the model can learn from ids (B, L): a class of each row, its first half as a target, or the ids."""
    if "Classification" in type(model).__name__:
        return ids[:, 0] % 2
    return ids[:, : ids.shape[1] // 2] if model.config.is_encoder_decoder else ids
