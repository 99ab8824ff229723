"""Check a checkpoint folder for missing, truncated and foreign files, before its weights are loaded.

Reads the headers of the weight files, config.json, the tokenizer's files and exported code, and compares the hashes of
SHA256SUMS where the folder has one; executes and unpickles nothing. With --teacher it also reads the teacher of a
delta, and compares its weights with the fingerprint. Exit status 0: complete; 1: refused, and the
message names the file.

Examples:
    hf-hybrid-ssm check FOLDER
    hf-hybrid-ssm check FOLDER --values --json
    hf-hybrid-ssm check DELTA --teacher PATH_OR_NAME
"""

import argparse
import json
import sys
from pathlib import Path

from hf_hybrid_ssm.cli.errors import one_line
from hf_hybrid_ssm.cli.parsing import add_json, add_teacher, check_holds_model, parser_of
from hf_hybrid_ssm.cli.progress import progress


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("check", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="folder of a saved model")
    parser.add_argument("--values", action="store_true", help="read all weights too, and refuse NaN and infinity")
    add_teacher(parser)
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    try:
        findings = check(args.folder, args.values, args.teacher)
    except (ValueError, OSError) as error:
        if args.json:
            print(json.dumps({"complete": False, "error": one_line(error)}))
        else:
            print(f"refused: {one_line(error)}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"complete": True} | findings))
    else:
        print("complete: " + ", ".join(f"{count:,} {kind}" for kind, count in findings.items()))
    return 0


def check(folder: str, values: bool, teacher: str | None = None) -> dict[str, int]:
    """Counts of what was checked; the errors of `check_contents`, `check_sums` and `check_values`, and those of
    `weights_of` if a delta's teacher is given."""
    check_holds_model(folder)
    from hf_hybrid_ssm.hub.verify import check_contents, check_sums, check_values

    findings = check_contents(folder)
    if hashes := check_sums(folder):
        findings["hashes"] = hashes
    if values:
        findings["values"] = check_values(folder, lambda names: progress(names, "tensors"))
    if teacher is not None:
        findings["carried"] = _check_teacher(folder, teacher)
    return findings


def _check_teacher(folder: str, teacher: str) -> int:
    """How many tensors of a delta are its teacher's, which is read and compared."""
    from hf_hybrid_ssm.hub.delta_files import is_delta
    from hf_hybrid_ssm.hub.verify import own_tensors
    from hf_hybrid_ssm.upcycle.delta import weights_of

    if not is_delta(folder):
        raise ValueError(f"--teacher {teacher} is for a delta, and {folder!r} is none: leave it out.")
    return len(weights_of(folder, teacher).keys() - own_tensors(Path(folder)).keys())
