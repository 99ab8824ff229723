"""Run a script, a module or an installed command in which transformers knows the families of this package.

The script is run exactly as by `python SCRIPT.py ...` after `import hf_hybrid_ssm`. A launcher of several processes
comes first.

Examples:
    hf-hybrid-ssm run run_clm.py --model_name_or_path FOLDER ...
    hf-hybrid-ssm run -m lm_eval run --model hf ...
    hf-hybrid-ssm run transformers serve FOLDER
    accelerate launch -m hf_hybrid_ssm run SCRIPT.py ...
    torchrun --nproc-per-node 8 -m hf_hybrid_ssm run SCRIPT.py ...
"""

import argparse
import os
import runpy  # runs what the user names on the command line, and nothing else  # noqa: TID251
import sys
from importlib.metadata import entry_points
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.extras import install_command, missing_requirements

# a server goes on with what it has read of a conversation; the user's own value stays, 0 for none
PREFIX_CACHE, PREFIX_CACHE_BYTES = "HF_HYBRID_SSM_PREFIX_CACHE", str(2**30)


def run_file(path: Path, arguments: list[str]) -> int:
    """`python PATH ARGUMENTS` in this process."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0


def run_module(name: str, arguments: list[str]) -> int:
    """`python -m NAME ARGUMENTS` in this process."""
    sys.argv = [name, *arguments]  # the first becomes the module's path
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def run_command(name: str, arguments: list[str]) -> int:
    """The installed command NAME in this process.

    Raises:
        SystemExit: with the command's own status.
    """
    if name == "transformers" and arguments[:1] == ["serve"] and missing_requirements("serving", of=name):
        raise SystemExit(f"`transformers serve` needs: {install_command('serving', of=name)}")
    if name == "transformers" and arguments[:1] == ["serve"]:
        os.environ.setdefault(PREFIX_CACHE, PREFIX_CACHE_BYTES)
    (command,) = entry_points(group="console_scripts", name=name)
    sys.argv = [name, *arguments]
    sys.exit(command.load()())


def build_parser() -> argparse.ArgumentParser:
    """For its help alone: what is run reads its own arguments."""
    parser = parser_of("run", __doc__)
    parser.usage = "%(prog)s [-h] SCRIPT.py ... | -m MODULE ... | COMMAND ..."
    parser.add_argument("-m", dest="module", metavar="MODULE", help="module to run, as by python -m")
    parser.add_argument("target", metavar="FILE", nargs="?", help="script, or else the name of a command to run")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of what is run")
    return parser


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return run_module(arguments[1], arguments[2:])
    parser = build_parser()
    args = parser.parse_args(arguments[:1])
    if args.target is None:
        parser.error("the following arguments are required: SCRIPT.py, -m MODULE or COMMAND")
    if Path(args.target).is_file():
        return run_file(Path(args.target), arguments[1:])
    if entry_points(group="console_scripts", name=args.target):
        return run_command(args.target, arguments[1:])
    raise SystemExit(f"hf-hybrid-ssm run: {args.target} is neither a file nor a command of this environment.")
