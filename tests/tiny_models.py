"""The tiny models that the tests share: every family, its variants, and what to feed them."""

import copy
import inspect
from functools import cache

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)

import hf_hybrid_ssm
from hf_hybrid_ssm import students
from hf_hybrid_ssm.models import FAMILIES
from hf_hybrid_ssm.models.cache import fit_cache

compiles = pytest.mark.skipif(
    torch.__version__.startswith("2.6"),
    reason="the compiler of torch 2.6 does not trace transformers' or these layers",
)

TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGHORN = {"hidden_size": 24, "num_hidden_layers": 3, "state_size": 5, "num_attention_heads": 4}
BST = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 40}
BST |= {"sliding_window": 6, "ssm_layers": [0, 2], "num_context_states": 3, "ssm_state_size": 4}
BST |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "initializer_range": 0.5}
LMU = {"hidden_size": 24, "num_hidden_layers": 2, "lmu_order": 10, "lmu_reduced_order": 3, "lmu_theta": 12.0}
LMU |= {"post_intermediate_size": 40, "num_attention_heads": 4}
SPADE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SPADE |= {"sliding_window": 7, "chunk_size": 5, "ssm_state_size": 8}
SEQ2SEQ = {**SPADE, "num_decoder_layers": 2, "max_target_positions": 64}
HYBRID = {"layer_types": ["longhorn", "window_attention", "full_attention"], "num_key_value_heads": 2}
HYBRID |= {"sliding_window": 6, "mlp_intermediate_size": 40}
STUDENT = {"teacher_type": "qwen3", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
STUDENT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.3}
STUDENT |= {"tie_word_embeddings": True, "max_position_embeddings": 2048}
STUDENT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
WINDOW = {"attention": "window", "window": 5, "sink": "constant"}
FIRST_TOKEN = {**WINDOW, "sink": "first_token"}
BLOCK_RECURRENT = {"ssm_layers": None, "layer_types": ["block_recurrent", "window_attention", "bst"]}


def of_student(*layers: dict, **beside) -> dict:
    """Fields of a student of a Qwen3 whose layers these are."""
    return {**STUDENT, "student": {"layers": list(layers), **beside}}


