"""python -m hf_hybrid_ssm.planning --preset longhorn/125m --gpus 8 --batch 8 --length 1024

--markdown writes a page with every preset instead.
"""

import argparse
from dataclasses import fields
from pathlib import Path

from hf_hybrid_ssm.planning.plan import plan
from hf_hybrid_ssm.planning.presets import preset_config, preset_names
from hf_hybrid_ssm.planning.report import description, page
from hf_hybrid_ssm.planning.setup import DTYPE_BYTES, KERNELS, OPTIMIZERS, SHARDINGS, Setup

COMMAND = "python -m hf_hybrid_ssm.planning --markdown"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", metavar="FAMILY/PRESET", help=", ".join(preset_names()))
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("reports/planning.md"), metavar="PATH")
    for name in ("batch", "length", "gpus"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setup, name))
    choices = {"dtype": tuple(DTYPE_BYTES), "optimizer": OPTIMIZERS, "sharding": SHARDINGS, "kernels": KERNELS}
    for name, allowed in choices.items():
        parser.add_argument(f"--{name}", choices=allowed, default=getattr(Setup, name))
    parser.add_argument("--bf16", action="store_true", dest="mixed_precision", help="compute in bfloat16 (autocast)")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of every layer")
    given = parser.parse_args(arguments)
    if (given.preset is None) == (given.markdown is None):
        parser.error("give --preset FAMILY/PRESET, or --markdown")
    if given.markdown is not None:
        given.markdown.write_text(page(Setup(mixed_precision=True), COMMAND), encoding="utf-8")
        print(f"wrote {given.markdown}")
        return
    try:
        setup = Setup(**{field.name: getattr(given, field.name) for field in fields(Setup)})
        print(description(given.preset, plan(preset_config(given.preset), setup), setup))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
