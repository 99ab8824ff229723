"""Score checkpoints with lm-eval, whose own command line gets all arguments, and knows the families.

Beside lm-eval's tasks there are recall_needle, recall_several, recall_distractors, recall_variables and recall_pairs
(all of them: recall), which ask for what a text said up to many windows ago. They need no data, and accuracy is given
for each length. `hf-hybrid-ssm eval run --help` shows lm-eval's options. A delta needs its teacher.

Examples:
    hf-hybrid-ssm eval run --model hf --model_args pretrained=FOLDER --tasks piqa,lambada_openai
    hf-hybrid-ssm eval run --model hf --model_args pretrained=DELTA,teacher=PATH_OR_NAME --tasks piqa
    hf-hybrid-ssm eval run --model hf --model_args pretrained=FOLDER --apply_chat_template --tasks recall_needle \\
        --metadata '{"window": 256, "multiples": [1, 4, 8], "samples": 60}'
"""

import argparse
import sys

from hf_hybrid_ssm.cli.parsing import check_is_folder, is_path, parser_of
from hf_hybrid_ssm.evaluation.recall_tasks import with_files
from hf_hybrid_ssm.extras import install_command


def check_models(arguments: list[str]) -> None:
    """`pretrained=FOLDER` is there, before lm-eval asks the Hub for it."""
    for part in (part for argument in arguments for part in argument.split(",")):
        name, _, folder = part.partition("=")
        if name == "pretrained" and is_path(folder):
            check_is_folder(folder)


def build_parser() -> argparse.ArgumentParser:
    """For its help alone: lm-eval reads the arguments."""
    parser = parser_of("eval", __doc__)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of lm-eval")
    return parser


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        build_parser().print_help()
        return 0 if arguments else 2
    check_models(arguments)
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ImportError(f"lm-eval is needed: {install_command('eval')}") from error
    from hf_hybrid_ssm.evaluation.harness import ask_git_only_within_a_repository

    ask_git_only_within_a_repository()
    sys.argv = ["lm_eval", *with_files(arguments)]
    cli_evaluate()
    return 0
