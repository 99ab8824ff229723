"""torch.export and ONNX

Through a file, with the plain torch implementations; the logits to 1e-4 of the largest. The prefill is for one length;
the graph for any length is made from 14 tokens and asked for 9 and for 30. One token is a graph from the token, the
position and the states as tensors to the logits and the states after it, run three times in a row on what it returned.
ONNX graphs run in ONNX Runtime; Longhorn's prefill is exported there from its reference, step by step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_hybrid_ssm.models.cache import STATE_LAYER_TYPE, RecurrentStateLayer
from hf_hybrid_ssm.ops._core import dispatch
from tests.matrix.checks import assert_near, rows
from tests.tiny_models import batch_of, language_model

NO_FREE_LENGTH = pytest.mark.limit(
    "torch",
    r"Guard failed: ids_\d\.size|specialized it to be a constant",
    "an exported graph holds for lengths that take the same branches, and these layers choose block and transform "
    "sizes by the length. Export a graph for each length in use, or decode by the graph of one token.",
)
NO_AUTOCAST = pytest.mark.limit(
    "torch",
    "wrap_with_autocast is missing val field",
    "with a free length its exporter loses what it knows of a region where autocast is switched off, as the Legendre "
    "memory does to stay in float32. Export a graph for each length in use.",
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


class Step(torch.nn.Module):
    """One token (B, 1), the number of tokens before it, and the states → logits (B, 1, V) and the states after it.

    A cache is not a tensor, and the exporters know only those of transformers: the states come as plain tensors, are
    put into a cache, and those after it are returned, as a runtime without Python has to do too.
    """

    def __init__(self, model: PreTrainedModel, names: list[tuple[str, ...]]):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, token: torch.Tensor, seen: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.model.config.is_encoder_decoder:
            cache = self._cache(seen, list(states))
            logits = self.model(token, past_key_values=cache, position_ids=self._positions(token, seen)).logits
            return [logits, *states_of(cache)]
        half = len(self.names) // 2
        encoded, first = states[0], 1 + sum(len(names) for names in self.names[:half])
        cache = EncoderDecoderCache(
            self._cache(seen, list(states[1:first]), self.names[:half]),
            self._cache(encoded.shape[1], list(states[first:]), self.names[half:]),
        )
        cache.is_updated = dict.fromkeys(range(half), True)
        encoder_outputs = BaseModelOutput(last_hidden_state=encoded)
        logits = self.model(
            encoder_outputs=encoder_outputs, decoder_input_ids=token, past_key_values=cache, use_cache=True
        ).logits
        return [logits, encoded, *states_of(cache)]

    def _positions(self, token: torch.Tensor, seen: torch.Tensor) -> torch.Tensor | None:
        """Only layers with rotary positions ask for them."""
        return (
            None
            if all(layer_type == STATE_LAYER_TYPE for layer_type in self.model.config.layer_types)
            else (torch.zeros_like(token) + seen)
        )

    def _cache(self, seen: torch.Tensor | int, states: list[torch.Tensor], names=None) -> Cache:
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        for layer, layer_names in zip(cache.layers, names or self.names):
            values = [states.pop(0) for _ in layer_names]
            if isinstance(layer, RecurrentStateLayer):
                layer.states = dict(zip(layer_names, values))
                layer.seen_tokens = seen + 0
                layer.is_initialized, layer.device = True, values[0].device
            else:
                layer.update(*values)
        return cache


def _layers(cache: Cache) -> list:
    if isinstance(cache, EncoderDecoderCache):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def names_of(cache: Cache) -> list[tuple[str, ...]]:
    return [tuple(x.states) if isinstance(x, RecurrentStateLayer) else ("keys", "values") for x in _layers(cache)]


def states_of(cache: Cache) -> list[torch.Tensor]:
    return [
        state
        for x in _layers(cache)
        for state in (x.states.values() if isinstance(x, RecurrentStateLayer) else (x.keys, x.values))
    ]


def _prefill(row: str) -> tuple[Prefill, tuple[torch.Tensor, ...]]:
    model, batch = language_model(row), batch_of(row)
    return Prefill(model).eval(), tuple(batch.values()) if model.config.is_encoder_decoder else (batch["input_ids"],)


class Decoding:
    """A step to export, its inputs after a prefill, and the logits to expect of it."""

    def __init__(self, row: str, steps: int = 3):
        model, ids = _prefill(row)
        tokens = ids[-1]
        first = tokens.shape[1] - steps
        self.tokens = [tokens[:, column : column + 1] for column in range(first, tokens.shape[1])]
        with torch.no_grad():
            self.logits = model(*ids)[:, first:].unbind(1)
            if len(ids) == 1:
                out = model.model(tokens[:, :first], use_cache=True)
                fixed = []
            else:
                out = model.model(ids[0], decoder_input_ids=tokens[:, :first], use_cache=True)
                fixed = [out.encoder_last_hidden_state]
            self.seen = torch.tensor(first)
            self.states = [state.clone() for state in (*fixed, *states_of(out.past_key_values))]
            self.module = Step(model.model, names_of(out.past_key_values)).eval()
            _, *after = self.module(*self.inputs())
        self.grows = [new.shape != old.shape for new, old in zip(after, self.states)]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        return self.tokens[0], self.seen, self.states

    def check(self, step: Callable[..., list[torch.Tensor]]) -> None:
        """Every step from the states that the one before returned."""
        states = self.states
        for count, (token, expected) in enumerate(zip(self.tokens, self.logits)):
            logits, *states = step(token, self.seen + count, states)
            assert_near(logits[:, 0], expected, 1e-4, f"logits of step {count}")


@rows("longhorn")
def test_export_prefill(row, tmp_path):
    module, ids = _prefill(row)
    with torch.no_grad(), dispatch.backend("torch"):
        expected = module(*ids)
        exported = _through_a_file(torch.export.export(module, ids), tmp_path)
        assert_near(exported(*ids), expected, 1e-4, "logits")


@NO_FREE_LENGTH
@NO_AUTOCAST
@rows()
def test_export_prefill_of_any_length(row, tmp_path):
    module, ids = _prefill(row)
    lengths = [{1: torch.export.Dim.DYNAMIC} for _ in ids]
    with torch.no_grad(), dispatch.backend("torch"):
        exported = _through_a_file(torch.export.export(module, ids, dynamic_shapes=(tuple(lengths),)), tmp_path)
        for length in (9, 30):
            other = tuple(tokens.repeat(1, 5)[:, :length] for tokens in ids)
            assert_near(exported(*other), module(*other), 1e-4, f"logits of {length} tokens")


@rows("lmu-isa")
def test_export_one_token(row, tmp_path):
    decoding = Decoding(row)
    with torch.no_grad(), dispatch.backend("torch"):
        decoding.check(decoding.module)
        exported = torch.export.export(decoding.module, decoding.inputs(), dynamic_shapes=_growing(decoding))
        decoding.check(_through_a_file(exported, tmp_path))


def _growing(decoding: Decoding) -> tuple[None, None, list]:
    """Keys and values of full attention grow from step to step; nothing else does."""
    return None, None, [{2: torch.export.Dim.DYNAMIC} if grows else None for grows in decoding.grows]


def _through_a_file(exported: torch.export.ExportedProgram, folder: Path) -> Callable[..., Any]:
    torch.export.save(exported, folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()


@NO_COMPLEX
@rows("lmu-isa")
def test_onnx_prefill(row):
    module, ids = _prefill(row)
    # Longhorn's vectorised scan is an op of this package, which ONNX cannot know; the reference is plain steps
    backend = "reference" if module.model.config.model_type == "longhorn" else "torch"
    with torch.no_grad(), dispatch.backend(backend):
        assert_near(_onnx_runtime(module, ids)(*ids)[0], module(*ids), 1e-4, "logits")


@NO_COMPLEX
@rows()
def test_onnx_one_token(row):
    decoding = Decoding(row)
    with torch.no_grad(), dispatch.backend("torch"):
        run = _onnx_runtime(decoding.module, decoding.inputs(), dynamic_shapes=_growing(decoding))
    decoding.check(run)


def _onnx_runtime(module: torch.nn.Module, inputs: tuple, **options: Any) -> Callable[..., list[torch.Tensor]]:
    """The exported model as a function of tensors (and lists of them), run by ONNX Runtime."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())

    def run(*arguments: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        flat = [x for argument in arguments for x in (argument if isinstance(argument, list) else [argument])]
        names = [x.name for x in session.get_inputs()]
        assert len(names) == len(flat), f"{len(names)} inputs of the graph for {len(flat)} tensors"
        return [torch.from_numpy(x) for x in session.run(None, {k: x.numpy() for k, x in zip(names, flat)})]

    return run
