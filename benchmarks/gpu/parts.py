"""What is run, what each case is about, and how a process that runs them ends.

All of it is known before anything heavy is imported.
"""

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# in this order: what is wrong is found before anything is timed, and what matters most is timed first
PARTS = {
    "doctor": "what is installed, and every kernel's self-check",
    "peaks": "copy bandwidth and rate of matrix products",
    "parity": "every kernel against float64",
    "scan": "the Longhorn scan",
    "decoding": "a decoded token",
    "training": "a training step and its memory",
    "models": "every family against the CPU",
    "syncs": "nothing waits for the GPU",
    "window_attention": "window attention",
    "long_convolution": "the long convolution",
    "learning": "loss curves of short runs",
}
INTERPRETED = ("doctor", "parity")  # of a rehearsal; the rest runs in torch
DONE, OUT_OF_TIME, FATAL = 0, 3, 4

# folders below ops/ with the sources of ops that have no folder of their own name
FOLDERS = {
    "longhorn_step": "longhorn_scan",
    "causal_conv_step": "causal_conv",
    "lti_scan": "linear_scan",
    "diagonal_scan": "linear_scan",
    "linear_step": "linear_scan",
    "attention_step": "local_attention",
}
MODELS = ("ops", "layers", "models")
ABOUT = {
    "doctor": ("doctor.py",),
    "peaks": (),
    "parity": (),
    "scan": ("ops/core", "ops/longhorn_scan"),
    "decoding": MODELS,
    "training": MODELS,
    "models": MODELS,
    "syncs": MODELS,
    "window_attention": ("ops/core", "ops/local_attention"),
    "long_convolution": ("ops/core", "ops/long_conv"),
    "learning": MODELS,
}
"""Below src/hf_hybrid_ssm, of each part; a case that begins with an op's name is about this op besides."""
SHARED = ("gpu/settings.py", "gpu/comparing.py", "gpu/families.py", "timing/__init__.py", "timing/models.py")
"""Below benchmarks/, what the cases of any part may use."""


def about(part: str, case: str) -> tuple[Path, ...]:
    """The files and folders whose change puts another result in the place of this case's."""
    package, here = ROOT / "src" / "hf_hybrid_ssm", ROOT / "benchmarks"
    found = [package / name for name in ABOUT[part]]
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
