"""The plan of a run on a card: its parts in order, and what each is about.

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
        sources: files and folders below src/hf_hybrid_ssm.
        is_interpreted: whether a rehearsal runs its Triton kernels in the interpreter; the rest runs in torch.
    """

    about: str
    sources: tuple[str, ...] = ()
    is_interpreted: bool = False


# in this order: what is wrong is found before anything is timed, and what decides most is timed first
PARTS = {
    "doctor": Part("what is installed, and every kernel's self-check", ("doctor.py", "ops"), is_interpreted=True),
    "parity": Part("every kernel against float64", ("ops",), is_interpreted=True),
    "models": Part("every family and head against the CPU", MODELS),
    "peaks": Part("copy bandwidth and rate of matrix products"),
    "scan": Part("the Longhorn scan", ("ops",)),
    "decoding": Part("a decoded token", MODELS),
    "training": Part("a training step and its memory", MODELS),
    "inspection": Part("a small scan under NVIDIA's tools", ("ops",)),
}


def sources(part: str) -> list[Path]:
    """The files and folders whose change puts other results in the place of a part's."""
    package, here = ROOT / "src" / "hf_hybrid_ssm", ROOT / "benchmarks"
    shared = ("gpu/settings.py", "gpu/comparing.py", "gpu/families.py", "timing", "rounds.py")
    own = sorted((here / "gpu").glob(f"{part}*.py"))
    return [*(package / name for name in PARTS[part].sources), *own, *(here / name for name in shared)]


@functools.cache
def digest(part: str) -> str:
    """Of the sources of a part: the machine with the card may have no repository to name a commit."""
    found = hashlib.sha256()
    for path in sources(part):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".c"):
                found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]
