"""Show what is installed, which backend each operation uses on this machine and why others do not run, and how far
each kernel is from the float64 reference. Send its output with a bug report.
"""

import json

from hf_hybrid_ssm.cli.parsing import parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(arguments)
    from hf_hybrid_ssm.doctor import examine, report

    found = examine()
    print(json.dumps(found, indent=2) if given.json else report(found))
    return 0
