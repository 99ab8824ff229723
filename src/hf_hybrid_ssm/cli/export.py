"""Add to a saved checkpoint the code that loads it without this package, by `trust_remote_code=True`.

The folder gets at most 15 Python files and the entries of `config.json` that name them; weights are not touched. With
--full, the whole model of a delta and its code are written as an ordinary folder.

Examples:
    hf-hybrid-ssm export FOLDER
    hf-hybrid-ssm export DELTA --full OUT --teacher PATH_OR_NAME
"""

import argparse
import json
from pathlib import Path

from hf_hybrid_ssm.cli.next_command import next_command
from hf_hybrid_ssm.cli.parsing import add_json, add_teacher, check_holds_model, check_writable, parser_of


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("export", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of a saved model")
    parser.add_argument("--full", type=Path, metavar="OUT", help="folder to write the whole model of a delta to")
    add_teacher(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.full is None and (args.teacher or args.overwrite):
        parser.error("--teacher and --overwrite belong to --full OUT")
    check_holds_model(args.folder)
    target = args.folder
    if args.full is not None:
        target = args.full
        check_writable(target, is_folder=True)
        if target.is_dir() and any(target.iterdir()) and not args.overwrite:
            raise FileExistsError(f"{str(target)!r} is not empty: name another folder, or give --overwrite.")
    from hf_hybrid_ssm.hub import check_folder, export_code
    from hf_hybrid_ssm.hub.verify_files import check_saved

    check_saved(args.folder)
    if args.full is None:
        export_code(target)
    else:
        from hf_hybrid_ssm.upcycle.delta import write_full

        write_full(args.folder, target, args.teacher)
    files = check_folder(target)
    if args.json:
        print(json.dumps({"folder": str(target)} | files))
        return 0
    whole = f", {files['tensors']:,} tensors" if args.full is not None else ""
    print(f"{target}: {files['code']} code files{whole}")
    has_card = (target / "README.md").exists()
    print(next_command("check", target, "--values") if has_card else next_command("card", target))
    return 0
