"""Show what is installed, and which backend each operation uses on this machine.

It also says why other backends do not run, what to type for what is missing, and how far each kernel is from the
float64 reference. Send its output with a bug report.

Examples:
    hf-hybrid-ssm doctor
    hf-hybrid-ssm doctor --json
"""

import argparse
import json

from hf_hybrid_ssm.cli.parsing import add_json, parser_of
from hf_hybrid_ssm.cli.progress import progress


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("doctor", __doc__)
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    from hf_hybrid_ssm.doctor import examine, report

    findings = examine(lambda ops: progress(ops, "ops"))
    print(json.dumps(findings, indent=2) if args.json else report(findings))
    return 0
