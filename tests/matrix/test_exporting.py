"""torch.export and ONNX

Through a file, with the plain torch implementations; the logits to 1e-4 of the largest. The prefill is for one length;
the graph for any length is made from 14 tokens and asked for 9, 30 and 70. One token is a graph from the token, the
position and the states as tensors to the logits and the states after it, run three times in a row on what it returned.
ONNX graphs run in ONNX Runtime; Longhorn's prefill is exported there from its reference, step by step. ExecuTorch runs
the program of `DecodingStep`, which keeps the states itself: two rows, and two others after them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_hybrid_ssm.models.cache import fit_cache, is_recurrent_state_layer
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.ops.core import dispatch
from hf_hybrid_ssm.serving.decoding_step import DecodingStep
from hf_hybrid_ssm.students.initial import student_of
from tests.matrix.checks import EVERY_FAMILY, assert_near, cells, rows
from tests.students.teachers import teacher, tokens
from tests.tiny_models import OF_ONE_STACK, batch_of, ids_of, own_language_model, shallow_language_model

NO_FREE_LENGTH = pytest.mark.limit(
    "torch",
    r"Guard failed: ids_\d\.size|specialized it to be a constant",
    "an exported graph holds for lengths that take the same branches, and these layers choose block and transform "
    "sizes by the length. Export a graph for each length in use, or decode by the graph of one token.",
)
NO_COMPLEX = pytest.mark.limit(
    "torch",
    "No decompositions registered for the complex-valued input",
    "its ONNX exporter lacks some operations on complex numbers, which the kernels of S4 and S4D are made of.",
)


class Prefill(torch.nn.Module):
    """Token ids (B, L) → logits (B, L, V); of an encoder-decoder: source and target ids."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, *ids: torch.Tensor) -> torch.Tensor:
        names = ("input_ids", "decoder_input_ids")
        return self.model(**dict(zip(names, ids)), use_cache=False).logits


