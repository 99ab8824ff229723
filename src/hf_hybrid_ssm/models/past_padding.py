"""Which columns of the past were padding, in one number a row: what a mask over them says later must be the same.

A state has read what was called text and has passed over what was called padding, and neither can be undone. Keeping
the columns themselves would grow with the text. The number is the sum over the padded columns of a hash of each,
modulo 2^64: 0 where there was none, whatever pieces the text was read in.
"""

import torch

from hf_hybrid_ssm.ops.core.checks import can_read_values

MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd, as signed 64-bit integers


def signature(padded: torch.Tensor, first: int | torch.Tensor = 0) -> torch.Tensor:
    """(B, L) bool, where True is padding, of the columns from `first` on → (B,) int64."""
    columns = torch.arange(1, padded.shape[1] + 1, device=padded.device) + first
    hashed = columns * MULTIPLIERS[0]
    hashed = (hashed ^ (hashed >> 31)) * MULTIPLIERS[1]
    return torch.where(padded, hashed ^ (hashed >> 29), 0).sum(1)


def check_past(mask: torch.Tensor, length: int, known: torch.Tensor | None, name: str) -> None:
    """A mask (B, past + L) that covers the past must call the same columns padding as the forwards that read them.

    Args:
        known: (B,) int64, the `signature` of the padding that was read; None where there was none.

    Raises:
        ValueError: it does not; on an accelerator, where values are not read, an assertion of the device.
    """
    if mask.shape[1] <= length or mask.is_meta or torch.compiler.is_compiling():
        return
    padded = mask[:, : mask.shape[1] - length] == 0
    differs = padded.any(1) if known is None else signature(padded) != known
    message = (
        f"{name} calls other columns of the past padding than the forwards that read them: states cannot forget "
        "what they read, nor read what they passed over. Give the mask that the tokens were read with (0 for what "
        "`generate` appends after a row's end), or use a new cache."
    )
    if not can_read_values(differs):
        torch._assert_async(~differs.any(), message)
    elif bool(differs.any()):
        raise ValueError(f"row {int(differs.to(torch.uint8).argmax())} of {message}")


def check_columns_are_known(known: torch.Tensor | None, name: str) -> None:
    """
    Raises:
        ValueError: there was padding, and layers that attend to single columns were not told where.
    """
    if known is None or known.is_meta or torch.compiler.is_compiling():
        return
    message = f"the cache holds padding, and it is not known where: give an {name} of all tokens so far."
    if not can_read_values(known):
        torch._assert_async((known == 0).all(), message)
    elif bool(known.any()):
        raise ValueError(message)
