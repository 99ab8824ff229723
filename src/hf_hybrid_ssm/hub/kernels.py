"""The Triton kernels as a folder of their own, in the layout of the `kernels` library.

python -m hf_hybrid_ssm.hub.kernels FOLDER

Code exported with a checkpoint imports `hf_hybrid_ssm_kernels` where it runs on CUDA, and stays with plain torch where
there is none. `kernels.get_local_kernel(Path(FOLDER))` provides it, and so does FOLDER/build/torch-universal on
PYTHONPATH.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

from hf_hybrid_ssm import __version__
from hf_hybrid_ssm.hub.flatten import KERNELS, flatten, kernel_file, triton_kernels
from hf_hybrid_ssm.hub.sources import PACKAGE, ROOT, Module, needed_modules

VARIANT = "torch-universal"
HEAD = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    f"# Part of hf-hybrid-ssm {__version__}, gathered by hf_hybrid_ssm.hub.kernels.\n\n"
)
# The library loads a kernel under a name of its own; exported code looks for this one.
PUBLISH = f"""
for _name, _module in list(sys.modules.items()):
    if _name == __name__ or _name.startswith(f"{{__name__}}."):
        sys.modules.setdefault("{KERNELS}" + _name.removeprefix(__name__), _module)
"""


def export_kernels(folder: str | os.PathLike) -> Path:
    """Write the Triton kernels of every op, and what they need, below `folder`/build/torch-universal.

    The same sources give the same bytes. Files of an earlier export that are not part of this one are removed.

    Returns:
        The folder.

    Raises:
        ValueError: the folder holds Python files there that this function did not write.
    """
    target = Path(folder)
    package = target / "build" / VARIANT / KERNELS
    texts = code_of_kernels()
    written = sorted(package.glob("*.py"))
    for path in written:
        if not path.read_text(encoding="utf-8").startswith(HEAD.partition(__version__)[0]):
            raise ValueError(f"{path} was not written by export_kernels; move it away, or export to another folder.")
    for path in written:
        path.unlink()
    package.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (package / name).write_text(text, encoding="utf-8", newline="\n")
    (package.parent / "metadata.json").write_text(json.dumps(_metadata(texts), indent=2) + "\n", encoding="utf-8")
    return target


def code_of_kernels() -> dict[str, str]:
    """File name → source."""
    paths = sorted((ROOT / "ops").rglob("*.py"))
    names = [".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)) for path in paths]
    modules = [Module(name.removesuffix(".__init__")) for name in names]
    functions = [kernel for module in modules for kernel in triton_kernels(module)]
    needed = needed_modules([module for module, _ in functions])
    offered = [*functions, *((module, "supports") for module, _ in functions)]
    texts = flatten(needed, kernel_file, offered)
    imports = "".join(f"from .{kernel_file(module)} import {name}\n" for module, name in functions)
    listed = "".join(f'    "{name}",\n' for _, name in functions)
    title = '"""Triton kernels of hf-hybrid-ssm: functions of tensors, as its ops document them."""'
    texts["__init__"] = f"{title}\n\nimport sys\n\n{imports}\n__all__ = [\n{listed}]\n{PUBLISH}"
    return {f"{name}.py": HEAD + texts[name] for name in sorted(texts)}


def _metadata(texts: dict[str, str]) -> dict:
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    return {
        "id": f"_{KERNELS}_{digest[:12]}",
        "name": KERNELS.replace("_", "-"),
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where to write them")
    print(export_kernels(parser.parse_args().folder))


if __name__ == "__main__":
    main()