class MaskedPrefill(Prefill):
    """`Prefill` with the mask (B, L) of the first ids."""

    def forward(self, mask: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        names = ("input_ids", "decoder_input_ids")
        return self.model(**dict(zip(names, ids)), attention_mask=mask, use_cache=False).logits


class Step(torch.nn.Module):
    """One token (B, 1), the number of tokens before it, and the states → logits (B, 1, V) and the states after it.

    A cache is not a tensor, and the exporters know only those of transformers: the states come as plain tensors, are
    put into a cache like the prefill's, and those after it are returned, as a runtime without Python has to do too.
    An encoder's output is the first of the states.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache):
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, token: torch.Tensor, seen: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        states, config = list(states), self.model.config.get_text_config(decoder=True)
        if not self.model.config.is_encoder_decoder:
            cache = _filled(self.cache, config, states, seen)
            rotary = any(kind != STATE_LAYER_TYPE for kind in self.model.config.layer_types)
            positions = torch.zeros_like(token) + seen if rotary else None
            logits = self.model(token, past_key_values=cache, position_ids=positions).logits
            return [logits, *states_of(cache)]
        encoded = states.pop(0)
        cache = EncoderDecoderCache(
            _filled(self.cache.self_attention_cache, config, states, seen),
            _filled(self.cache.cross_attention_cache, config, states, encoded.shape[1]),
        )
        cache.is_updated = dict(self.cache.is_updated)
        inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": token}
        return [self.model(**inputs, past_key_values=cache, use_cache=True).logits, encoded, *states_of(cache)]


def _filled(like: Cache, config: PreTrainedConfig, states: list[torch.Tensor], seen: torch.Tensor | int) -> Cache:
    """A cache like another that takes its states from the list."""
    cache = DynamicCache(config=config)
    fit_cache(cache, config)
    for layer, other in zip(cache.layers, like.layers):
        if is_recurrent_state_layer(layer):
            layer.states = {name: states.pop(0) for name in other.states}
            layer.seen_tokens = seen + 0
            layer.is_initialized, layer.device = True, other.device
        else:
            layer.update(states.pop(0), states.pop(0))
    return cache


def states_of(cache: Cache) -> list[torch.Tensor]:
    if isinstance(cache, EncoderDecoderCache):
        return [*states_of(cache.self_attention_cache), *states_of(cache.cross_attention_cache)]
    states = (x.states.values() if is_recurrent_state_layer(x) else (x.keys, x.values) for x in cache.layers)
    return [state for of_layer in states for state in of_layer]


def _prefill(row: str) -> tuple[Prefill, tuple[torch.Tensor, ...]]:
    model, batch = shallow_language_model(row), batch_of(row)
    return Prefill(model).eval(), tuple(batch.values()) if model.config.is_encoder_decoder else (batch["input_ids"],)


class Decoding:
    """A step to export, its inputs after a prefill, and the logits to expect of it."""

    def __init__(self, row: str, steps: int = 3):
        model, (*source, tokens) = _prefill(row)
        first = tokens.shape[1] - steps
        self.tokens = tokens[:, first:].split(1, 1)
        with torch.no_grad():
            self.logits = model(*source, tokens)[:, first:].unbind(1)
            inputs = dict(zip(("input_ids", "decoder_input_ids"), (*source, tokens[:, :first])))
            out = model.model(**inputs, use_cache=True)
            fixed = [out.encoder_last_hidden_state] if source else []
            self.states = [state.clone() for state in (*fixed, *states_of(out.past_key_values))]
            self.seen, self.module = torch.tensor(first), Step(model.model, out.past_key_values).eval()
            _, *after = self.module(*self.inputs())
        # keys and values of full attention grow from step to step; nothing else does
        grow = [
            {2: torch.export.Dim.DYNAMIC} if new.shape != old.shape else None for new, old in zip(after, self.states)
        ]
        self.shapes = (None, None, grow)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        return self.tokens[0], self.seen, self.states

    def check(self, step: Callable[..., list[torch.Tensor]]) -> None:
        """Every step from the states that the one before returned."""
        states = self.states
        for count, (token, expected) in enumerate(zip(self.tokens, self.logits)):
            logits, *states = step(token, self.seen + count, states)
            assert_near(logits[:, 0], expected, 1e-4, f"logits of step {count}")


def _exported(module: torch.nn.Module, inputs: tuple, folder: Path, **options: Any) -> Callable[..., Any]:
    """Through a file."""
    torch.export.save(torch.export.export(module, inputs, **options), folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()


def _onnx_runtime(module: torch.nn.Module, inputs: tuple, folder: Path, **options: Any) -> Callable[..., Any]:
    """The exported model as a function of tensors (and lists of them), run by ONNX Runtime."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())

    def run(*arguments: torch.Tensor | list[torch.Tensor]) -> Any:
        flat = [x for argument in arguments for x in (argument if isinstance(argument, list) else [argument])]
        names = [x.name for x in session.get_inputs()]
        assert len(names) == len(flat), f"{len(names)} inputs of the graph for {len(flat)} tensors"
        found = [torch.from_numpy(x) for x in session.run(None, {k: x.numpy() for k, x in zip(names, flat)})]
        return found if len(found) > 1 else found[0]

    return run


EXPORTERS = {"export": _exported, "ONNX": _onnx_runtime}


# `make test` exports the prefill of every family in test_fresh_process.py
@cells({"export: prefill": ("lmu-isa",), "ONNX: prefill": ("lmu-isa",)})
@NO_COMPLEX
def test_prefill(column, row, tmp_path):
    module, ids = _prefill(row)
    # Longhorn's vectorised scan is an op of this package, which ONNX cannot know; the reference is plain steps
    backend = "reference" if "ONNX" in column and module.model.config.model_type == "longhorn" else "torch"
    with torch.no_grad(), dispatch.backend(backend):
        exported = EXPORTERS[column.split(":")[0]](module, ids, tmp_path)
        assert_near(exported(*ids), module(*ids), 1e-4, "logits")


@NO_FREE_LENGTH
@rows("longhorn", "lmu-isa", "bst sh s4d")
def test_prefill_of_any_length(row, tmp_path):
    module, ids = _prefill(row)
    lengths = tuple({1: torch.export.Dim.DYNAMIC} for _ in ids)
    with torch.no_grad(), dispatch.backend("torch"):
        exported = _exported(module, ids, tmp_path, dynamic_shapes=(lengths,))
        for length in (9, 30, 70):
            other = tuple(tokens.repeat(1, 5)[:, :length] for tokens in ids)
            assert_near(exported(*other), module(*other), 1e-4, f"logits of {length} tokens")


STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole layers": ("llama", {"keep": [1], "attn_scale": 0.1}),
    "single groups": ("qwen3", {"keep": [(1, 0), (2, 1)]}),
    "first tokens": ("gemma3_text", {"keep": [3], "sink": "first_token"}),
    "windows alone": ("glm", {"sink": None}),
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", STUDENTS)
def test_students_of_attention_alone_take_any_rows_and_lengths(kind, exporter, tmp_path):
    """Traced with a row of several windows, which without a graph is cut into blocks."""
    name, plan = STUDENTS[kind]
    module = Prefill(student_of(teacher(name), window=8, **plan).float()).eval()
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), dispatch.backend("torch"):
        exported = EXPORTERS[exporter](module, (tokens(2, 27),), tmp_path, dynamic_shapes=((free,),))
        for shape in ((1, 2), (3, 9), (1, 70)):
            other = tokens(*shape, seed=1)
            assert_near(exported(other), module(other), 1e-4, f"logits of {shape}")


