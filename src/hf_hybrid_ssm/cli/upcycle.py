"""Turn a pretrained transformer into a hybrid, without training or with it, and measure what became of it.

TEACHER is a folder, a name on the Hub or a GGUF file. A few layers keep full attention, chosen by what recall needs;
the others see a window. With --memory something new stands beside the windows, closed until it is trained: Longhorn
mixers or, in a BST, context states. OUT becomes an ordinary folder, or with --delta what the student has beyond its
teacher; its card shows what was measured. Settings after --train are those of the recipe `upcycle`.

Examples:
    hf-hybrid-ssm upcycle model.gguf OUT --window 256 --keep 6
    hf-hybrid-ssm upcycle model.gguf OUT --window 256 --keep 9 --keep-by group_recall
    hf-hybrid-ssm upcycle TEACHER OUT --keep 0 --memory --text book.txt
    hf-hybrid-ssm upcycle TEACHER OUT --memory --train train_files="[text.jsonl]" distil.max_steps=500
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.cli.next_command import next_command, talking
from hf_hybrid_ssm.cli.parsing import add_device, check_writable, parser_of, value_of
from hf_hybrid_ssm.cli.progress import progress

KEEP_BY = ("recall", "group_recall", "kl", "sensitivity", "even")
FAMILIES = ("longhorn", "bst")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    _check(parser, args)
    check_writable(args.out, is_folder=True)
    if args.out.is_dir() and any(args.out.iterdir()) and not args.overwrite:
        raise FileExistsError(f"{str(args.out)!r} is not empty: name another folder, or give --overwrite.")
    text = None if args.text is None else args.text.read_text(encoding="utf-8")

    from hf_hybrid_ssm.upcycle.early import refuse_early

    refuse_early(args.teacher)

    import torch
    from transformers import logging

    from hf_hybrid_ssm.cli.loading import defect_of_device
    from hf_hybrid_ssm.upcycle import choose_layers, load_teacher_model, student_config
    from hf_hybrid_ssm.upcycle.loading import config_to_upcycle, open_teacher

    if reason := defect_of_device(args.device):
        parser.error(f"argument --device: {args.device!r} {reason}")
    logging.disable_progress_bar()
    files = open_teacher(args.teacher)
    config = config_to_upcycle(files)
    options = _options(args, config)
    student_config(config, **options)  # refuses what no student can have
    tokenizer = files.load_tokenizer()
    ids = None if text is None else tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if ids is not None and ids.shape[1] < 4 * args.window:
        raise ValueError(f"{args.text} has {ids.shape[1]} tokens, and at least {4 * args.window} are needed.")
    prompts = _needles(args, config, tokenizer)
    _say(f"reading {args.teacher}")
    teacher = load_teacher_model(files)
    teacher.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.family == "longhorn":
        choice = choose_layers(teacher, args.keep, args.keep_by, tokenizer, window=args.window, progress=_progress)
        print(choice)
        options["keep"] = choice.layers
    if args.train is None:
        student = _made(args, options, teacher, tokenizer)
    else:
        student = _trained(args, options)
    _measure(args, student, teacher, ids, prompts)
    _say(next_command(*talking(args.out, tokenizer, args.teacher if args.delta else None)))
    return 0


def _options(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The arguments of `upcycle`, with as many layers to keep as will be chosen.

    Raises:
        ValueError: there are none such, or windows that leave nothing out, or that are wider than the teacher's own.
    """
    from hf_hybrid_ssm.upcycle.choice import parts_to_keep
    from hf_hybrid_ssm.upcycle.teachers import attention_types

    if args.window >= (most := config.max_position_embeddings):
        raise ValueError(
            f"--window {args.window}: {args.teacher} reads at most {most:,} tokens, and such a window leaves none of "
            "them out. Give a shorter one."
        )
    kinds = attention_types(config)
    if "sliding_attention" in kinds and args.window >= config.sliding_window:
        raise ValueError(
            f"--window {args.window}: layers of {args.teacher} see {config.sliding_window - 1} tokens before their "
            f"own, and were trained with no more. Give --window {config.sliding_window - 1} or less."
        )
    if args.family == "bst":
        options: dict[str, Any] = {"family": "bst", "sliding_window": args.window}
        return options if args.memory else options | {"ssm_layers": []}
    keep = parts_to_keep(config, args.keep, args.keep_by)
    layers = [part[0] if isinstance(part, tuple) else part for part in keep]
    if wrong := [layer for layer in layers if kinds[layer] == "sliding_attention"]:
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        instead = f"name some of {', '.join(map(str, full))}" if full else "give --keep 0"
        raise ValueError(
            f"--keep: layer {wrong[0]} of {args.teacher} does not see all tokens itself, and would not if it is kept: "
            f"{instead}."
        )
    others = "hybrid_sliding" if args.memory else "sliding_attention"
    # a Longhorn's window counts the token itself
    return {"keep": keep, "keep_as": "full_attention", "others_as": others, "sliding_window": args.window + 1}


