"""What the models of all families share: `HybridPreTrainedModel`, and the forward of their base models."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, capture_outputs

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.models.cache import (
    begin_forward,
    finish_forward,
    prepare_cache,
    read_rows,
    refuse_while_recomputing,
)
from hf_hybrid_ssm.models.configuration import HOOKS, STATE_LAYER_TYPE
from hf_hybrid_ssm.models.inputs import check_arguments, check_inputs
from hf_hybrid_ssm.models.outputs import CACHE, NEW, OLD, BaseModelOutputWithCache, by_both_cache_names
from hf_hybrid_ssm.models.packing import PackedRows

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
NARROW = (torch.bfloat16, torch.float16)


class HybridPreTrainedModel(PreTrainedModel):
    """Base of every family's `PreTrainedModel`: what it supports, float32 parameters, parallel plans, saved code."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = [NEW, OLD]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _tp_plan: dict[str, str] | None
    _fsdp_plan: dict[str, str] | None
    _can_record_outputs: dict[str, Any] | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """transformers notes by the name of a class what its models can return, when one of them is built: not in a
        process that a model was sent to, not for the class that FSDP2 makes of a model's, nor for a student's base,
        which is built as its teacher's. So each class is noted here."""
        super().__init_subclass__(**kwargs)
        if cls._can_record_outputs is not None:
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        self._check_config(config)
        super().__init__(config, *args, **kwargs)

    def _check_config(self, config: Any) -> None:
        """A model is built from its own family's configuration, or one derived from it, whose fields fit each other.

        By the name of the family: a folder's own code has copies of the classes.

        Raises:
            TypeError: it is not a configuration of that family.
            ValueError: its fields, changed since it was made, do not fit each other.
        """
        wanted = type(self).config_class
        if wanted.model_type not in {getattr(kind, "model_type", None) for kind in type(config).__mro__}:
            raise TypeError(f"{type(self).__name__} needs a {wanted.__name__}, got {type(config).__name__}.")
        config.validate_layer_type()
        config.validate_architecture()
        if not getattr(config, "is_causal", True):
            raise ValueError(
                f"is_causal=False of {type(config).__name__} is no field: only layers that see all tokens would "
                "follow it."
            )

    def post_init(self) -> None:
        self._keep_in_fp32_modules_strict = {
            name
            for module in self.modules()
            if isinstance(module, Float32ParametersMixin)
            for name in module.float32_parameters
            if name in module._parameters
        }
        super().post_init()
        if self._why_no_attentions() is not None:  # a class may return them where this model cannot
            own = self._can_record_outputs or {}
            self._can_record_outputs = {name: kind for name, kind in own.items() if name != "attentions"}

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Mixers start by their `initial_values`, other modules of this package as they say (`set_initial_values`)."""
        if hasattr(module, "initial_values"):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)
            module.clear_kernel_cache()
        elif hasattr(module, "set_initial_values"):
            module.set_initial_values()
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module: Any, *args: Any, **options: Any) -> None:
        """As in transformers, which skips a module of another package once all of its own tensors are initialised, and
        so each that has none. Here those are not skipped: they may initialise their children."""
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            super()._initialize_weights(module, *args, **options)
        else:
            super()._initialize_weights(module)

    def clear_kernel_caches(self) -> None:
        """Drop what layers computed from their weights, to be computed again at the next forward.

        Ordinary changes of weights (loading, optimizers, in-place operations, moving, casting) do it themselves, and
        on the CPU all changes. On other devices call it after weights were written where torch does not look: through
        `parameter.data`, as averaging and broadcasting libraries do, or from outside of torch. A compiled model raises
        RuntimeError where frozen parameters were written in place, and goes on after this.
        """
        for module in self.modules():
            if hasattr(module, "clear_kernel_cache"):
                module.clear_kernel_cache()

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """As in transformers.

        Raises:
            ValueError: another size is asked for, and the head's weights are rounded (`LowBitConfig`).
        """
        head = self.get_output_embeddings()
        if not hasattr(head, "dequantized"):
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size, unit = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
        if -(-size // unit) * unit != self.config.vocab_size:
            raise ValueError(
                f"resize_token_embeddings: the head's weights are rounded to {head.bits} bits. Resize the model "
                "before it is rounded, or after model.dequantize()."
            )
        return self.get_input_embeddings()

    # -- output_attentions --------------------------------------------------------------------------------------

    def _why_no_attentions(self) -> str | None:
        """Why there are no attention weights to return; None where there are."""
        return "attention is computed in blocks, which never form a matrix of weights"

    def _refuse_attentions(self, output_attentions: bool | None) -> None:
        """Refuse `output_attentions=True` where there are no weights to return.

        Args:
            output_attentions: the argument of the forward; None leaves it to `config.output_attentions`.

        Raises:
            ValueError: weights were asked for that do not exist.
        """
        asked = self.config.output_attentions if output_attentions is None else output_attentions
        if asked and (reason := self._why_no_attentions()) is not None:
            raise ValueError(
                f"output_attentions=True cannot be answered by a {self.config.model_type!r} model: {reason}."
            )

    # -- parallel plans -----------------------------------------------------------------------------------------

    def init_parallel_plans(self) -> None:
        """A configuration's plans cover every layer that its family can have; these become those of this model.

        `tp_plan` and `fsdp_plan` lose the rules that match nothing here. `fsdp_plan` gains rules where the weights are
        narrower than float32: FSDP2 shards units of one dtype, so what shares a module with parameters that stay
        float32 becomes units of its own. (transformers makes a unit of each module that holds such parameters.)
        """
        super().init_parallel_plans()
        modules = [(LAYER_NUMBER.sub("*", name), module) for name, module in self.named_modules()]
        linear = {name for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)}
        self._tp_plan = _matching(self._tp_plan, linear)
        self._fsdp_plan = _matching(self._fsdp_plan, {name for name, _ in modules})
        if self.dtype in NARROW:
            for name, module in modules:
                self._fsdp_plan |= dict.fromkeys(_beside_float32(name, module), "free_full_weight")

    @property
    def supports_pp_plan(self) -> bool:
        """transformers cuts `base_model.layers`; encoders have theirs elsewhere."""
        return super().supports_pp_plan and hasattr(self.base_model, "layers")

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, teacher: str | os.PathLike | None = None, **kwargs: Any
    ) -> Any:
        """As in transformers; a folder with a missing or truncated weight file is refused by the file's name, before
        any is read.

        Args:
            teacher: where the teacher of a delta is (`hf_hybrid_ssm.upcycle.save_delta`): a folder, a name on the Hub
                or a GGUF file; by default what `HF_HYBRID_SSM_TEACHER` says.

        Raises:
            ValueError: names the file; or the teacher of a delta is not given, or is another one; or no weight of the
                layers is in the checkpoint, which holds another stack or was saved from a wrapper.
        """
        assert HOOKS.load is not None  # exported code fills it at the end of its file
        return HOOKS.load(super().from_pretrained, pretrained_model_name_or_path, *args, teacher=teacher, **kwargs)

    # -- saving with code ---------------------------------------------------------------------------------------

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, export_code: bool | None = None, **kwargs: Any
    ) -> None:
        """As in transformers; `export_code=True` adds the code that `trust_remote_code=True` loads without this
        package, `False` leaves it out. By default a model that was loaded from a folder with code is saved with code,
        so that it still loads where this package is not installed.
        """
        self._choose_code(export_code, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, repo_id: str, *args: Any, export_code: bool | None = None, **kwargs: Any) -> str:
        """As in transformers; for `export_code` see `save_pretrained`."""
        self._choose_code(export_code)
        return super().push_to_hub(repo_id, *args, **kwargs)

    def _choose_code(self, export_code: bool | None, folder: str | os.PathLike | None = None) -> None:
        if HOOKS.choose_code is not None and export_code is not None:
            HOOKS.choose_code(self, export_code, folder)


def _matching(plan: dict[str, str] | None, names: set[str]) -> dict[str, str]:
    return {rule: style for rule, style in (plan or {}).items() if rule in names}


def _beside_float32(name: str, module: nn.Module) -> list[str]:
    """The children with parameters of a module that keeps some of its own parameters in float32."""
    if not isinstance(module, Float32ParametersMixin):
        return []
    if all(module._parameters.get(parameter) is None for parameter in module.float32_parameters):
        return []
    return [f"{name}.{child}" for child, part in module.named_children() if any(True for _ in part.parameters())]


class HybridModelMixin:
    """The forward of a base model with `embed_tokens`, `layers` and `norm` (or None); placed before the family's
    `PreTrainedModel`.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module | None
    _refuse_attentions: Callable[[bool | None], None]  # of the pretrained class
    gradient_checkpointing: bool
    training: bool
    is_bidirectional = False  # its tokens see the future: there is nothing to continue
    uses_positions = False  # some layer uses rotary positions or full attention
    counts_documents = False  # layers need to know how many documents a row holds at most

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        continues_documents: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        attention_mask (`torch.Tensor` of shape `(batch_size, tokens so far)`, *optional*):
            1 for text, 0 for padding, on either side; of this forward's tokens or of all tokens so far.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        cu_seq_lens_q (`torch.IntTensor` of shape `(documents + 1,)`, *optional*):
            Where the documents of a single packed row begin and end, instead of `seq_idx`.
        continues_documents (`bool`, *optional*, defaults to `False`):
            The first tokens go on with the documents in the cache, as they do in each step of `generate`. A single
            token that does is not padding.
        """
        check_arguments(self, kwargs)
        self._refuse_attentions(kwargs.get("output_attentions"))
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if self.is_bidirectional:
            if cache is not None:
                raise ValueError(
                    f"cache cannot be used with a bidirectional {type(self).__name__}: its tokens see the future."
                )
            use_cache = False
        if use_cache or cache is not None:
            cache = prepare_cache(cache, self.config, *inputs_embeds.shape[:2])
        if isinstance(attention_mask, dict):  # made ahead of compiled decoding
            masks, state_mask = attention_mask, attention_mask[STATE_LAYER_TYPE]
        else:
            masks, state_mask = None, attention_mask
        if refuse_while_recomputing(self, cache):
            cache = None
        rows = read_rows(
            cache,
            inputs_embeds.shape[:2],
            attention_mask=state_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            continues_documents=continues_documents,
            counts_documents=self.counts_documents,
        )
        options = {"attention_mask": state_mask, "position_ids": position_ids, "masks": masks, **kwargs}
        begin_forward(cache)
        hidden_states = self._run_layers(inputs_embeds, rows, cache, **options)
        finish_forward(cache, self)
        return BaseModelOutputWithCache(
            last_hidden_state=self._last_norm(hidden_states, rows),
            **{CACHE: cache if use_cache else None},
        )

    def _last_norm(self, hidden_states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        return hidden_states if self.norm is None else self.norm(hidden_states)

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, cache: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        """(B, L, d) embeddings → (B, L, d) before the last norm; `kwargs` are for layers with positions or masks."""
        return self._through_layers(hidden_states, rows, cache=cache)

    def _through_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, cache: Cache | None, **options: Any
    ) -> torch.Tensor:
        """The layers one after the other, each with the same inputs."""
        for _, layer in zip(range(self.config.num_hidden_layers), self.layers):  # fewer while generation exits early
            hidden_states = layer(hidden_states, *inputs, cache=cache, **options)
        return hidden_states
