"""Which form of the long convolution costs least on a GPU? Counted, not measured: flops and bytes by length.

For one output token of one channel, forward, with as many taps as tokens; the seconds are those of a data-centre
GPU's rates (`long_conv_costs.GPU`), where arithmetic and memory overlap.
"""

import argparse
from typing import Any

from long_conv_costs import GPU, Cost, cheapest, fft_cost, monarch_cost, toeplitz_cost
from timing import write_results

LENGTHS = [2**k for k in range(8, 17)]


def described(cost: Cost) -> dict[str, Any]:
    return {
        "flops": round(cost.matrix_flops + cost.flops),
        "bytes": round(cost.bytes),
        "picoseconds": round(1e12 * cost.seconds(), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    lengths = LENGTHS[::8] if parser.parse_args().quick else LENGTHS
    rows = {}
    for length in lengths:
        forms = {
            "Toeplitz, float32": toeplitz_cost(length, length),
            "Toeplitz, bfloat16": toeplitz_cost(length, length, is_coarse=True),
            "FFT": fft_cost(length, length),
            "Monarch": monarch_cost(length, length),
        }
        rows[str(length)] = {name: described(cost) for name, cost in forms.items()} | {
            "choice": {"float32": cheapest(length, length), "bfloat16": cheapest(length, length, is_coarse=True)}
        }
    write_results("long_conv_counts", {"rates": GPU._asdict(), "forms": list(forms), "by_length": rows})


if __name__ == "__main__":
    main()
