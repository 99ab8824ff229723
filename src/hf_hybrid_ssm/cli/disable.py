"""Undo `hf-hybrid-ssm enable`.

The file that it wrote is removed. Nothing happens where there is none.

Examples:
    hf-hybrid-ssm disable
"""

import argparse

from hf_hybrid_ssm.cli.enable import enabling_file, report
from hf_hybrid_ssm.cli.parsing import add_json, parser_of


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("disable", __doc__)
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    path = enabling_file()
    done = "Removed" if path.is_file() else "Was not enabled: there is no"
    path.unlink(missing_ok=True)
    report(path, done, args.json)
    return 0
