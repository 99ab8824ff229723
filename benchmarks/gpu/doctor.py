"""(a) What is installed, and for each op and dtype the backend that it takes, why, and the kernels' self-checks."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.doctor import every_op, examine_op, examine_packages

DTYPES = (torch.float32, torch.bfloat16)


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    yield "packages", examine_packages
    for op in sorted(every_op()):
        for dtype in DTYPES:
            yield f"{op} {str(dtype).removeprefix('torch.')}", lambda o=op, d=dtype: found(settings, o, d)


def found(settings: Settings, op: str, dtype: torch.dtype) -> dict:
    """The doctor's findings; an error where a kernel of this device is not taken, or interpreted fails its check."""
    report = examine_op(op, settings.device, dtype)
    reason = report["backends"].get("triton", "runs")
    if reason != "runs" and (settings.device == "cuda" or "self-check" in reason):
        report["error"] = f"the kernel does not run: {reason}"
    return report
