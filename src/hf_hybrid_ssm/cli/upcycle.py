"""Give a pretrained transformer a cache that stops growing, trained or not, and measure what became of it.

TEACHER is a folder, a name on the Hub or a GGUF file, of a decoder with rotary positions. A few of the layers that see
all tokens stay as they are, chosen by what recall needs; the others see a window. With --memory a state-space layer
stands beside each window, closed until it is trained: Longhorn mixers, or context states. OUT becomes an ordinary
folder, or with --delta what the student has beyond its teacher; its card shows what was measured. Settings after
--train are those of the recipe `upcycle`.

Examples:
    hf-hybrid-ssm upcycle model.gguf OUT --window 256 --keep 6
    hf-hybrid-ssm upcycle model.gguf OUT --window 256 --keep 12 --keep-by group_recall
    hf-hybrid-ssm upcycle TEACHER OUT --keep 0 --memory --text book.txt
    hf-hybrid-ssm upcycle TEACHER OUT --memory --train train_files="[text.jsonl]" distil.max_steps=500
"""

import argparse
import json
import re
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from hf_hybrid_ssm.cli.next_command import next_command, talking
from hf_hybrid_ssm.cli.parsing import add_device, add_json, check_writable, parser_of, value_of
from hf_hybrid_ssm.cli.progress import progress

KEEP_BY = ("recall", "group_recall", "kl", "sensitivity", "even")
MEMORIES = ("longhorn", "context")
DTYPES = ("auto", "float32", "bfloat16", "float16")
OF_BOTH = ("teacher", "keep", "keep_by", "window", "memory", "delta")
"""Arguments of this command that are settings of the recipe, too."""


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    _check(parser, args)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        results = _run(parser, args)
    if args.json:
        print(json.dumps(results))
    return 0


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Make the student and measure it; what is printed as JSON."""
    check_writable(args.out, is_folder=True)
    if args.out.is_dir() and any(args.out.iterdir()) and not args.overwrite:
        raise FileExistsError(f"{str(args.out)!r} is not empty: name another folder, or give --overwrite.")
    text = None if args.text is None else args.text.read_text(encoding="utf-8")

    from hf_hybrid_ssm.upcycle.early import refuse_early, refuse_own_folder

    refuse_own_folder(args.out, args.teacher)
    refuse_early(args.teacher)

    from transformers import logging

    from hf_hybrid_ssm.cli.loading import defect_of_device
    from hf_hybrid_ssm.upcycle import Keep
    from hf_hybrid_ssm.upcycle.loading import open_teacher
    from hf_hybrid_ssm.upcycle.student import config_of

    if reason := defect_of_device(args.device):
        parser.error(f"argument --device: {args.device!r} {reason}")
    logging.disable_progress_bar()
    files = open_teacher(args.teacher)
    keep = Keep(args.keep, args.keep_by, args.window)
    config_of(files.config, keep, memory=args.memory)  # refuses what no student can have
    if args.window >= (most := files.config.max_position_embeddings):
        raise ValueError(
            f"--window {args.window}: {args.teacher} reads at most {most:,} tokens, and such a window leaves none of "
            "them out. Give a shorter one."
        )
    tokenizer = files.load_tokenizer()
    ids = None if text is None else tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if ids is not None and ids.shape[1] < 4 * args.window:
        raise ValueError(f"{args.text} has {ids.shape[1]} tokens, and at least {4 * args.window} are needed.")
    texts = _texts(args, files.config, tokenizer)
    if args.train is None:
        teacher = _read(args, files)
        student = _made(args, teacher, keep, ids)
    else:
        student = _trained(args)
        teacher = _read(args, files)
    results = _measure(args, student, teacher.model, ids, texts)
    _say(f"wrote {args.out}")
    _say(next_command(*talking(args.out, tokenizer, args.teacher if args.delta else None)))
    return {"folder": str(args.out), "student": student.config.student, **results}


def _texts(args: argparse.Namespace, config: Any, tokenizer: Any) -> Any:
    """Texts with facts to be asked for, made before anything takes long; none if none are wanted."""
    from hf_hybrid_ssm.upcycle.measurements import MULTIPLES, texts_of_facts

    if not args.recall_texts:
        return {}
    try:
        texts = texts_of_facts(tokenizer, args.window, args.recall_texts, config.max_position_embeddings)
    except ValueError as error:
        raise ValueError(f"--window {args.window}: {error} Give another --window, or --recall-texts 0.") from error
    for length in (multiple * args.window for multiple in MULTIPLES):
        if length not in texts and length <= config.max_position_embeddings:
            _say(f"no facts in {length} tokens: too short for six of them and a question")
    return texts


def _read(args: argparse.Namespace, files: Any) -> Any:
    import torch

    from hf_hybrid_ssm.upcycle import load_teacher

    _say(f"reading {args.teacher}")
    teacher = load_teacher(files)
    teacher.model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return teacher


def _made(args: argparse.Namespace, teacher: Any, keep: Any, ids: Any) -> Any:
    """The student as it starts, in its folder."""
    import torch

    from hf_hybrid_ssm.hub.delta_files import replacing
    from hf_hybrid_ssm.upcycle import choose_layers, save_delta, upcycle
    from hf_hybrid_ssm.upcycle.student import BEYOND

    choice = choose_layers(teacher, keep, _progress, is_tried=not args.recall_texts)  # which ask the student itself
    text = None if ids is None else ids[:, : args.window + 2 + BEYOND]
    student, report = upcycle(teacher, choice, memory=args.memory, text=text)
    print(choice)
    if report.sink is not None:
        _say(report.sink)
    _say(f"{len(report.copied)} tensors are the teacher's, {len(report.new)} of the student's are new")
    if args.dtype != "auto":
        _round(student, getattr(torch, args.dtype))
    if args.delta:
        save_delta(student, args.out, teacher, tokenizer=teacher.tokenizer, overwrite=True)
        return student
    with replacing(args.out) as beside:
        student.save_pretrained(beside, export_code=True)
        teacher.tokenizer.save_pretrained(beside)
    return student


def _round(student: Any, dtype: Any) -> None:
    """As it will be loaded: what is computed and not saved, such as rotary frequencies, keeps its dtype."""
    computed = [(module, name, part) for module in student.modules() for name, part in module._buffers.items()]
    student.to(dtype)
    for module, name, part in computed:
        if name in module._non_persistent_buffers_set:
            module._buffers[name] = part


def _trained(args: argparse.Namespace) -> Any:
    """The student after the recipe's stages."""
    from transformers import AutoModelForCausalLM

    from hf_hybrid_ssm.cli.recipe import run_recipe

    settings = {name: getattr(args, name) for name in OF_BOTH}
    settings |= {"output_dir": str(args.out), "overwrite": args.overwrite}
    if args.device == "cpu":
        settings["use_cpu"] = True
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    try:
        run_recipe("upcycle", [*pairs, *args.train])
    except SystemExit as end:
        if end.code:
            raise
    extra = {"teacher": args.teacher} if args.delta else {}
    return AutoModelForCausalLM.from_pretrained(args.out, **extra).eval()


