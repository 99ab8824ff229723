"""Score checkpoints with lm-eval. All arguments go to lm-eval's own command line, which knows the families:

    hf-hybrid-ssm eval run --model hf --model_args pretrained=FOLDER --tasks piqa,lambada_openai

`hf-hybrid-ssm eval run --help` shows its options.
"""

import sys

from hf_hybrid_ssm.cli.parsing import parser_of


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        parser = parser_of("eval", __doc__)
        parser.add_argument("arguments", nargs="*", metavar="...", help="of lm-eval")
        parser.print_help()
        return 0 if arguments else 2
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise SystemExit("lm-eval is needed: pip install 'hf-hybrid-ssm[eval]'.") from error
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0
