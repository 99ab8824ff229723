"""torch.compile: is a training step, a prefill and a decoding step one graph, and does it give the same numbers?"""

import copy

import torch
from transformers import EncoderDecoderCache, StaticCache

from tests.matrix.columns import Column, Group
from tests.matrix.rows import assert_near, batch_of, logits_of, model_of

# traces forward and backward into graphs of ATen operations, as the default backend does, and runs them as they are;
# inductor then takes up to minutes for each of these models on a CPU, hence its one column
TRACED = "aot_eager"


def training_step(row: str) -> None:
    model = model_of(row)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    model.train()
    compiled_model = copy.deepcopy(model)
    compiled = torch.compile(compiled_model, fullgraph=True, backend=TRACED)
    losses = [step(**batch_of(row), use_cache=False).loss for step in (model, compiled)]
    for loss in losses:
        loss.backward()
    assert_near(losses[1].detach(), losses[0].detach(), 1e-4, "loss")
    for (name, parameter), other in zip(model.named_parameters(), compiled_model.parameters()):
        if parameter.requires_grad and parameter.grad is not None:
            size = parameter.grad.abs().max()
            torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-3 * float(size) + 1e-6, msg=name)


def prefill(row: str, backend: str = TRACED) -> None:
    model = model_of(row)
    expected = logits_of(model, row)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        got = compiled(**batch_of(row), use_cache=False).logits
    assert_near(got, expected, 1e-4, "logits")


def one_token(row: str) -> None:
    """Two steps with a static cache, so that a second compilation would show."""
    model = model_of(row)
    expected = logits_of(model, row)
    fixed, name, ids = _decoding(model, row)
    first = ids.shape[1] - 2
    with torch.no_grad():
        cache = _static_cache(model, ids.shape[1])
        model(**fixed, **{name: ids[:, :first]}, past_key_values=cache, use_cache=True)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=TRACED)
        for column in range(first, ids.shape[1]):
            with torch.compiler.set_stance("default" if column == first else "fail_on_recompile"):
                got = compiled(**fixed, **{name: ids[:, column : column + 1]}, past_key_values=cache, use_cache=True)
            assert_near(got.logits[:, 0], expected[:, column], 1e-4, f"logits of token {column}")


def _decoding(model, row: str) -> tuple[dict, str, torch.Tensor]:
    """What stays the same over all steps, the name of the argument that takes tokens, and those tokens."""
    batch = batch_of(row)
    if not model.config.is_encoder_decoder:
        return {}, "input_ids", batch["input_ids"]
    with torch.no_grad():
        encoded = model.get_encoder()(batch["input_ids"])
    return (
        {"encoder_outputs": encoded},
        "decoder_input_ids",
        model.prepare_decoder_input_ids_from_labels(batch["labels"]),
    )


def _static_cache(model, length: int):
    config = model.config
    if not config.is_encoder_decoder:
        return StaticCache(config=config, max_cache_len=length)
    decoder = config.get_text_config(decoder=True)
    return EncoderDecoderCache(
        StaticCache(config=decoder, max_cache_len=length), StaticCache(config=decoder, max_cache_len=14)
    )


def prefill_by_inductor(row: str) -> None:
    prefill(row, "inductor")


GROUP = Group(
    "torch.compile",
    "`torch.compile(model, fullgraph=True)`, with the backend `aot_eager` (one graph, forward and backward) where the "
    "column does not say `inductor`. Training: the loss to 1e-4 and every gradient to 1e-3 of eager ones. Prefill and "
    "one token: the logits to 1e-4 of the largest; one token goes through a `StaticCache`, and the second step must "
    "not compile again.",
    tuple(
        Column(name, check, "torch")
        for name, check in (
            ("training step", training_step),
            ("prefill", prefill),
            ("one token", one_token),
            ("prefill, inductor", prefill_by_inductor),
        )
    ),
)
