"""What the documentation shows runs, what it links exists, what it counts was measured."""

import ast
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.tables import rendered
from hf_hybrid_ssm.models.families import FAMILIES
from tests import reporting
from tests.test_pasted_blocks import LESSONS, name_of

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "reports").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "checkpoints/README.md", *sorted((ROOT / "docs").rglob("*.md")), *REPORTS]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_of(page):
    return [code for language, code in BLOCK.findall(page.read_text(encoding="utf-8")) if language == "python"]


def is_in_order(page):
    """Whether blocks follow each other; elsewhere each needs the first one alone (tests/test_pasted_blocks.py)."""
    return name_of(page).startswith(LESSONS) or len(python_of(page)) == 1


WITH_PYTHON = [page for page in PAGES if python_of(page) and is_in_order(page)]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other; what is for CUDA, on the CPU where there is none."""
    if "from trl import" in page.read_text(encoding="utf-8"):
        pytest.importorskip("trl")
    if "import onnxruntime" in page.read_text(encoding="utf-8"):
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("documentation")  # which can be imported, as a notebook's `__main__`
    monkeypatch.setitem(sys.modules, "documentation", module)
    families = [*FAMILIES]
    try:
        for block in python_of(page):
            block = block if torch.cuda.is_available() else block.replace('device="cuda"', 'device="cpu"')
            exec(compile(block, str(page), "exec"), vars(module))
    finally:
        FAMILIES[:] = families  # without those that the page registers


def test_blocks_of_the_first_page_run_alone(tmp_path, monkeypatch):
    """As they are pasted: without what the blocks before have imported or made."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    blocks = python_of(ROOT / "README.md")
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "documentation"})


def test_the_first_example_writes_what_is_shown_and_warns_of_nothing(tmp_path, monkeypatch, capfd):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(compile(python_of(ROOT / "README.md")[0], "README.md", "exec"), {"__name__": "documentation"})
    said = capfd.readouterr()
    assert "token_id" not in said.err
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert said.out == next(text for language, text in blocks if language == "text")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


