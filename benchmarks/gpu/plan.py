"""The plan of a run on a card: its parts in order, and what each case is about.

All of it is known before anything heavy is imported.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 530  # so long a call lasts by default
LONGEST_CASE = 60  # a case that takes longer is ended; compiling is the most of it
MODELS = ("ops", "layers", "models")


@dataclass(frozen=True)
class Part:
    """
    Args:
        about: what it says, in a few words.
        sources: files and folders below src/hf_hybrid_ssm. A case that begins with an op's name is about this op too.
        is_interpreted: whether a rehearsal runs its Triton kernels in the interpreter; the rest runs in torch.
    """

    about: str
    sources: tuple[str, ...] = ()
    is_interpreted: bool = False


# in this order: what is wrong is found before anything is timed, and what decides most is timed first
PARTS = {
    "doctor": Part("what is installed, and every kernel's self-check", ("doctor.py",), is_interpreted=True),
    "parity": Part("every kernel against float64", is_interpreted=True),
    "models": Part("every family and head against the CPU", MODELS),
    "peaks": Part("copy bandwidth and rate of matrix products"),
    "scan": Part("the Longhorn scan", ("ops/core", "ops/longhorn_scan")),
    "decoding": Part("a decoded token", MODELS),
    "training": Part("a training step and its memory", MODELS),
    "inspection": Part("a small scan under NVIDIA's tools", ("ops/core", "ops/longhorn_scan")),
}
DONE, OUT_OF_TIME, FATAL = 0, 3, 4
"""How a process that runs the cases ends."""

# folders below ops/ with the sources of ops that have no folder of their own name
FOLDERS = {
    "longhorn_step": "longhorn_scan",
    "causal_conv_step": "causal_conv",
    "lti_scan": "linear_scan",
    "diagonal_scan": "linear_scan",
    "linear_step": "linear_scan",
    "attention_step": "local_attention",
}
SHARED = (
    "gpu/settings.py",
    "gpu/comparing.py",
    "gpu/families.py",
    "timing/__init__.py",
    "timing/models.py",
    "rounds.py",
)
"""Below benchmarks/, what the cases of any part may use."""


def about(part: str, case: str) -> tuple[Path, ...]:
    """The files and folders whose change puts another result in the place of this case's."""
    package, here = ROOT / "src" / "hf_hybrid_ssm", ROOT / "benchmarks"
    found = [package / name for name in PARTS[part].sources]
    op = case.split(" ")[0].rstrip(",")
    if (folder := package / "ops" / FOLDERS.get(op, op)).is_dir():
        found += [package / "ops" / "core", folder]
    own = [here / "gpu" / f"{part}.py", *sorted((here / "gpu").glob(f"{part}_*.py"))]
    return *found, *own, *(here / name for name in SHARED)


def digest(part: str, case: str) -> str:
    """Of the sources of a case: the machine with the card may have no repository to name a commit."""
    return _digest(about(part, case))


@functools.cache
def _digest(paths: tuple[Path, ...]) -> str:
    found = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c"):
                found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]