STUDENTS = "hybrid_student"
# language models, by family and what is special: (model type, fields of the configuration)
VARIANTS: dict[str, tuple[str, dict]] = {
    "longhorn": ("longhorn", LONGHORN),
    "longhorn conv of 2": ("longhorn", {**LONGHORN, "conv_kernel": 2}),
    "longhorn + window and full attention": ("longhorn", {**LONGHORN, **HYBRID}),
    "bst sh s4d": ("bst", BST),
    "bst mh s4": ("bst", {**BST, "context_variant": "mh", "ssm_type": "s4"}),
    "bst mf unstructured": ("bst", {**BST, "context_variant": "mf", "ssm_type": "unstructured", "filter_length": 16}),
    "bst with memory": ("bst", {**BST, "retrieval_k": 2, "retrieval_memory": 7, "retrieval_stride": 2}),
    "bst block-recurrent": ("bst", {**BST, **BLOCK_RECURRENT, "recurrent_num_states": 3}),
    "bst without scales": ("bst", {**BST, "qk_norm": False, "attend_self": True, "zero_kv_sink": False}),
    "lmu-isa": ("lmu_isa", LMU),
    "lmu-isa + global attention": ("lmu_isa", {**LMU, "first_sublayer": "global_attention"}),
    "lmu-isa + window attention": ("lmu_isa", {**LMU, "first_sublayer": "window_attention", "sliding_window": 5}),
    "spade s4 window": ("spade", SPADE),
    "spade s5 chunk post-norm": (
        "spade",
        {**SPADE, "ssm_type": "s5", "attention_type": "chunk", "norm_position": "post"},
    ),
    "spade hyena full": ("spade", {**SPADE, "ssm_type": "hyena", "attention_type": "full", "filter_length": 16}),
    "longhorn + full attention": (
        "longhorn",
        {**LONGHORN, "layer_types": ["full_attention", "longhorn", "longhorn"]},
    ),
    "student: windows and a full layer": (
        STUDENTS,
        of_student(WINDOW, {"attention": "full"}, {**WINDOW, "sink": None}, attn_scale=0.5, floor_scale=3),
    ),
    "student: groups": (
        STUDENTS,
        of_student({**WINDOW, "groups": [1]}, WINDOW, {**WINDOW, "groups": [0]}, attn_scale=0.3, floor_scale=4),
    ),
    "student: first tokens": (
        STUDENTS,
        of_student(FIRST_TOKEN, WINDOW, {**FIRST_TOKEN, "groups": [1]}),
    ),
    "student with a mixer": (
        STUDENTS,
        of_student({**WINDOW, "memory": "longhorn"}, {"attention": "none", "memory": "longhorn"}, WINDOW),
    ),
    "student with context states": (
        STUDENTS,
        of_student({**WINDOW, "memory": "context"}, WINDOW, WINDOW, memory={"ssm_state_size": 4}),
    ),
}
RELATIVE = {"decoder_attention_type": "window", "decoder_ssm_layers": [0]}
RELATIVE |= {"decoder_position_embedding_type": "relative", "ssm_trainable": "all"}
# and the encoders, encoder-decoders and rarer options
EVERY: dict[str, tuple[str, dict]] = VARIANTS | {
    "bst s5 bidirectional": ("bst", {**BST, "ssm_type": "s5", "bidirectional": True, "ssm_state_size": 8}),
    "spade s4 trained": ("spade", {**SPADE, "ssm_trainable": "all"}),
    "spade s4d output": ("spade", {**SPADE, "ssm_type": "s4d", "ssm_trainable": "output"}),
    "spade ema": ("spade", {**SPADE, "ssm_type": "ema", "ssm_state_size": 4}),
    "spade lstm": ("spade", {**SPADE, "ssm_type": "lstm"}),
    "spade adaptive": ("spade", {**SPADE, "adaptive_cutoffs": [20, 40], "adaptive_factor": 2}),
    "spade frozen hyena": ("spade", {**SPADE, "ssm_type": "hyena", "ssm_trainable": "none", "filter_length": 16}),
    "spade batchnorm": ("spade", {**SPADE, "norm_type": "batchnorm"}),
    "encoder-decoder": ("spade_seq2seq", SEQ2SEQ),
    "encoder-decoder relative window": ("spade_seq2seq", {**SEQ2SEQ, **RELATIVE}),
    "encoder-decoder with biases": ("spade_seq2seq", {**SEQ2SEQ, "decoder_attention_bias": True}),
    "longhorn untied": ("longhorn", {**LONGHORN, "tie_word_embeddings": False}),
    "lmu-isa untied": ("lmu_isa", {**LMU, "tie_word_embeddings": False}),
}
# language models of options that the rows above lack, for the invariances alone
RARER: dict[str, tuple[str, dict]] = {
    "bst mf s5": ("bst", {**BST, "context_variant": "mf", "ssm_type": "s5"}),
    "bst sh unstructured": ("bst", {**BST, "ssm_type": "unstructured", "filter_length": 7}),
    "bst block-recurrent, mf without scales": (
        "bst",
        {**BST, **BLOCK_RECURRENT, "recurrent_num_states": 3, "context_variant": "mf", "qk_norm": False}
        | {"attend_self": True, "zero_kv_sink": False},
    ),
    "spade s4 alone": ("spade", {**SPADE, "sliding_window": 1, "ssm_layers": [0, 1]}),
    "spade s4d chunk summed": ("spade", {**SPADE, "ssm_type": "s4d", "attention_type": "chunk", "ssm_merge": "add"}),
    "spade s5 beneath attention": ("spade", {**SPADE, "ssm_type": "s5", "ssm_merge": "stack", "ssm_layers": [1]}),
    "spade ema in all layers": (
        "spade",
        {**SPADE, "ssm_type": "ema", "ssm_state_size": 4, "ssm_layers": [0, 1], "relative_bias_scope": "per_layer"},
    ),
    "spade lstm chunk": (
        "spade",
        {**SPADE, "ssm_type": "lstm", "attention_type": "chunk", "relative_bias_scope": "none"},
    ),
    "spade adaptive, scaled": (
        "spade",
        {**SPADE, "adaptive_cutoffs": [20, 40], "adaptive_factor": 2, "scale_embedding": True},
    ),
    "student with several context states": (
        STUDENTS,
        of_student(
            {**WINDOW, "memory": "context"},
            {"attention": "full"},
            WINDOW,
            memory={"context_variant": "mf", "num_context_states": 3, "ssm_state_size": 4},
        ),
    ),
}
# each family once, for what is slow
FEW = ["longhorn + window and full attention", "bst mh s4", "lmu-isa", "spade s4 trained", "encoder-decoder"]
# a language model of every kind of layer, for what asks each family the same: the rows of the matrix of the ecosystem
ROWS = [
    "longhorn",
    "longhorn + window and full attention",
    "bst sh s4d",
    "bst mh s4",
    "bst mf unstructured",
    "lmu-isa",
]
ROWS += ["lmu-isa + global attention", "spade s4 window", "spade hyena full", "encoder-decoder"]
ROWS += ["student: windows and a full layer", "student: groups", "student with a mixer"]
# their cards, and what a server's pages hold of them, have tests of their own in tests/hub and tests/serving
OF_ONE_STACK = [row for row in ROWS if EVERY[row][0] != "spade_seq2seq"]
OF_FAMILIES = [variant for variant in VARIANTS if VARIANTS[variant][0] != STUDENTS]
OF_STUDENTS = [variant for variant in VARIANTS if VARIANTS[variant][0] == STUDENTS]
# those with heads for classes and spans; a student is a language model alone
HEADED = [row for row in ROWS if EVERY[row][0] != STUDENTS]
# widths that hold whole groups of quantized weights, by model type
WIDER: dict[str, dict] = {
    "longhorn": {"hidden_size": 128, "state_size": 12},
    "bst": {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256},
    "lmu_isa": {"hidden_size": 128, "pre_intermediate_size": 256, "post_intermediate_size": 256},
    "spade": {"hidden_size": 128, "intermediate_size": 256},
    "spade_seq2seq": {"hidden_size": 128, "intermediate_size": 256},
    STUDENTS: {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256},
}


