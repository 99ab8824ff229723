"""What is installed, which backend each op selects on this machine and why, and how exact its kernels are."""

import importlib
import importlib.metadata
import pkgutil
import platform
import shutil
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "triton", "datasets", "lm_eval", "peft")


def examine() -> dict[str, Any]:
    """Everything the report shows, as plain values.

    Returns:
        `packages` (name → version or None), `compiler` (path or None), `devices`, and `ops`: for each op, device and
        dtype, the backend selected, the status of every backend, and the largest relative error of its kernels on a
        small example against the float64 reference.
    """
    import torch

    from hf_hybrid_ssm import ops as folder
    from hf_hybrid_ssm.ops._core.dispatch import PREFERENCE, REGISTRY

    for found in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{found.name}")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    ops: dict[str, Any] = {}
    for name, op in sorted(REGISTRY.items()):
        ops[name] = {}
        for device in devices:
            for dtype in (torch.float32, torch.bfloat16):
                status = {b: s for b, s in op.explain(device, dtype).items() if b in op.builtin or b in op.kernels}
                selected = next(backend for backend in PREFERENCE if status.get(backend) == "runs")
                errors = {b: op.self_check(b, device, dtype) for b in op.kernels if status[b] == "runs"}
                target = f"{device} {str(dtype).removeprefix('torch.')}"
                ops[name][target] = {"selected": selected, "backends": status, "kernel_errors": errors}
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "compiler": shutil.which("cc") or shutil.which("gcc"),
        "devices": devices,
        "ops": ops,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(found: dict[str, Any]) -> str:
    """The findings as text."""
    lines = [f"python {found['python']}"]
    lines += [f"{name} {version or 'is not installed'}" for name, version in found["packages"].items()]
    lines.append(f"C compiler: {found['compiler'] or 'none, so that the fused CPU kernels cannot be built'}")
    for name, targets in found["ops"].items():
        lines.append(f"\n{name}")
        for target, op in targets.items():
            lines.append(f"  {target}: {op['selected']}")
            for backend, status in op["backends"].items():
                if backend != "reference" and status != "runs":
                    lines.append(f"    not {backend}: {status}")
            for backend, error in op["kernel_errors"].items():
                lines.append(f"    {backend} kernel: {error:.1e} off the float64 reference")
    return "\n".join(lines)
