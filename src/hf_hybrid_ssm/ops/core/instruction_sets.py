"""The instruction sets for which C kernels are compiled: what this processor has, and what it is held to.

HF_HYBRID_SSM_CPU names one of them (avx512, avx2, default), as ATEN_CPU_CAPABILITY does for torch: one machine then
shows what others would do. Without it, kernels are compiled for the very processor.
"""

import os
import platform
from functools import cache
from pathlib import Path

VARIABLE = "HF_HYBRID_SSM_CPU"
LEVELS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "default": "x86-64"}
"""Names, best first, and what the compilers call them."""
_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "default": set(),
}


@cache
def processor() -> tuple[str, ...]:
    """The lines that say what this processor is and can do, in an order of their own."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return (platform.processor(),)
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return tuple(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def available() -> tuple[str, ...]:
    """What this processor has of `LEVELS`, best first; "default" alone where it is not an x86."""
    has = {word for line in processor() if line.startswith("flags") for word in line.split()}
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    names = [name for name, flags in _FLAGS.items() if flags <= has]
    return tuple(names if is_x86 and has else names[-1:])


def held_to() -> str | None:
    """The instruction set that kernels are held to, or None.

    Raises:
        ValueError: HF_HYBRID_SSM_CPU names none.
    """
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in LEVELS:
        raise ValueError(f"{VARIABLE}={name!r} is not an instruction set; choose one of {', '.join(LEVELS)}.")
    return name


def in_use() -> str:
    """The instruction set of the kernels that run here."""
    return held_to() or available()[0]


def missing() -> str | None:
    """None if this processor has what the kernels are held to, else what it lacks."""
    name = held_to()
    return None if name is None or name in available() else f"{VARIABLE}={name}: this processor does not have it"


def march() -> str:
    """The compiler's option."""
    name = held_to()
    if name is None or platform.machine() not in ("x86_64", "AMD64"):
        return "-march=native"
    return f"-march={LEVELS[name]}"
