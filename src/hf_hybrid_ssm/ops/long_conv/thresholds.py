"""Up to where each form of the long convolution is used; `benchmarks/long_conv_costs.py` counts what each costs."""

import math

DIRECT = 16  # taps, up to which the sum tap by tap is a few fused operations
TILE = 64  # tokens of a Toeplitz tile
FLOAT32_TILES, BFLOAT16_TILES = 8.5, 24.0
"""Toeplitz tiles for each block of outputs, up to which their products on a GPU cost less than an FFT."""


def mean_tiles(length: int, taps: int, future: int = 0) -> float:
    """Tiles that the taps of the past and of the future reach, on average over the row's blocks."""
    blocks = math.ceil(length / TILE)
    back, ahead = min(math.ceil((taps - 1) / TILE) + 1, blocks), min(math.ceil(future / TILE), blocks - 1)
    return (back * (2 * blocks - back + 1) + ahead * (2 * blocks - ahead - 1)) / (2 * blocks)


def prefers_toeplitz(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> bool:
    """Whether products with Toeplitz tiles cost less than an FFT, or than few taps one by one."""
    return taps + future > DIRECT and mean_tiles(length, taps, future) <= (
        BFLOAT16_TILES if is_coarse else FLOAT32_TILES
    )
