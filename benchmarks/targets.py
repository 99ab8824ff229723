"""Is each of the project's targets of speed met? Reads the results, measures nothing.

python benchmarks/targets.py            # every target, the figure, met or not
python benchmarks/targets.py --commands # the commands that make the figures
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COMMANDS = (
    "python benchmarks/run.py longhorn_scan decoding training start_up",
    "python benchmarks/run.py longhorn_training local_attention spade_ssm_cost bst_layer lmu_isa",
    "python benchmarks/lmu_isa.py --forms",
    "python benchmarks/cpu_kernels.py",
)
SHARE = ("decoding", "weights_limit", "share")
PEERS = ("longhorn_training", "training_step", "longhorn_native_times_as_fast")
BST = ("bst_layer", "layer", "forward")
GPT2 = ("lmu_isa", "training_step_of_one_row", "lmu_isa_times_as_fast_as_gpt2")
Figures = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """
    Args:
        name: what is measured.
        relation: "<=" or ">=".
        wanted: the limit.
        path: the file of results, and keys down to the figure.
        of: makes a number of what is found there.
        limit: keys, after the file, down to what the bare matrix products of the same weights took in the same run:
            the figure cannot be better than that.
    """

    name: str
    relation: str
    wanted: float
    path: tuple[str, ...]
    of: Callable[[Any], float | None] = float
    limit: tuple[str, ...] = ()

    def found(self) -> float | None:
        """The figure; None where it has not been measured."""
        return _figure(self.path, self.of)

    def limit_found(self) -> float | None:
        return _figure((self.path[0], *self.limit)) if self.limit else None

    def met(self) -> bool | None:
        found = self.found()
        if found is None:
            return None
        return found <= self.wanted if self.relation == "<=" else found >= self.wanted


def _figure(path: tuple[str, ...], of: Callable[[Any], float | None] = float) -> float | None:
    file = RESULTS / f"{path[0]}.json"
    if not file.is_file():
        return None
    value = json.loads(file.read_text(encoding="utf-8"))
    for key in path[1:]:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return of(value)


def _decoding(name: str, wanted: float) -> Target:
    path, limit = ("decoding", "families", "time_over_llama", name), ("families", "products_over_llama", name)
    return Target(f"decoding, width 512: {name}'s time over Llama's", "<=", wanted, path, limit=limit)


def _step(name: str, wanted: float) -> Target:
    path = ("training", "against_llama", "times_as_fast_as_llama", name)
    limit = ("against_llama", "products_times_as_fast_as_llama", name)
    return Target(f"step of 1024 tokens, width 512: {name}, times Llama", ">=", wanted, path, limit=limit)


def _memory(peaks: Figures) -> float:
    return max(peak["longhorn"] / peak["llama"] for peak in peaks.values())


def _added(steps: Figures) -> float:
    return max(step["added_percent"] for step in steps.values())


def _best_but_fft(speeds: Figures) -> float:
    return max(speed for form, speed in speeds.items() if form != "fft")


def _least_share(rates: Figures) -> float:
    return min(found["share"] for found in rates.values())


def _slowest(forwards: Figures) -> float:
    return max(times["first"] for times in forwards.values())


def _pairs(levels: Figures, *wanted: str) -> list[tuple[dict[str, float], ...]]:
    """A tuple of milliseconds by backend for each case and direction: one of each of these instruction sets."""
    first = levels[wanted[0]]
    return [tuple(levels[level][case][kind] for level in wanted) for case in first for kind in first[case]]


def _over_torch(levels: Figures) -> float:
    times = [pair[0] for level, found in levels.items() if found for pair in _pairs(levels, level)]
    return max(each["native"] / each["torch"] for each in times)


def _avx2_over_avx512(levels: Figures) -> float | None:
    if not levels["avx512"]:  # the processor does not have it
        return None
    return max(narrow["native"] / wide["native"] for narrow, wide in _pairs(levels, "avx2", "avx512"))


TARGETS = (
    Target("Longhorn step, times compiled Mamba", ">=", 2, (*PEERS, "mamba compiled, associative scan")),
    Target("Longhorn step, times eager Mamba", ">=", 20, (*PEERS, "mamba eager")),
    Target(
        "Longhorn forward, thousand tokens/s", ">=", 100, ("longhorn_training", "forward", "tokens_per_second"),
        lambda tokens: tokens / 1000,
    ),
    Target("memory of a step, share of Llama's", "<=", 2, ("longhorn_training", "peak_megabytes_of_a_step"), _memory),
    Target("scan, share of a layer's time", "<=", 0.15, ("longhorn_scan", "share_of_the_block", "share")),
    Target("scan forward, times the copy", "<=", 3, ("longhorn_scan", "forward", "C_times_the_copy")),
    Target("scan forward at 16,384, times the copy", "<=", 3, ("longhorn_scan", "long", "forward_times_the_copy")),
    Target(
        "scan with backward at 16,384, times the copy", "<=", 6,
        ("longhorn_scan", "long", "forward_and_backward_times_the_copy"),
    ),
    Target("scan forward, times torch", ">=", 20, ("longhorn_scan", "forward", "C_times_as_fast_as_torch")),
    Target(
        "scan with backward, times torch", ">=", 8,
        ("longhorn_scan", "forward_and_backward", "C_times_as_fast_as_torch"),
    ),
    Target("decoding, times Mamba", ">=", 2, ("decoding", "longhorn_times_as_fast_as_mamba")),
    Target(
        "decoding, share of the matrix products' speed", ">=", 0.7, ("decoding", "share_of_the_matrix_product_limit")
    ),
    _decoding("SPADE", 1.0),
    _decoding("BST sliding", 1.0),
    _decoding("BST SH", 1.3),
    _decoding("BST MF", 1.3),
    _decoding("Block-Recurrent", 1.6),
    _decoding("LMU-ISA", 1.0),
    _decoding("Longhorn", 0.8),
    Target("decoding, width 1024: Longhorn's share of the weights' limit", ">=", 0.85, (*SHARE, "Longhorn")),
    Target("decoding, width 1024: BST SH's share of the weights' limit", ">=", 0.65, (*SHARE, "BST SH")),
    Target("decoding, width 1024: SPADE's share of the weights' limit", ">=", 0.65, (*SHARE, "SPADE")),
    _step("SPADE", 1.5),
    _step("BST sliding", 1.3),
    _step("BST SH", 1.1),
    _step("Longhorn", 1.2),
    Target(
        "step of 4096 tokens: BST SH, times the time of sliding attention", "<=", 1.6,
        ("training", "context_states", "sh_time_over_sliding"),
    ),
    Target("window attention, exponent", "<=", 1.1, ("local_attention", "exponent")),
    Target(
        "window attention, times masked at 4096", ">=", 5,
        ("local_attention", "times_as_fast_as_masked_full_attention", "4096"),
    ),
    Target(
        "window attention, times masked at 16384", ">=", 15,
        ("local_attention", "times_as_fast_as_masked_full_attention", "16384"),
    ),
    Target(
        "window attention, times LongT5's at 4096", ">=", 2,
        ("local_attention", "times_as_fast_as_longt5_local_attention_two_sided", "4096"),
    ),
    Target(
        "S4 in SPADE's bottom layer, added percent of a step", "<=", 15, ("spade_ssm_cost", "training_step"), _added
    ),
    Target("SPADE's prefill in pieces, times in one", "<=", 1.3, ("spade_ssm_cost", "prefill", "pieces_to_whole")),
    Target(
        "BST SH at 4096, times a Block-Recurrent layer", ">=", 10,
        (*BST, "SH_times_as_fast_as_block_recurrent_at_4096"),
    ),
    Target(
        "BST SH at 4096, times the time of sliding attention", "<=", 2,
        (*BST, "SH_times_the_time_of_sliding_attention_at_4096"),
    ),
    Target("BST MF at 4096, times the time of SH", "<=", 1.3, (*BST, "MF_times_the_time_of_SH_at_4096")),
    Target(
        "LMU-ISA step, times its FFT form", ">=", 1.5, ("lmu_isa", "training_step_at_1024", "times_as_fast_as_fft")
    ),
    Target(
        "LMU-ISA memory, share of the FFT form's", "<=", 0.25,
        ("lmu_isa", "training_step_at_1024", "share_of_the_memory_of_fft"),
    ),
    Target("LMU-ISA exponent", "<=", 1.1, ("lmu_isa", "training_step_of_one_row", "exponent")),
    Target("LMU-ISA, times GPT-2 at 1024", ">=", 0.5, (*GPT2, "1024")),
    Target("LMU-ISA, times GPT-2 at 8192", ">=", 1, (*GPT2, "8192")),
    Target(
        "LMU-ISA step, tokens/s: twice the 843 before its kernels", ">=", 1686,
        ("lmu_isa", "training_step_at_1024", "tokens_per_second"), _best_but_fft,
    ),
    Target(
        "LMU-ISA's matrix products, share of one product's rate", ">=", 0.85,
        ("lmu_isa_forms", "matrix_products", "gigaflops"), _least_share,
    ),
    Target(
        "C kernels over torch, slowest of all instruction sets", "<=", 1, ("cpu_kernels", "milliseconds"), _over_torch
    ),
    Target(
        "C kernels with AVX2 over AVX-512, slowest", "<=", 2.2, ("cpu_kernels", "milliseconds"), _avx2_over_avx512
    ),
    Target("slowest first forward, kernels compiled, seconds", "<=", 1, ("start_up", "first forward"), _slowest),
)  # fmt: skip


def rows() -> list[list[str]]:
    """name, wanted, measured, met, what the products alone allow: the cells of a table."""
    found = []
    for target in TARGETS:
        value, met, limit = target.found(), target.met(), target.limit_found()
        wanted = f"{'at most' if target.relation == '<=' else 'at least'} {target.wanted:g}"
        figure = "not measured" if value is None else f"{value:.3g}"
        found.append([target.name, wanted, figure, {None: "", True: "yes", False: "no"}[met]])
        found[-1].append("" if limit is None else f"{limit:.3g}")
    return found


def sources() -> list[str]:
    """The files of results, in the order of the targets."""
    return [
        name for name in dict.fromkeys(target.path[0] for target in TARGETS) if (RESULTS / f"{name}.json").is_file()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", action="store_true", help="the commands that make the figures")
    if parser.parse_args().commands:
        print("\n".join(COMMANDS))
        return
    cells = rows()
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    judged = [target.met() for target in TARGETS]
    print(f"{judged.count(True)} met, {judged.count(False)} missed, {judged.count(None)} not measured")


if __name__ == "__main__":
    main()