HEADS_OF = {family.model_type: family.heads for family in FAMILIES}
HEADS_OF[STUDENTS] = {"MODEL": "HybridStudentModel", "MODEL_FOR_CAUSAL_LM": "HybridStudentForCausalLM"}


def config_of(variant: str, **fields) -> PreTrainedConfig:
    model_type, own = RARER.get(variant) or EVERY[variant]
    return AutoConfig.for_model(model_type, **{**TOKENS, **own, **fields})


def classes_of(variant: str) -> dict[str, type[PreTrainedModel]]:
    """Class name → class, all that a variant's configuration can build."""
    names = list(dict.fromkeys(HEADS_OF[EVERY[variant][0]].values()))
    if "BstForMaskedLM" in names:  # one predicts from the past, the other from both sides
        names.remove("BstForCausalLM" if EVERY[variant][1].get("bidirectional") else "BstForMaskedLM")
    if "adaptive_cutoffs" in EVERY[variant][1]:
        names = [name for name in names if "CausalLM" in name or "MaskedLM" in name]
    return {name: getattr(students if EVERY[variant][0] == STUDENTS else hf_hybrid_ssm, name) for name in names}


def class_with_loss(variant: str) -> str:
    """The class that a variant is most trained as: the one that generates, else the classifier."""
    names = classes_of(variant)
    return next(name for kind in ("ForCausal", "ForCond", "Classification") for name in names if kind in name)


