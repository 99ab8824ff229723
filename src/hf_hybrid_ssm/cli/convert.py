"""Convert an official checkpoint of a family to a folder that from_pretrained loads.

Examples:
    hf-hybrid-ssm convert longhorn checkpoint.pt FOLDER
    hf-hybrid-ssm convert spade checkpoint_best.pt FOLDER --set sliding_window=512
    hf-hybrid-ssm convert spade pytorch_model.bin FOLDER
"""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import add_json, check_writable, parser_of, value_of
from hf_hybrid_ssm.models import FAMILIES

TOKENS = ("bos_token_id", "pad_token_id", "eos_token_id")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("convert", __doc__)
    parser.add_argument("family", choices=_converters(), help="family whose official code wrote the file")
    parser.add_argument("source", metavar="FILE", type=Path, help="checkpoint file (.pt, .bin or .safetensors)")
    parser.add_argument("target", metavar="OUT", type=Path, help="folder to write, which must be new or empty")
    for name in TOKENS:
        flag, token = f"--{name.replace('_', '-')}", name.removesuffix("_token_id")
        parser.add_argument(flag, type=int, metavar="ID", help=f"number of the {token} token in the vocabulary")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="field of the configuration that the file does not tell; may be repeated",
    )
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.target.exists() and (not args.target.is_dir() or any(args.target.iterdir())):
        raise FileExistsError(f"{args.target} is not empty; a new or empty folder was expected.")
    if not args.source.is_file():
        raise FileNotFoundError(f"{args.source} is not a file.")
    check_writable(args.target, is_folder=True)
    fields = {name: value for name in TOKENS if (value := getattr(args, name)) is not None}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals:
            parser.error(f"--set {pair}: FIELD=VALUE was expected")
        fields[name] = value_of(value)
    converter = importlib.import_module(_module(args.family))
    model = converter.convert(args.source, **fields)
    model.save_pretrained(args.target)
    ids, count = {name: getattr(model.config, name) for name in TOKENS}, model.num_parameters()
    if args.json:
        print(json.dumps({"folder": str(args.target), "parameters": count} | ids))
    else:
        tokens = ", ".join(f"{name}={value}" for name, value in ids.items())
        print(f"{args.target}: {count:,} parameters, {tokens}")
    return 0


def _module(folder: str) -> str:
    return f"hf_hybrid_ssm.hub.official.{folder}"


def _converters() -> list[str]:
    folders = dict.fromkeys(family.folder for family in FAMILIES)
    return [folder for folder in folders if importlib.util.find_spec(_module(folder)) is not None]