SPEAKS_OF_KERNELS = re.compile(r"Triton kernel|Triton on CUDA|C and Triton")
OF_KERNELS = [
    page
    for page in sorted({*PAGES} - {*REPORTS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"})
    if SPEAKS_OF_KERNELS.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", OF_KERNELS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_who_reads_of_kernels_for_gpus_reads_that_they_never_ran_on_one(page):
    """Until `make gpu` has left a page about one."""
    if not (ROOT / "reports" / "gpu.md").exists():
        assert re.search(r"never\s+run\s+on\s+a\s+GPU|ever\s+run\s+on\s+a\s+GPU", page.read_text(encoding="utf-8"))


def test_pages_about_kernels_are_found():
    assert {page.name for page in OF_KERNELS} >= {"README.md", "kernels.md", "quickstart.md", "limits.md"}


def test_every_picture_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = sorted((ROOT / "benchmarks/results").glob("*.png"))
    assert pictures and [path.name for path in pictures if f"/{path.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_show_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert rendered(text) == text, "run python benchmarks/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"`python ((?:recipes|benchmarks)/[^`]+)`", text):
        for word in shlex.split(command):
            if word.startswith(("recipes/", "benchmarks/")):
                assert (ROOT / word).exists(), f"{page.name} names {word}"


JOB = re.compile(r"-m tests\.reporting ([a-z][a-z-]*)")
TARGET = re.compile(r"(?:`|^(?: *-? *run:)? *)make ([a-z][a-z-]*)(?=`|$|  | #| [A-Z_]+=)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_jobs_and_targets_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(JOB.findall(text)) <= set(reporting.JOBS) and set(TARGET.findall(text)) <= set(targets)


@pytest.mark.parametrize("script", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.name)
def test_recipes_say_what_they_do(script):
    assert ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


CONFIGURATIONS = sorted((ROOT / "recipes/configs").rglob("*.yaml"))
OF_RECIPES = [path for path in CONFIGURATIONS if path.parent.name != "accelerate"]  # these: test_distributed.py


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda path: path.stem)
def test_figures_that_configurations_name_are_there(config):
    """What was measured by a configuration is committed, and what was not is not named."""
    for named in re.findall(r"^results: (benchmarks/\S+)", config.read_text(encoding="utf-8"), re.MULTILINE):
        assert (ROOT / named).is_file() or (ROOT / f"{named}.json").is_file(), named


@pytest.mark.parametrize("config", OF_RECIPES, ids=lambda path: path.stem)
def test_recipe_configurations_are_read(config, monkeypatch, tmp_path):
    """As they stand, on a machine without an accelerator as on one that has it: settings are known to the recipe of
    their folder, and model fields to their configuration."""
    from _lib.documents import DataArguments
    from _lib.settings import filled, read_settings
    from compare import CompareArguments, merged
    from compare_lra import CompareLraArguments, settings_of
    from finetune_glue import GlueArguments
    from finetune_summarization import SummarizationArguments
    from first_token_recall import RecallArguments
    from glue_baselines import BaselineArguments
    from length_extrapolation import ExtrapolationArguments
    from lm_eval_table import TableArguments
    from lra import LraArguments
    from mqar import MqarArguments, fields_of
    from per_token_loss import PerTokenArguments
    from pretrain_clm import ModelArguments
    from pretrain_mlm import MaskingArguments
    from pretrain_seq2seq import SpanArguments
    from rare_words import RareWordsArguments
    from scaling_law import ScalingArguments
    from transformers import CONFIG_MAPPING, Seq2SeqTrainingArguments, TrainingArguments
    from word_lm import WordArguments

    monkeypatch.chdir(tmp_path)  # away from the checkpoints of earlier runs
    monkeypatch.setenv("HF_HYBRID_SSM_DATA", str(tmp_path))
    pretraining = (ModelArguments, DataArguments, TrainingArguments)
    models = []
    if config.parent.name == "compare":
        (arguments,) = read_settings("compare.py", (CompareArguments,), [str(config)])
        for over in arguments.variants.values():
            settings = merged(arguments.base, over) | {"output_dir": str(tmp_path)}
            models.append(filled(pretraining, settings)[0])
    elif config.parent.name == "upcycle":
        from recall_kinds import RecallKindsArguments
        from recall_training import RecallTrainingArguments
        from upcycle import UpcycleArguments
        from upcycling_gaps import GapArguments
        from upcycling_recall import UpcyclingRecallArguments
        from upcycling_report import ReportArguments

        classes = (UpcycleArguments, DataArguments, TrainingArguments)
        if config.stem.startswith("gaps"):
            (arguments,) = read_settings("upcycling_gaps.py", (GapArguments,), [str(config)])
            for over in arguments.variants.values():
                settings = merged(arguments.base, over) | {"output_dir": str(tmp_path)}
                kinds = {"from_scratch", "teacher_goes_on", "intermediate_size"}
                filled(classes, {k: v for k, v in settings.items() if k not in kinds})
        elif config.stem.startswith("report"):
            (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
            read_settings("upcycling_report.py", (ReportArguments,), [str(config), "teacher=FOLDER"])
        elif config.stem.startswith("kinds_training"):
            read_settings(
                "recall_training.py", (RecallTrainingArguments, TrainingArguments), [str(config), "teacher=A"]
            )
        elif config.stem.startswith("kinds"):
            read_settings("recall_kinds.py", (RecallKindsArguments,), [str(config), "teacher=FOLDER"])
        elif config.stem.startswith("recall"):
            known = (UpcyclingRecallArguments, TrainingArguments)
            read_settings("upcycling_recall.py", known, [str(config)])
        else:
            read_settings("upcycle.py", classes, [str(config)])
    elif config.parent.name == "mqar":
        arguments, _ = read_settings("mqar.py", (MqarArguments, TrainingArguments), [str(config)])
        for given in arguments.models.values():
            family, fields = fields_of(given, 64, arguments.vocab_size)
            models.append(ModelArguments(family, config=fields))
    elif config == ROOT / "recipes/configs/length/families_books.yaml":
        with pytest.raises(FileNotFoundError, match="no such folder"):  # of models that compare.py trains
            read_settings("length_extrapolation.py", (ExtrapolationArguments,), [str(config)])
    elif config.parent.name == "recall":
        classes = (RecallArguments, TrainingArguments)
        arguments, _ = read_settings("first_token_recall.py", classes, [str(config)])
        for fields in (arguments.config | fields for fields in arguments.models.values()):
            models.append(ModelArguments(fields.pop("model_type"), config=fields))
    elif config.stem == "rare_words":
        (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
        read_settings("rare_words.py", (RareWordsArguments,), [str(config)])
    elif config.parent.name == "length":
        (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
        (arguments,) = read_settings("length_extrapolation.py", (ExtrapolationArguments,), [str(config)])
        for over in arguments.variants.values():
            settings = merged(arguments.base, over) | {"output_dir": str(tmp_path)}
            models.append(filled(pretraining, settings)[0])
    elif config.parent.name == "lm_eval":
        (tmp_path / "lm_eval_tasks").mkdir()
        read_settings("lm_eval_table.py", (TableArguments,), [str(config)])
    elif config.parent.name == "lra" and config.stem.startswith("spade"):
        (arguments,) = read_settings("compare_lra.py", (CompareLraArguments,), [str(config)])
        for settings in settings_of(arguments).values():
            parsed = filled((LraArguments, TrainingArguments), settings)
            models.append(parsed[0])
    elif config.parent.name == "lra":
        monkeypatch.setenv("HF_HYBRID_SSM_LRA", str(tmp_path))
        models.append(read_settings("lra.py", (LraArguments, TrainingArguments), [str(config)])[0])
    elif "seq2seq" in (config.parent.name, *config.stem.split("-")):
        classes = (SpanArguments, DataArguments, TrainingArguments)
        models.append(read_settings("pretrain_seq2seq.py", classes, [str(config)])[0])
    elif config.parent.name == "mlm":
        classes = (MaskingArguments, DataArguments, TrainingArguments)
        models.append(read_settings("pretrain_mlm.py", classes, [str(config)])[0])
    elif config.stem == "wikitext103":
        classes = (ModelArguments, WordArguments, TrainingArguments)
        models.append(read_settings("word_lm.py", classes, [str(config)])[0])
    elif config.stem == "ladder_cpu":
        (arguments,) = read_settings("scaling_law.py", (ScalingArguments,), [str(config)])
        for over in (over for members in arguments.families.values() for over in members.values()):
            settings = merged(arguments.base, over) | {"output_dir": str(tmp_path)}
            models.append(filled(pretraining, settings)[0])
    elif config.stem == "per_token_cpu":
        with pytest.raises(FileNotFoundError, match="no such folder"):  # read to the checkpoints, which are not here
            read_settings("per_token_loss.py", (PerTokenArguments,), [str(config)])
    elif config == ROOT / "recipes/configs/glue/baselines.yaml":
        read_settings("glue_baselines.py", (BaselineArguments,), [str(config)])
    elif config.parent.name == "glue":
        classes = (GlueArguments, TrainingArguments)
        read_settings(
            "finetune_glue.py",
            classes,
            [str(config), "from_scratch=false", "model_name_or_path=null", "model_type=spade"],
        )
    elif config.parent.name == "sft":
        pytest.importorskip("trl")
        from sft import SftArguments, SFTConfig

        read_settings("sft.py", (SftArguments, SFTConfig), [str(config), "model_name_or_path=FOLDER"])
        with pytest.raises(ValueError, match="model_name_or_path"):
            read_settings("sft.py", (SftArguments, SFTConfig), [str(config)])
    elif config.parent.name == "summarization":
        classes = (SummarizationArguments, Seq2SeqTrainingArguments)
        arguments, _ = read_settings("finetune_summarization.py", classes, [str(config)])
        if arguments.model_type is not None:
            models.append(ModelArguments(arguments.model_type, config=arguments.config))
    else:
        models.append(read_settings("pretrain_clm.py", pretraining, [str(config)])[0])
    for model in models:
        config_class = CONFIG_MAPPING[model.model_type]
        if model.preset is None:
            config_class(**model.config)
        else:
            config_class.preset(model.preset, **model.config)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/families").glob("*.md")), ids=lambda path: path.stem)
def test_the_reading_path_of_a_family_exists_and_leads_through_it(page):
    """The files in the order named; a reader meets each of them, by the counts of tools/reading_size.py."""
    from tools.reading_size import files_of

    text = page.read_text(encoding="utf-8")
    opening = text[: text.index("## Equations")]
    named = re.findall(r"^\d+\. `([\w/.]+)`: \S", opening, re.MULTILINE)
    package = ROOT / "src/hf_hybrid_ssm"
    reached = {path.relative_to(package).as_posix() for path in files_of(page.stem)}
    assert len(named) >= 8 and len(set(named)) == len(named)
    assert [path for path in named if path not in reached] == []
    folders = {path.split("/")[1] for path in named if path.startswith("models/") and path.count("/") == 2}
    assert folders == {page.stem}
    for skipped in re.findall(r"`((?:models|layers|ops)/[\w/.]*)`", opening):
        assert (package / skipped).exists(), skipped
    for beside in re.findall(r"`(\w+\.py)`", opening):
        assert any(package.rglob(beside)), beside


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shell_blocks_name_commands_that_exist(page):
    """Every line of a bash block: a verb of ours, a recipe and its configuration, a script, or a make target."""
    from hf_hybrid_ssm.cli import COMMANDS
    from hf_hybrid_ssm.cli.recipe import config_names, recipe_names

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["hf-hybrid-ssm"]:
                assert words[1] in COMMANDS, line
                if words[1] == "recipe":
                    assert words[2] in recipe_names(), line
                    named = [word for word in words[3:4] if "=" not in word and not word.startswith("-")]
                    assert set(named) <= set(config_names()), line
            elif words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
            elif words[:1] == ["python"] and not words[1].startswith("-"):
                assert (ROOT / words[1]).is_file(), line
