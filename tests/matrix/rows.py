"""The rows of the matrix: language models of every family, tiny, and what to feed them."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import hf_hybrid_ssm  # noqa: F401  (registers the families)
from tests.invariants.variants import SPADE, TOKENS, VARIANTS

SEQ2SEQ = {**SPADE, "num_decoder_layers": 2, "max_target_positions": 64}
# row → model type, fields of its configuration
ROWS: dict[str, tuple[str, dict]] = {
    "Longhorn": VARIANTS["longhorn"],
    "Longhorn, window and full attention": VARIANTS["longhorn + window and full attention"],
    "BST, S4D": VARIANTS["bst sh s4d"],
    "BST, S4, context by head": VARIANTS["bst mh s4"],
    "BST, free filter": VARIANTS["bst mf unstructured"],
    "LMU-ISA": VARIANTS["lmu-isa"],
    "LMU-ISA, full attention": VARIANTS["lmu-isa + global attention"],
    "SPADE, S4": VARIANTS["spade s4 window"],
    "SPADE, Hyena": VARIANTS["spade hyena full"],
    "SPADE encoder-decoder": ("spade_seq2seq", SEQ2SEQ),
}
# widths that hold whole groups of quantized weights, by model type
WIDER: dict[str, dict] = {
    "longhorn": {"hidden_size": 128, "state_size": 12},
    "bst": {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256},
    "lmu_isa": {"hidden_size": 128, "pre_intermediate_size": 256, "post_intermediate_size": 256},
    "spade": {"hidden_size": 128, "intermediate_size": 256},
    "spade_seq2seq": {"hidden_size": 128, "intermediate_size": 256},
}
GREEDY = {"pad_token_id": 0, "do_sample": False}


@cache
def _model(row: str, wide: bool = False) -> PreTrainedModel:
    model_type, fields = ROWS[row]
    config = AutoConfig.for_model(model_type, **{**TOKENS, **fields, **(WIDER[model_type] if wide else {})})
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    # away from the smooth initial point; a decoder hears its encoder through maps that start near nothing
    scale = 6.0 if config.is_encoder_decoder else 1.5
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and parameter.requires_grad and ".ssm." not in name:
            parameter.data.mul_(scale)
    return model


def model_of(row: str, wide: bool = False) -> PreTrainedModel:
    """A language model of its own for each caller, in evaluation mode; tiny, or of the widths `WIDER`."""
    return copy.deepcopy(_model(row, wide))


def batch_of(row: str, rows: int = 2, length: int = 14) -> dict[str, torch.Tensor]:
    """Token ids and labels; an encoder-decoder's target is shorter than its source."""
    ids = torch.randint(3, TOKENS["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids[:, :6] if _model(row).config.is_encoder_decoder else ids}


def logits_of(model: torch.nn.Module, row: str) -> torch.Tensor:
    """(B, L, V) of the row's batch, without gradient and without touching the loss's shortcuts."""
    with torch.no_grad():
        return model(**batch_of(row)).logits


def loss_before_and_after(model: torch.nn.Module, row: str, steps: int, learning_rate: float) -> tuple[float, float]:
    """A few AdamW steps on one batch, over whatever is trainable; both losses are taken without dropout."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    with torch.no_grad():
        before = model.eval()(**batch_of(row)).loss.item()
    model.train()
    for _ in range(steps):
        model(**batch_of(row)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return before, model.eval()(**batch_of(row)).loss.item()


@contextmanager
def saved(model: PreTrainedModel) -> Iterator[str]:
    """A folder with the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield folder


def check_generation(model: torch.nn.Module, row: str, new_tokens: int = 4) -> torch.Tensor:
    """Greedy tokens, (B, n); they must be the same with and without the cache."""
    ids = batch_of(row)["input_ids"]
    length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    texts = [model.generate(input_ids=ids, use_cache=cached, **length, **GREEDY) for cached in (True, False)]
    assert texts[0].tolist() == texts[1].tolist(), "the cache changes the generated tokens"
    assert texts[0].shape[1] >= new_tokens, f"generated {tuple(texts[0].shape)}"
    return texts[0]


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference, in units of the largest expected logit."""
    error = ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    assert error <= tolerance, f"{what}: largest difference {error:.1e} of the largest logit, allowed {tolerance:.0e}"
