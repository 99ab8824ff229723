"""A step run on fake tensors: every op sees shapes, dtypes and devices, but nothing is allocated or computed.

What autograd saves, what a cache holds and the number of operations are counted, not predicted: the same code runs as
in training, so every configuration that can be built can be planned.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.spade.options_spade import AdaptiveSoftmax
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.planning.operations import Operations, by_kind
from hf_hybrid_ssm.planning.presets import OF_VOCABULARY, has_state, head_of, meta_model
from hf_hybrid_ssm.planning.setup import Setup
from hf_hybrid_ssm.students.teacher import let_experts_be_fake

VALUES = ("regression", "multi_label_classification")
"""Problems of sequence classifiers whose labels are as many values as there are labels."""


class SavedBytes:
    """Bytes that autograd saves while `recording()`, without weights, each storage once; in the base model and after.

    With `checkpoints`, the tensors that these modules are called with count too: checkpointing keeps them where
    autograd does not see them.
    """

    def __init__(self, model: PreTrainedModel, checkpoints: tuple[nn.Module, ...] = ()):
        self._own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._base = model.base_model
        self._checkpoints = checkpoints
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used again
        self._of_base: set[int] = set()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._storages[storage._cdata] = storage
        return tensor

    def _keep_inputs(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._keep(value)

    def _base_is_done(self, *_: Any) -> None:
        self._of_base = set(self._storages)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in self._checkpoints:
                hooks.enter_context(module.register_forward_pre_hook(self._keep_inputs, with_kwargs=True))
            hooks.enter_context(self._base.register_forward_hook(self._base_is_done))
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            yield

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    @property
    def base(self) -> int:
        return sum(storage.nbytes() for key, storage in self._storages.items() if key in self._of_base)

    @property
    def head(self) -> list[int]:
        return [storage.nbytes() for key, storage in self._storages.items() if key not in self._of_base]


@dataclass(frozen=True)
class Measurement:
    """One training step on one device.

    Args:
        activations: bytes that the forward keeps for the backward, except logits.
        recomputed: bytes that the largest layer keeps once checkpointing computes it again; 0 without checkpointing.
        logits: bytes of logits of the vocabulary, of what the loss keeps of them, and of a gradient; 0 where none are
            formed. What other heads keep is among `activations`.
        forward_flops: operations of the forward by kind.
        step_flops: operations of forward and backward.
        state: bytes of the cache of one decoded sequence of the row's length; 0 for what does not decode.
    """

    activations: int
    recomputed: int
    logits: int
    forward_flops: dict[str, float]
    step_flops: float
    state: int


def measure_step(config: PreTrainedConfig, setup: Setup, backward: bool = True) -> Measurement:
    """Run forward and backward of the configuration's model (`Family.main_class`) on fake tensors.

    A base model has no loss of its own; it learns by the sum of its last hidden states.

    Without the backward, which takes as long as the rest, `step_flops` are those of the forward.

    Raises:
        ValueError: the model is a mixture of experts.
    """
    model = meta_model(copy.deepcopy(config), setup.dtype)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0  # by which a classifier finds the last token of each row
    if model._can_set_experts_implementation():
        kind = getattr(config, "teacher_type", config.model_type)
        raise ValueError(
            f"training steps of {kind!r} models are not planned: which experts a token takes follows from its numbers."
        )
    with _fake_tensors(setup.kernels):
        state = _decoded_bytes(_on_cpu(model), setup.length)
        model.train()  # filters that do not train have been computed by then, and are cached
        _leave_out_rare_bands(model)
        inputs = _inputs(model, setup.batch, setup.length)
        recomputed, blocks = 0, blocks_of(model) if setup.checkpointing else ()
        if blocks:
            recomputed = max(_saved_by_blocks(model, blocks, inputs, setup))
            _checkpoint_layers(model)
        saved, operations = SavedBytes(model, blocks), Operations()
        of_base: dict[Any, float] = {}
        model.base_model.register_forward_hook(lambda *_: of_base.update(operations.counts))
        with operations:
            with saved.recording(), _autocast(setup):
                outputs = model(**inputs)
            forward = by_kind(of_base, operations.counts.total())
            if backward:
                loss = getattr(outputs, "loss", None)
                (outputs.last_hidden_state.sum() if loss is None else loss).backward()
    logits = 0
    if head_of(config) in OF_VOCABULARY and outputs.logits is not None:
        # the loss keeps log-probabilities, and their gradient is as large
        logits = outputs.logits.untyped_storage().nbytes() + sum(saved.head) + max(saved.head)
    return Measurement(
        activations=saved.base + (0 if logits else sum(saved.head)),
        recomputed=recomputed,
        logits=logits,
        forward_flops=forward,
        step_flops=float(operations.counts.total()),
        state=state,
    )


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """transformers 5.23 renamed the method, and warns of the old name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if getattr(model.config, "use_cache", None):
        model.config.use_cache = False  # transformers does so in every forward, and says it