def _measure(args: argparse.Namespace, student: Any, teacher: Any, ids: Any, texts: Any) -> dict[str, Any]:
    """Tables on the terminal, in results.json and in the card."""
    from hf_hybrid_ssm.hub import card_of_folder
    from hf_hybrid_ssm.hub.reading import read_json
    from hf_hybrid_ssm.hub.writing import write_whole
    from hf_hybrid_ssm.upcycle.measurements import cache_table, facts_table, loss_table

    models = {"teacher": teacher, "student": student.to(teacher.device)}
    tables = [cache_table(models, student.dtype)]
    if ids is not None:
        tables.append(loss_table(models, ids[:, : 8 * args.window], args.window))
    if texts:
        tables.append(facts_table(models, texts, _progress))
    file = args.out / "results.json"
    results: dict[str, Any] = (
        read_json(file) if file.is_file() and args.train is not None else {"teacher": Path(args.teacher).name}
    )
    results["tables"] = [table.as_json() for table in tables]
    print(*tables, sep="\n\n")
    write_whole(file, json.dumps(results, indent=2) + "\n")
    write_whole(args.out / "README.md", card_of_folder(args.out))
    return results


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.window < 2:
        parser.error(f"--window {args.window} must be at least 2")
    if args.recall_texts < 0:
        parser.error(f"--recall-texts {args.recall_texts} must not be negative")
    if args.text is not None and not args.text.is_file():
        raise FileNotFoundError(f"--text {args.text} is not a file.")
    if args.train is not None:
        if args.dtype != "auto":
            parser.error("--dtype is for a student that is not trained")
        flags = {"output_dir": "OUT", "teacher": "TEACHER"}
        flags |= {name: f"--{name.replace('_', '-')}" for name in (*OF_BOTH, "overwrite") if name != "teacher"}
        for name in (pair.partition("=")[0].removeprefix("--").replace("-", "_") for pair in args.train):
            if name in flags:
                parser.error(f"--train {name}=...: give {flags[name]} instead")
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
        "--window",
        type=int,
        default=256,
        metavar="N",
        help="tokens that a token sees before its own, in layers whose teacher's see all (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=_keep,
        default=0.2,
        metavar="N",
        help="layers that still see all tokens: how many, which share, or which, as 7,8,14, or as 7:1,14:0 key/value "
        "groups (default: a fifth)",
    )
    parser.add_argument(
        "--keep-by",
        choices=KEEP_BY,
        help="how the layers are chosen; by group_recall so many key/value groups are chosen instead "
        "(default: recall, or even where the teacher has none)",
    )
    parser.add_argument(
        "--memory",
        nargs="?",
        choices=MEMORIES,
        const="longhorn",
        help="state-space layers beside the windows, closed until they are trained: longhorn mixers (also without a "
        "word), or context states",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text whose loss is measured, by position, and that tests the sinks"
    )
    parser.add_argument(
        "--recall-texts",
        type=int,
        default=3,
        metavar="N",
        help="texts of 4 and of 8 windows, each with facts of six kinds that no choice has seen, which teacher and "
        "student are asked for (default: %(default)s)",
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
    add_json(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    return parser