def _needles(args: argparse.Namespace, config: Any, tokenizer: Any) -> Any:
    """The texts that hide a number, made before anything takes long; none if none are wanted."""
    from hf_hybrid_ssm.upcycle.measurements import MULTIPLES, needle_prompts

    if not args.needles:
        return {}
    try:
        prompts = needle_prompts(tokenizer, args.window, args.needles, config.max_position_embeddings)
    except ValueError as error:
        raise ValueError(f"--window {args.window}: {error} Give another --window, or --needles 0.") from error
    for multiple in MULTIPLES:
        if multiple not in prompts and multiple * args.window <= config.max_position_embeddings:
            _say(f"no needles in {multiple * args.window} tokens: too short for a number and the question after it")
    return prompts


def _made(args: argparse.Namespace, options: dict[str, Any], teacher: Any, tokenizer: Any) -> Any:
    """The student as it starts, in its folder."""
    import torch

    from hf_hybrid_ssm.hub.delta_files import remove_weights
    from hf_hybrid_ssm.upcycle import save_delta, upcycle

    student, report = upcycle(teacher, tokenizer=tokenizer, **options)
    _say(
        f"{len(report.copied)} of the teacher's tensors carry over, {len(report.dropped)} do not; "
        f"{len(report.new)} of the student's are new"
    )
    if args.dtype != "auto":
        student.to(getattr(torch, args.dtype))
    student.eval()
    if args.delta:
        save_delta(student, args.out, args.teacher, model=teacher, tokenizer=tokenizer, overwrite=True)
        return student
    args.out.mkdir(parents=True, exist_ok=True)
    remove_weights(args.out)
    student.save_pretrained(args.out, export_code=True)
    tokenizer.save_pretrained(args.out)
    return student


