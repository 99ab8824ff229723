"""Numbers stay finite and close: long recurrences, extreme inputs, few bits, great depth, a bad batch.

    python -m tests.reliability.numerics

Writes docs/reliability/numerics.md. Exits with 1 where a bound is broken.
"""

import sys
import time
from collections.abc import Callable, Iterator

import transformers

from tests.reliability.extremes import (
    CHOOSES,
    ERROR_BOUNDS,
    EXTREME_INPUTS,
    deep,
    forward_error,
    gradient_sizes,
    in_dtype,
    not_finite,
    spike,
    spread_over_layers,
    without_gradient,
)
from tests.reliability.population import COMBINATIONS, EVERY, build, class_with_loss
from tests.reliability.recurrences import (
    INPUTS,
    RECURRENCES,
    decoding_drift,
    drift,
    growth_fault,
    largest_by_decade,
)
from tests.reliability.reporting import table, write_page

TOKENS_IN_ALL = 1_000_000
DRIFT_AT = [1_000, 10_000, 100_000]
DECODED = 10_000
# float32 constants forget at a slightly wrong rate, the more so the longer a recurrence remembers
DRIFT_BOUND = 1e-3
LAYERS = 48
SPREAD_BOUND = 1e3
Row = tuple[list, bool]  # cells, and whether they are a fault


def boundedness() -> Iterator[Row]:
    for name, recurrence in RECURRENCES.items():
        for kind in INPUTS:
            found, memory = largest_by_decade(name, kind, TOKENS_IN_ALL), recurrence.memory()
            fault = growth_fault(found, memory)
            yield [name, kind, f"{memory:,.0f}", *(f"{state:.3g}" for state, _ in found), fault or "none"], bool(fault)


def drifts() -> Iterator[Row]:
    for name in RECURRENCES:
        for kind in INPUTS:
            errors = [*drift(name, kind, DRIFT_AT), decoding_drift(name, kind, DECODED)]
            yield [name, kind, *(f"{error:.1e}" for error in errors)], max(errors) > DRIFT_BOUND


def extreme_inputs() -> Iterator[Row]:
    """One row for each kind of input: forward passes, and what was not finite."""
    passes, faults = dict.fromkeys(EXTREME_INPUTS, 0), dict.fromkeys(EXTREME_INPUTS, "")
    for variant, class_name in COMBINATIONS:
        for dtype in ERROR_BOUNDS:
            model = in_dtype(build(variant, class_name), dtype)
            for kind in EXTREME_INPUTS:
                passes[kind] += 1
                if found := not_finite(model, kind):
                    faults[kind] += f"{variant} {class_name} {dtype}: {', '.join(found[:3])}; "
    for kind in EXTREME_INPUTS:
        yield [kind, passes[kind], faults[kind] or "none"], bool(faults[kind])


def few_bits() -> Iterator[Row]:
    for variant in EVERY:
        name = class_with_loss(variant)
        errors = {dtype: forward_error(variant, name, dtype) for dtype in ERROR_BOUNDS}
        broken = any(errors[dtype] > bound for dtype, bound in ERROR_BOUNDS.items()) and variant != CHOOSES
        yield [variant, name, *(f"{error:.1e}" for error in errors.values())], broken


def depth() -> Iterator[Row]:
    for variant in EVERY:
        sizes = gradient_sizes(deep(variant, LAYERS))
        dead, spread = without_gradient(sizes), spread_over_layers(sizes)
        yield [variant, len(sizes), ", ".join(dead) or "none", f"{spread:.1f}"], bool(dead) or spread > SPREAD_BOUND


def bad_batches() -> Iterator[Row]:
    for variant in EVERY:
        found = spike(variant)
        losses = [f"{loss:.2f}" for loss in (found.before, found.at, found.after)]
        yield [variant, *losses, "yes" if found.recovered else "no"], not found.recovered


def collect(measure: Callable[[], Iterator[Row]]) -> tuple[list[list], int]:
    """The rows of a table, and how many of them are faults."""
    start, rows, faults = time.monotonic(), [], 0
    for cells, is_fault in measure():
        rows.append(cells)
        faults += is_fault
        print("FAULT" if is_fault else "", *cells, flush=True)
    print(f"{measure.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    return rows, faults


def main() -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    measures = (boundedness, drifts, extreme_inputs, few_bits, depth, bad_batches)
    found = {measure.__name__: collect(measure) for measure in measures}
    rows = {name: rows for name, (rows, _) in found.items()}
    faults = {name: count for name, (_, count) in found.items()}
    decades = [f"to 1e{power}" for power in range(1, len(str(TOKENS_IN_ALL)))]
    bits = ", ".join(f"{bound:g} in {str(dtype).removeprefix('torch.')}" for dtype, bound in ERROR_BOUNDS.items())
    write_page(
        "numerics",
        "Finite and close",
        f"`make numerics`, on CPU. Bounds broken: {', '.join(f'{name} {count}' for name, count in faults.items())}.",
        f"## The state over {TOKENS_IN_ALL:,} tokens",
        "Each recurrence alone, in float32, in pieces with the state handed on: the largest |state| in each decade of "
        "tokens. *Memory* is 1 / (1 - |largest eigenvalue|) tokens (for Longhorn, by its mean step); only for as long "
        "may a state still grow. Some have parameters that training would have to push far.",
        table(["recurrence", "input", "memory", *decades, "fault"], rows["boundedness"]),
        "## Drift of the float32 state",
        "Largest difference from the float64 state, over the largest |float64 state|, after so many tokens of the "
        f"same input, in pieces; and token by token, as in decoding, after {DECODED:,}. Bound: {DRIFT_BOUND:g}. In "
        "pieces, powers of a decay are taken in float64 and rounded once for a block, where steps round it at each "
        "token: hence the last column is often the larger.",
        table(["recurrence", "input", *(f"{at:,}" for at in DRIFT_AT), "by steps"], rows["drifts"]),
        "## Extreme inputs",
        "All classes and variants, tiny, in float32, bfloat16 and float16: outputs finite, and (but in float16) the "
        "gradients of every parameter too.",
        table(["input", "forward passes", "not finite"], rows["extreme_inputs"]),
        "## Few bits",
        f"Largest difference from the float64 model's output, over its largest value. Bounds: {bits}. "
        f'"{CHOOSES}" is measured without a bound: which old states it retrieves is a choice, and a rounding can make '
        "another one.",
        table(["variant", "class", "float32", "bfloat16", "float16"], rows["few_bits"]),
        f"## Gradients through {LAYERS} layers at initialisation",
        "Every parameter's gradient must be finite and not zero, but for biases without effect on the loss (of keys, "
        "which a softmax takes away, and of the collapse of LMU-ISA, which the LayerNorms take away). *Spread* is the "
        f"largest layer's gradient over the smallest's; bound {SPREAD_BOUND:g}.",
        table(["variant", "parameters", "zero or not finite", "spread"], rows["depth"]),
        "## A batch of random tokens in the middle of training",
        "Mean loss of ten steps before, the loss of the batch, and the mean of steps 11 to 20 behind it, on rows of "
        "period 3 with AdamW and gradients clipped at 1. (A classifier gets a batch of wrong labels.) Where the loss "
        "before is about 2.3, the logarithm of the 10 tokens in use, the model had not found the period yet, and only "
        "the return to this level is seen.",
        table(["variant", "before", "at the batch", "behind", "recovered"], rows["bad_batches"]),
    )
    return 1 if sum(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
