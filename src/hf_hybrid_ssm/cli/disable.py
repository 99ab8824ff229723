"""Undo `hf-hybrid-ssm enable`: remove the file that it wrote. Nothing happens where there is none."""

from hf_hybrid_ssm.cli.enable import enabling_file, report
from hf_hybrid_ssm.cli.parsing import parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("disable", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(arguments)
    path = enabling_file()
    done = "Removed" if path.is_file() else "Was not enabled: there is no"
    path.unlink(missing_ok=True)
    report(path, done, given.json)
    return 0
