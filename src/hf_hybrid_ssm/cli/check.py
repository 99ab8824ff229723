"""Check a checkpoint folder before its weights are loaded: are files missing, truncated, or not of this model?

Reads the headers of the weight files, config.json, the tokenizer's files and exported code; executes and unpickles
nothing. Exit status 0: complete; 1: refused, and the message names the file.
"""

import json
import sys

from hf_hybrid_ssm.cli.parsing import parser_of


def main(arguments: list[str]) -> int:
    parser = parser_of("check", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a saved model")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(arguments)
    from hf_hybrid_ssm.hub.contents import check_contents

    try:
        found = check_contents(given.folder)
    except ValueError as error:
        if given.json:
            print(json.dumps({"complete": False, "error": str(error)}))
        else:
            print(f"refused: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps({"complete": True} | found))
    else:
        print(", ".join(f"{count:,} {kind}" for kind, count in found.items()))
    return 0
