"""What a run needs, named at once before anything runs; and what it can compare with where it is installed."""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version

REQUIRED = {"torch": "2.8", "transformers": "5.16", "safetensors": "0.8"}
ON_CUDA = {"triton": "3.6"}
PEERS = {"mamba_ssm": "Mamba's own kernels"}


def problems(device: str) -> list[str]:
    """Every reason why a run on this device cannot start; nothing is imported for the packages."""
    found = []
    for name, lowest in (REQUIRED | (ON_CUDA if device == "cuda" else {})).items():
        try:
            have = version(name)
        except PackageNotFoundError:
            found.append(f"{name} >= {lowest} is missing: pip install '{name}>={lowest}'")
            continue
        if _numbers(have) < _numbers(lowest):
            found.append(f"{name} {have} is too old: pip install '{name}>={lowest}'")
    if importlib.util.find_spec("hf_hybrid_ssm") is None:
        found.append("hf_hybrid_ssm is not on the path: set PYTHONPATH=src, or run bash tools/card.sh")
    if device == "cuda" and not found:
        import torch

        if not torch.cuda.is_available():
            found.append(f"torch {torch.__version__} sees no GPU; --device cpu --rehearse runs without one")
    return found


def missing_peers() -> list[str]:
    """What will not be compared with."""
    return [f"{name} ({what})" for name, what in PEERS.items() if importlib.util.find_spec(name) is None]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
