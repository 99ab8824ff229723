"""What the documentation shows runs, what it links exists, what it counts was measured."""

import ast
import importlib
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

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


def test_versions_that_the_page_of_programs_names_are_those_tested():
    files = ["constraints.txt", "tests/matrix/requirements.txt", "tests/serving/engine/requirements.txt"]
    pinned = dict(
        line.split("==") for name in files[::-1] for line in (ROOT / name).read_text().split() if "==" in line
    )
    row = r"^\| \[([\w-]+)\]\(.*?\) \| ([\d.]+).*? \| `(tests/[\w/.]+)` \|$"
    rows = re.findall(row, (ROOT / "docs/works_with.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 12
    for program, version, test in rows:
        assert pinned[program] == version and (ROOT / test).exists(), program


CONFIGURATIONS = sorted((ROOT / "recipes/configs").rglob("*.yaml"))
OF_RECIPES = [path for path in CONFIGURATIONS if path.parent.name != "accelerate"]  # these: test_distributed.py


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda path: path.stem)
def test_figures_that_configurations_name_are_there(config):
    """What was measured by a configuration is committed, and what was not is not named."""
    for named in re.findall(r"^results: (benchmarks/\S+)", config.read_text(encoding="utf-8"), re.MULTILINE):
        assert (ROOT / named).is_file() or (ROOT / f"{named}.json").is_file(), named


# how a configuration's name begins → its recipe, and what the recipe has to be told besides
RECIPES = {
    "checkpoints/spade-encoder": ("pretrain_mlm",),
    "checkpoints/spade-seq2seq": ("pretrain_seq2seq",),
    "compare/": ("compare",),
    "glue/baselines": ("glue_baselines",),
    "glue/": ("finetune_glue", "from_scratch=false", "model_name_or_path=null", "model_type=spade"),
    "length/rare_words": ("rare_words",),
    "length/": ("length_extrapolation",),
    "lm_eval/": ("lm_eval_table",),
    "lmu_isa/ladder": ("scaling_law",),
    "lmu_isa/per_token": ("per_token_loss",),
    "lra/spade": ("compare_lra",),
    "lra/": ("lra",),
    "mlm/": ("pretrain_mlm",),
    "mqar/": ("mqar",),
    "recall/": ("first_token_recall",),
    "seq2seq/": ("pretrain_seq2seq",),
    "sft/": ("sft", "model_name_or_path=FOLDER"),
    "spade/wikitext103": ("word_lm",),
    "summarization/": ("finetune_summarization",),
    "upcycle/gaps": ("upcycling_gaps",),
    "upcycle/kinds_training": ("recall_training", "teacher=FOLDER"),
    "upcycle/kinds": ("recall_kinds", "teacher=FOLDER"),
    "upcycle/report": ("upcycling_report", "teacher=FOLDER"),
    "upcycle/": ("upcycle",),
    "": ("pretrain_clm",),
}
OF_TRAINED_MODELS = ("length/families_books", "lmu_isa/per_token_cpu")  # which other recipes train
# recipes that train variants by another recipe's settings, and what is their own in a variant
BY_ANOTHER = {"compare": "pretrain_clm", "length_extrapolation": "pretrain_clm", "scaling_law": "pretrain_clm"}
BY_ANOTHER |= {"upcycling_gaps": "upcycle"}
OF_GAPS = {"from_scratch", "teacher_goes_on", "intermediate_size"}


def classes_of(name):
    """The classes of arguments that a recipe hands to `start`."""
    module = importlib.import_module(name)
    calls = (node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call))
    (call,) = (node for node in calls if ast.unparse(node.func) == "start")
    return tuple(getattr(module, argument.id) for argument in call.args[2:])


def variants_of(arguments):
    """The settings of each model that a comparison trains."""
    from compare import merged

    groups = arguments.families.values() if hasattr(arguments, "families") else [arguments.variants]
    overs = [over for group in groups for over in group.values()]
    return [{k: v for k, v in merged(arguments.base, over).items() if k not in OF_GAPS} for over in overs]


@pytest.mark.parametrize("config", OF_RECIPES, ids=lambda path: path.stem)
def test_recipe_configurations_are_read(config, monkeypatch, tmp_path):
    """As they stand, on a machine without an accelerator as on one that has it: settings are known to the recipe of
    their folder, and model fields to their configuration."""
    from _lib.settings import filled, read_settings

    monkeypatch.chdir(tmp_path)  # away from the checkpoints of earlier runs
    monkeypatch.setenv("HF_HYBRID_SSM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HYBRID_SSM_LRA", str(tmp_path))
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "lm_eval_tasks").mkdir()
    known = config.relative_to(ROOT / "recipes/configs").with_suffix("").as_posix()
    recipe, *more = next(found for begin, found in RECIPES.items() if known.startswith(begin))
    if recipe == "sft":
        pytest.importorskip("trl")
    read = partial(read_settings, f"{recipe}.py", classes_of(recipe))
    if known in OF_TRAINED_MODELS:
        with pytest.raises(FileNotFoundError, match="no such folder"):
            read([str(config)])
        return
    arguments, *_ = read([str(config), *more])
    models = [arguments] if getattr(arguments, "model_type", None) and recipe != "finetune_glue" else []
    if recipe in BY_ANOTHER:
        of_recipe = classes_of(BY_ANOTHER[recipe])
        settings = [each | {"output_dir": str(tmp_path)} for each in variants_of(arguments)]
        models = [filled(of_recipe, each)[0] for each in settings]
        models = [] if recipe == "upcycling_gaps" else models  # whose students are made of a teacher
    elif recipe == "compare_lra":
        from compare_lra import settings_of

        models = [filled(classes_of("lra"), settings)[0] for settings in settings_of(arguments).values()]
    elif recipe in ("mqar", "first_token_recall"):
        from mqar import fields_of

        def of_model(given):
            if recipe == "mqar":
                return fields_of(given, 64, arguments.vocab_size)
            return given.pop("model_type"), arguments.config | given

        families = (of_model(dict(given)) for given in arguments.models.values())
        models = [SimpleNamespace(model_type=family, preset=None, config=fields) for family, fields in families]
    for model in models:
        config_class = CONFIG_MAPPING[model.model_type]
        if getattr(model, "preset", None) is None:
            config_class(**model.config)
        else:
            config_class.preset(model.preset, **model.config)


def test_a_folder_is_needed_to_fine_tune_a_chat_model():
    pytest.importorskip("trl")
    from _lib.settings import read_settings

    with pytest.raises(ValueError, match="model_name_or_path"):
        read_settings("sft.py", classes_of("sft"), [str(ROOT / "recipes/configs/sft/local.yaml")])


@pytest.mark.parametrize("page", sorted((ROOT / "docs/families").glob("*.md")), ids=lambda path: path.stem)
def test_the_reading_path_of_a_family_exists_and_leads_through_it(page):
    """The files in the order named; a reader meets each of them, by the counts of tools/reading_size.py."""
    from tools.reading_size import files_of

    text = page.read_text(encoding="utf-8")
    opening = text[: text.index("## Equations")]
    named = re.findall(r"^\d+\. `([\w/.]+)`: \S", opening, re.MULTILINE)
    package = ROOT / "src/hf_hybrid_ssm"
    reached = {path.relative_to(package).as_posix() for path in files_of(page.stem)}
    assert len(named) >= 6 and len(set(named)) == len(named)
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
