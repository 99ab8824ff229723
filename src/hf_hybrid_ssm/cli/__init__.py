"""The command `hf-hybrid-ssm`: one module for each of its commands, imported when it is asked for."""

import argparse
import importlib
import sys

import hf_hybrid_ssm

COMMANDS = {
    "run": "run a script, a module or another command with the families registered",
    "enable": "register the families whenever this environment's Python imports transformers",
    "disable": "undo enable",
    "read": "read a text once, and keep what the model remembers of it in a file",
    "generate": "continue a text with a checkpoint",
    "eval": "score checkpoints with lm-eval",
    "check": "find missing, truncated and foreign files in a checkpoint folder",
    "export": "add the code to a folder that loads it without this package",
    "card": "write the model card of a folder",
    "convert": "convert an official checkpoint",
    "plan": "memory and operations of a training step, without running it",
    "doctor": "what is installed, which kernels run here, and why others do not",
    "demo": "train, evaluate, save, reload and score a small model on this machine",
}
# what they run is not ours: its errors keep their traceback
PASSING_ON = ("run", "eval", "demo")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, or 1 after an error that was printed; argparse exits with 2."""
    table = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-hybrid-ssm",
        usage="%(prog)s COMMAND ...",
        description="State-space/attention hybrids for transformers.",
        epilog=f"commands:\n{table}\n\n`hf-hybrid-ssm COMMAND --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-hybrid-ssm {hf_hybrid_ssm.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    command = importlib.import_module(f"{__name__}.{given.command}")
    if given.command in PASSING_ON:
        return command.main(given.rest)
    try:
        return command.main(given.rest)
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-hybrid-ssm {given.command}: {error}", file=sys.stderr)
        return 1
