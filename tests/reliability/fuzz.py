"""Random configurations and random damage to checkpoint files.

    python -m tests.reliability.fuzz --configs 300 --files 500

Writes docs/reliability/fuzz.md. Exits with 1 if something went wrong; every case is repeated by its seed.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from transformers.utils import logging

from tests.reliability.fuzzing.configurations import broken_case, crossed_case, legal_case
from tests.reliability.fuzzing.drawing import BROKEN, FAMILIES
from tests.reliability.fuzzing.files import DAMAGES, file_case
from tests.reliability.reporting import table, write_page


def quiet() -> None:
    """transformers tells of every damaged file; here that is the purpose."""
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def fuzz_configurations(count: int, seed: int) -> tuple[Counter, Counter, Counter, list[str]]:
    """`count` legal, `count` crossed and `count` broken configurations, the families in turn: (class → legal ones that
    live, (family, outcome) → crossed ones, family → broken ones refused by name, faults)."""
    lived: Counter = Counter()
    crossed: Counter = Counter()
    refused: Counter = Counter()
    faults = []
    for index in range(count):
        model_type = list(FAMILIES)[index % len(FAMILIES)]
        case = f"{seed}-{index}"
        with tempfile.TemporaryDirectory() as folder:
            name, fault = legal_case(model_type, case, Path(folder))
        if fault:
            faults.append(f"legal {model_type} {case}: {fault}")
        else:
            lived[name] += 1
        with tempfile.TemporaryDirectory() as folder:
            outcome, fault = crossed_case(model_type, case, Path(folder))
        if fault:
            faults.append(f"crossed {model_type} {case}: {fault}")
        else:
            crossed[model_type, outcome] += 1
        field, fault = broken_case(model_type, case)
        if fault:
            faults.append(f"broken {model_type} {case} ({field}): {fault}")
        else:
            refused[model_type] += 1
    return lived, crossed, refused, faults


def fuzz_files(count: int, seed: int) -> tuple[Counter, list[str]]:
    """`count` damaged folders: ((damage, outcome) → number, faults)."""
    outcomes: Counter = Counter()
    faults = []
    for index in range(count):
        with tempfile.TemporaryDirectory() as folder:
            damage, outcome, fault = file_case(f"{seed}-{index}", Path(folder))
        outcomes[damage, outcome] += 1
        if fault:
            faults.append(f"files {seed}-{index}: {fault}")
    return outcomes, faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Random configurations and damaged checkpoint files.")
    parser.add_argument("--configs", type=int, default=300, help="legal ones, and as many crossed and broken ones")
    parser.add_argument("--files", type=int, default=500, help="damaged checkpoint folders")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet()
    begin = time.perf_counter()
    lived, crossed, refused, faults = fuzz_configurations(options.configs, options.seed)
    outcomes, file_faults = fuzz_files(options.files, options.seed)
    faults += file_faults
    print("\n".join(faults) or "nothing went wrong")
    kinds = sorted({outcome for _, outcome in outcomes})
    write_page(
        "fuzz",
        "Random configurations, damaged files",
        f"`python -m tests.reliability.fuzz --configs {options.configs} --files {options.files} "
        f"--seed {options.seed}`, {time.perf_counter() - begin:.0f} seconds. Faults: {len(faults)}.",
        "## Legal configurations",
        f"{options.configs} drawn by construction over the families in turn. Each must build, train a step with a "
        "finite loss and finite gradients, generate three tokens where it can, and come back from its folder with "
        "every tensor and every logit bit-equal.",
        table(["class", "lived"], sorted(lived.items())),
        "## Crossed configurations",
        f"{options.configs} whose fields come from one or the other of two legal ones and may contradict each other. "
        "Each must live as above, or be refused by an exception that names a field, no later than when the model "
        "is built.",
        table(
            ["family", "lived", "refused"],
            ([family, crossed[family, "lived"], crossed[family, "refused"]] for family in FAMILIES),
        ),
        "## Broken configurations",
        f"{options.configs} legal ones with one field broken "
        f"({sum(len(fields) for fields in BROKEN.values())} fields over the families). Each must be refused with a "
        "`ValueError` or a `StrictDataclassError` that names the field.",
        table(["family", "refused by name"], sorted(refused.items())),
        "## Damaged checkpoint folders",
        f"{options.files} folders, {len(DAMAGES)} kinds of damage. Right are an exception of a clear type, or a model "
        "whose every tensor equals what its files say, where the loading report names what is missing or unexpected. "
        "An `AttributeError`, `KeyError`, `TypeError` and the like raised by this package is a fault; by a dependency "
        "it is counted apart. `hf_hybrid_ssm.hub.check_folder` must find a folder whole or raise a `ValueError`, and "
        "must find every fault for which safetensors refuses to load. Nothing that a file wants executed may be "
        "executed: a pickle whose unpickling would write a file is among the damages.",
        table(
            ["damage", *kinds],
            ([damage, *(outcomes[damage, kind] for kind in kinds)] for damage in sorted({d for d, _ in outcomes})),
        ),
        "Not covered: a `config.json` that asks for a very large model gets one, as in all of transformers.",
        *(["## Faults", table(["fault"], [[fault] for fault in faults])] if faults else []),
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
