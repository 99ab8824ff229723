"""(a) What is installed, which backend each op takes and why, and every kernel's self-check."""

from collections.abc import Callable, Iterator

from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.doctor import examine


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    yield "doctor", lambda: found(settings)


def found(settings: Settings) -> dict:
    """The doctor's findings; an error where a kernel of this device is not taken."""
    report = examine()
    refused = {}
    for name, targets in report["ops"].items():
        for target, op in targets.items():
            reason = op["backends"].get("triton", "runs")
            if target.startswith(settings.device) and reason != "runs" and (settings.device == "cuda"):
                refused[f"{name}, {target}"] = reason
    return report | ({"error": f"kernels that do not run: {refused}"} if refused else {})