COMBINATIONS = [(variant, name) for variant in EVERY for name in classes_of(variant)]


def build(variant: str, class_name: str | None = None, wide: bool = False) -> PreTrainedModel:
    """A model whose every parameter and saved buffer was moved away from its initial value."""
    torch.manual_seed(0)
    config = config_of(variant, **(WIDER[EVERY[variant][0]] if wide else {}))
    model = classes_of(variant)[class_name or class_with_loss(variant)](config).eval()
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


@cache
def language_model(variant: str, wide: bool = False) -> PreTrainedModel:
    """The language model of a variant, away from the smooth initial point, in evaluation mode; one for all callers."""
    config = config_of(variant, **(WIDER[EVERY[variant][0]] if wide else {}))
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    # a decoder hears its encoder through maps that start near nothing
    scale = 6.0 if config.is_encoder_decoder else 1.5
    for name, parameter in model.named_parameters():
        if "sink" in name or (config.model_type == STUDENTS and ".memory." in name and not parameter.any()):  # from 0
            parameter.data.normal_()
        elif parameter.dim() >= 2 and parameter.requires_grad and ".ssm." not in name:
            parameter.data.mul_(scale)
    return model


def own_language_model(variant: str, wide: bool = False) -> PreTrainedModel:
    """`language_model` for a caller that changes it."""
    return copy.deepcopy(language_model(variant, wide))


@cache
def shallow_language_model(variant: str) -> PreTrainedModel:
    """`language_model` with one layer of each kind, for compilers: another is only more to trace."""
    if EVERY[variant][0] in ("spade", STUDENTS):  # whose layers are all of different kinds
        return language_model(variant)
    model = own_language_model(variant)
    base, config = model.model, model.config
    if config.is_encoder_decoder:
        config.num_decoder_layers, base.decoder.layers = 1, base.decoder.layers[:1]
        return model
    kinds = getattr(config, "layer_types", None) or ["lmu_isa"]
    config.num_hidden_layers = len(set(kinds))  # all kinds come before one comes again
    base.layers = base.layers[: config.num_hidden_layers]
    return model


def recording_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache that can go back, of the layers that the model keeps."""
    cache = DynamicCache(config=model.config)
    fit_cache(cache, model.config)
    cache.activate_past_recording()
    return cache


def empty_cache(model: PreTrainedModel, room: int | None = None) -> Cache:
    """One of the layers that the model keeps, of an encoder-decoder two; static with room for so many tokens."""
    config, decodes = model.config, "decoder_input_ids" in inspect.signature(model.forward).parameters
    caches = [
        DynamicCache(config=config) if room is None else StaticCache(config=config, max_cache_len=room)
        for _ in range(1 + decodes)
    ]
    return EncoderDecoderCache(*caches) if decodes else caches[0]


def ids_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, TOKENS["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def batch_of(variant: str, rows: int = 2, length: int = 14) -> dict[str, torch.Tensor]:
    """Token ids and labels of a language model; an encoder-decoder's target is shorter than its source."""
    ids = ids_of(rows, length, seed=1)
    return {"input_ids": ids, "labels": ids[:, :6] if EVERY[variant][0] == "spade_seq2seq" else ids}