def _trained(args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """The student after the recipe's stages."""
    from transformers import AutoModelForCausalLM

    from hf_hybrid_ssm.cli.recipe import run_recipe

    chosen = ("keep", "keep_as", "others_as")
    fields = {name: value for name, value in options.items() if name not in (*chosen, "family")}
    settings: dict[str, Any] = {name: options[name] for name in chosen if name in options}
    settings |= {"teacher": args.teacher, "student": args.family, "config": fields, "output_dir": str(args.out)}
    settings |= {"delta": args.delta, "overwrite": args.overwrite}
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    try:
        run_recipe("upcycle", [*pairs, *args.train])
    except SystemExit as end:
        if end.code:
            raise
    extra = {"teacher": args.teacher} if args.delta else {}
    return AutoModelForCausalLM.from_pretrained(args.out, **extra).eval()


def _measure(args: argparse.Namespace, student: Any, teacher: Any, ids: Any, prompts: Any) -> None:
    """Tables on the terminal, in results.json and in the card."""
    from hf_hybrid_ssm.hub import card_of_folder
    from hf_hybrid_ssm.hub.reading import read_json
    from hf_hybrid_ssm.hub.writing import write_whole
    from hf_hybrid_ssm.upcycle.measurements import cache_table, loss_table, needle_table

    models = {"teacher": teacher, "student": student.to(teacher.device)}
    tables = [cache_table(models, student.dtype)]
    if ids is not None:
        tables.append(loss_table(models, ids[:, : 8 * args.window], args.window))
    if prompts:
        tables.append(needle_table(models, prompts, args.window, _progress))
    print(*tables, sep="\n\n")
    file = args.out / "results.json"
    results: dict[str, Any] = (
        read_json(file) if file.is_file() and args.train is not None else {"teacher": Path(args.teacher).name}
    )
    results["tables"] = [table.as_json() for table in tables]
    write_whole(file, json.dumps(results, indent=2) + "\n")
    write_whole(args.out / "README.md", card_of_folder(args.out))
    _say(f"wrote {args.out}")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.window < 2:
        parser.error(f"--window {args.window} must be at least 2")
    if args.needles < 0:
        parser.error(f"--needles {args.needles} must not be negative")
    if args.text is not None and not args.text.is_file():
        raise FileNotFoundError(f"--text {args.text} is not a file.")
    if args.family == "bst":
        if args.keep is not None or args.keep_by is not None:
            parser.error("--keep and --keep-by are for a longhorn: all layers of a bst have windows")
    elif args.keep is None:
        args.keep = 0.2
    of_groups = args.keep_by == "group_recall" or (isinstance(args.keep, list) and isinstance(args.keep[0], tuple))
    if args.memory and of_groups:
        parser.error("--memory stands beside windows of whole layers: keep layers, not key/value groups")
    if args.train is not None:
        if args.dtype != "auto":
            parser.error("--dtype is for a student that is not trained")
        if wrong := [pair for pair in args.train if "=" not in pair]:
            parser.error(f"--train {wrong[0]}: key=value was expected, as the recipe upcycle takes it")


def _keep(text: str) -> Any:
    """A count, a share, or layers or groups with commas between them."""
    if re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        return [tuple(map(int, group.split(":"))) for group in text.split(",")]
    value = value_of(f"[{text}]" if "," in text else text)
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in layers):
        raise argparse.ArgumentTypeError(
            f"{text} is no count (6), share (0.2), list of layers (7,8,14) or of key/value groups (7:1,14:0)"
        )
    return value


def _progress(steps: Any) -> Any:
    return progress(steps, "texts")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("upcycle", __doc__)
    parser.add_argument(
        "teacher", metavar="TEACHER", help="pretrained model: a folder, a name on the Hub or a GGUF file"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    parser.add_argument(
        "--family", choices=FAMILIES, default="longhorn", help="family of the student (default: %(default)s)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=256,
        metavar="N",
        help="tokens that a layer sees before its own (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=_keep,
        metavar="N",
        help="layers with full attention: how many, which share, or which, as 7,8,14, or as 7:1,14:0 key/value groups "
        "(default: a fifth)",
    )
    parser.add_argument(
        "--keep-by",
        choices=KEEP_BY,
        help="how the layers are chosen; by group_recall so many key/value groups are chosen instead "
        "(default: recall, or even where the teacher has none)",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="put mixers or context states beside the windows, closed until they are trained",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="text whose loss is measured, by position")
    parser.add_argument(
        "--needles",
        type=int,
        default=8,
        metavar="N",
        help="texts of each length that hide a number to be asked for (default: %(default)s)",
    )
    parser.add_argument(
        "--train", nargs="+", metavar="KEY=VALUE", help="train the student, with these settings of the recipe upcycle"
    )
    parser.add_argument("--delta", action="store_true", help="write only what the student has beyond its teacher")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="dtype of the weights; auto is the teacher's (default: %(default)s)",
    )
    add_device(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    return parser