def decoding_state_bytes(config: PreTrainedConfig, lengths: Sequence[int], dtype: str, kernels: str) -> list[int]:
    """Bytes of the cache of one sequence after so many tokens (an encoder-decoder: of source and target each).

    A fused kernel may keep more than plain torch does: LMU-ISA's also keeps the tokens since its memory.
    """
    model = meta_model(copy.deepcopy(config), dtype)
    with _fake_tensors(kernels):
        model = _on_cpu(model)
        return [_decoded_bytes(model, length) for length in lengths]


@torch.no_grad()
def _decoded_bytes(model: PreTrainedModel, length: int) -> int:
    """The same of a model, which is then in evaluation mode. What does not decode runs too, and has no cache."""
    config = model.eval().config
    let_experts_be_fake(model)
    if not has_state(config):
        model(**_inputs(model, 1, length))
        return 0
    names = ("input_ids", "decoder_input_ids") if config.is_encoder_decoder else ("input_ids",)
    ids = torch.zeros(1, length, dtype=torch.int64)
    # logits of one token: a cache does not depend on them
    options = {"logits_to_keep": 1} if head_of(config) == "CAUSAL_LM" else {}
    return cache_bytes(model(**dict.fromkeys(names, ids), use_cache=True, **options).cache)


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    tensors = [tensor for layer in cache.layers for tensor in _held(layer) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _held(layer: Any) -> list[torch.Tensor | None]:
    if is_recurrent_state_layer(layer):
        return [*layer.states.values()]
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [getattr(layer, "keys", None), getattr(layer, "values", None), *states]


def blocks_of(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The layers that checkpointing computes again, and that FSDP2 gathers one at a time."""
    kinds = set(model._no_split_modules or ())
    return tuple(module for module in model.modules() if type(module).__name__ in kinds)


@contextmanager
def _fake_tensors(kernels: str) -> Iterator[None]:
    # constants that modules made before (HiPPO matrices, tables) are used as they are
    with FakeTensorMode(allow_non_fake_inputs=True), backend("torch" if kernels == "torch" else None):
        yield


def _on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """`model.to_empty`, which first makes a fake tensor of each on the meta device."""
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def _autocast(setup: Setup) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.mixed_precision)


def _inputs(model: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids, (rows, length) or two such texts in each row, and what the model's head learns from."""
    config, head = model.config, head_of(model.config)
    is_paired = head == "MULTIPLE_CHOICE" or getattr(config, "paired_input", False)
    ids = torch.zeros((rows, 2, length) if is_paired else (rows, length), dtype=torch.int64)
    of_rows = torch.zeros(rows, dtype=torch.int64)
    if head in (*OF_VOCABULARY, "TOKEN_CLASSIFICATION"):
        return {"input_ids": ids, "labels": ids}
    if head == "QUESTION_ANSWERING":
        return {"input_ids": ids, "start_positions": of_rows, "end_positions": of_rows}
    if head == "SEQUENCE_CLASSIFICATION" and config.problem_type in VALUES:
        return {"input_ids": ids, "labels": torch.zeros(rows, config.num_labels)}
    if head in ("SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE"):
        return {"input_ids": ids, "labels": of_rows}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder and head == "MODEL" else {})


def _leave_out_rare_bands(model: PreTrainedModel) -> None:
    """How many tokens an adaptive softmax computes a rare band for depends on the real targets."""
    head = getattr(model, "lm_head", None)
    if isinstance(head, AdaptiveSoftmax):
        model._fused_loss = lambda hidden_states, *_, **__: head.first_band(hidden_states).sum()


def _saved_by_blocks(
    model: PreTrainedModel, blocks: tuple[nn.Module, ...], inputs: dict[str, torch.Tensor], setup: Setup
) -> Iterator[int]:
    """Bytes that each layer keeps for its backward: the difference between the totals after and before it."""
    saved, sizes = SavedBytes(model), []
    with saved.recording(), _autocast(setup), ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(lambda *_: sizes.append(-saved.total)))
            hooks.enter_context(block.register_forward_hook(lambda *_: sizes.append(saved.total)))
        model(**inputs)
    return (before + after for before, after in zip(sizes[::2], sizes[1::2]))