@rows("longhorn", "bst mf unstructured")
def test_prefill_of_any_batch_with_a_mask(row, tmp_path):
    """Rows that begin with padding, as many as there are."""
    model, batch = shallow_language_model(row), batch_of(row, rows=4)
    tokens = [batch["input_ids"], *([batch["labels"]] if model.config.is_encoder_decoder else [])]

    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        ids = tuple(x.repeat(2, 1)[:rows] for x in tokens)
        mask = torch.ones_like(ids[0])
        mask[1, :3] = 0
        return mask, *ids

    size = torch.export.Dim("size", min=2, max=64)
    shapes = ({0: size}, tuple({0: size} for _ in tokens))
    with torch.no_grad(), dispatch.backend("torch"):
        module = MaskedPrefill(model).eval()
        exported = _exported(module, inputs(4), tmp_path, dynamic_shapes=shapes)
        for rows in (2, 7):
            assert_near(exported(*inputs(rows)), module(*inputs(rows)), 1e-4, f"logits of {rows} rows")


@cells(
    {
        "export: one token": EVERY_FAMILY,
        "ONNX: one token": ("lmu-isa", "longhorn + window and full attention"),
    }
)
@NO_COMPLEX
def test_one_token(column, row, tmp_path):
    decoding = Decoding(row)
    with torch.no_grad(), dispatch.backend("torch"):
        decoding.check(decoding.module)
        exporter = EXPORTERS[column.split(":")[0]]
        decoding.check(exporter(decoding.module, decoding.inputs(), tmp_path, dynamic_shapes=decoding.shapes))


SOFTCAP = "student with a softcap"


@rows("longhorn", "student: groups", every=[*OF_ONE_STACK, SOFTCAP])
def test_one_token_in_executorch(row):
    exir, runtime = pytest.importorskip("executorch.exir"), pytest.importorskip("executorch.runtime")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    is_softcapped, texts = row == SOFTCAP, ids_of(4, 30).split(2)
    model = student_of(teacher("gemma2"), window=8, keep=[1]).float() if is_softcapped else own_language_model(row)
    # of a GELU that is approximated by tanh XNNPACK computes another one
    partitioners = [] if is_softcapped else [XnnpackPartitioner()]
    with torch.no_grad(), dispatch.backend("torch"):
        step = DecodingStep(model, rows=2, room=30)
        program = exir.to_edge_transform_and_lower(torch.export.export(step, step.example()), partitioner=partitioners)
        loaded = runtime.Runtime.get().load_program(program.to_executorch().buffer)
        method = loaded.load_method("forward")
        for text in texts:
            found = [
                method.execute([text[:, i : i + 1].contiguous(), torch.tensor([i])])[0].clone() for i in range(30)
            ]
            assert_near(torch.cat(found, 1), model(text).logits, 1e-4, "logits")