def inputs_for(model: PreTrainedModel, seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids that the model takes; the target too where it has a decoder."""
    ids = ids_of(rows, length, seed=seed)
    if "MultipleChoice" in type(model).__name__:
        return {"input_ids": torch.stack((ids, ids.flip(1)), 1)}
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :5]} if decodes else {})


def labels_for(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """What the model can learn from ids (B, L): a class of each row, its first half as a target, or the ids."""
    if "MultipleChoice" in type(model).__name__:
        return ids[:, 0, 0] % 2
    if "Classification" in type(model).__name__:
        return ids[:, 0] % 2
    return ids[:, : ids.shape[1] // 2] if model.config.is_encoder_decoder else ids


# -- longer windows and wider layers, for what is measured and spread -------------------------------------------------

VOCABULARY = 60
SIZES = {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "use_cache": False}
WIDE_SPADE = {"intermediate_size": 56, "num_attention_heads": 2, "sliding_window": 16}
WIDE_BST = {"intermediate_size": 56, "num_attention_heads": 2, "head_dim": 10, "sliding_window": 16, "ssm_layers": [1]}
WIDE_LMU = {"lmu_order": 20, "lmu_reduced_order": 6, "pre_intermediate_size": 31, "post_intermediate_size": 43}
WIDE_LMU |= {"lmu_theta": 30.0, "num_attention_heads": 2, "sliding_window": 20}
WIDE_HYBRID = {**HYBRID, "num_hidden_layers": 3, "sliding_window": 20, "num_attention_heads": 4}
WITHOUT_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout", "activation_dropout"), 0.0)
CHUNKS = {"attention_type": "chunk", "chunk_size": 16, "relative_bias_scope": "none"}
BRECT = {"ssm_layers": None, "layer_types": ["window_attention", "block_recurrent"], "recurrent_num_states": 12}
WIDE_WINDOW = {**WINDOW, "window": 20}
WIDE_STUDENT = of_student({**WIDE_WINDOW, "groups": [1]}, {"attention": "full"}, attn_scale=0.3, floor_scale=4)
WIDE_STUDENT |= {"num_hidden_layers": 2}
WIDE_STUDENT_WITH_MIXER = of_student({**WIDE_WINDOW, "memory": "longhorn"}, WIDE_WINDOW) | {"num_hidden_layers": 2}
CASES: dict[str, tuple[str, dict]] = {
    "longhorn": ("longhorn", {"state_size": 5}),
    "longhorn hybrid": ("longhorn", {"state_size": 5, **WIDE_HYBRID}),
    "student": (STUDENTS, WIDE_STUDENT),
    "student with a mixer": (STUDENTS, WIDE_STUDENT_WITH_MIXER),
    "spade": ("spade", WIDE_SPADE),
    "spade chunk": ("spade", {**WIDE_SPADE, **CHUNKS}),
    "spade full, trained s4": ("spade", {**WIDE_SPADE, "attention_type": "full", "ssm_trainable": "all"}),
    "spade post norm": (
        "spade",
        {**WIDE_SPADE, "norm_position": "post", "hidden_act": "silu", "activation_dropout": 0.1},
    ),
    "spade classifier": ("spade", {**WIDE_SPADE, "pooling": "mean", "ssm_trainable": "all", "num_labels": 3}),
    "bst sh": ("bst", WIDE_BST),
    "bst mh": ("bst", {**WIDE_BST, "context_variant": "mh"}),
    "bst mf": ("bst", {**WIDE_BST, "context_variant": "mf", "num_context_states": 4}),
    "bst brect": ("bst", {**WIDE_BST, **BRECT}),
    "lmu_isa": ("lmu_isa", WIDE_LMU),
    "lmu_isa global": ("lmu_isa", {**WIDE_LMU, "first_sublayer": "global_attention"}),
    "lmu_isa window": ("lmu_isa", {**WIDE_LMU, "first_sublayer": "window_attention"}),
    "spade_seq2seq": ("spade_seq2seq", {**WIDE_SPADE, "num_decoder_layers": 2}),
}


def built(case: str, dtype: torch.dtype = torch.float32, **more) -> PreTrainedModel:
    """The model of one of `CASES` as it is initialised, in training mode, with the same weights each time."""
    family, fields = CASES[case]
    config = AutoConfig.for_model(family, **SIZES | fields | more)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if "classifier" in case:
        auto = AutoModelForSequenceClassification
    torch.manual_seed(0)
    return auto.from_config(config, dtype=dtype).train()
