"""What the documentation shows runs as a reader pastes it, what it links exists, what it counts was measured."""

import ast
import importlib
import os
import re
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks.tables import rendered
from hf_hybrid_ssm.cli import COMMANDS
from hf_hybrid_ssm.hub.sources import needed_modules
from hf_hybrid_ssm.models import FAMILIES, family_of
from tests import reporting

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "reports").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "checkpoints/README.md", *sorted((ROOT / "docs").rglob("*.md")), *REPORTS]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# a lesson goes on from block to block, and says so
LESSONS = ("docs/teaching/", "docs/families/", "docs/extending.md")
SCRIPTS = ("docs/first_card.md",)  # for the bash of a machine that is lent, in order


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(params=PAGES, ids=name_of)
def page(request):
    return request.param


def blocks_of(page, language):
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(code) for _, kind, code in found if kind == language]


def runs_of(page):
    """The blocks of Python that run together: all of a lesson; elsewhere each with the first, and of README alone."""
    blocks = blocks_of(page, "python")
    if page.name == "README.md" and page.parent == ROOT:
        return [[block] for block in blocks]
    if name_of(page).startswith(LESSONS) or len(blocks) == 1:
        return [blocks]
    return [[blocks[0], block] for block in blocks[1:]]


RUNS = [
    pytest.param(blocks, id=f"{name_of(page)}-{number}")
    for page in PAGES
    if blocks_of(page, "python")
    for number, blocks in enumerate(runs_of(page))
]
NEEDED = {
    "from trl import": ("trl",),
    "import onnxruntime": ("onnxscript", "onnxruntime"),
    "from executorch": ("executorch",),
}


@pytest.fixture
def run_blocks(tmp_path, monkeypatch):
    """Run blocks of Python one after the other, in a folder that has a clone's checkpoints."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("documentation")  # which can be imported, as a notebook's `__main__`
    monkeypatch.setitem(sys.modules, "documentation", module)
    families = [*FAMILIES]

    def run(blocks):
        for block in blocks:
            block = block if torch.cuda.is_available() else block.replace('device="cuda"', 'device="cpu"')
            exec(compile(block, "documentation", "exec"), vars(module))

    yield run
    FAMILIES[:] = families  # without those that a page registers


@pytest.mark.parametrize("blocks", RUNS)
def test_python_runs(blocks, run_blocks):
    """What is for CUDA, on the CPU where there is none."""
    for words, packages in NEEDED.items():
        if any(words in block for block in blocks):
            for package in packages:
                pytest.importorskip(package)
    run_blocks(blocks)


def test_the_first_example_writes_what_is_shown_and_warns_of_nothing(run_blocks, capfd):
    run_blocks(blocks_of(ROOT / "README.md", "python")[:1])
    said = capfd.readouterr()
    assert "token_id" not in said.err and said.out == blocks_of(ROOT / "README.md", "text")[0]


SHELL_BLOCKS = [
    pytest.param(block, name_of(page) in SCRIPTS, id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks_of(page, "bash"))
]


def lines_of(block):
    """The commands of a block, and before them the variables that it sets."""
    lines = block.replace("\\\n", " ").splitlines()
    variables = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]+=\S*$", line))
    return variables, [line for line in lines if line.strip() and not re.match(r"[A-Z]+=\S*$", line)]


def expected_words(block):
    """What programs are to get, by Python's own reading of a shell's words."""
    variables, lines = lines_of(block)
    found = []
    for line in lines:
        words = shlex.split(re.sub(r" > \S+$", "", line), comments=True)
        words = [re.sub(r"\$([A-Z]+)", lambda name: variables.get(name[1], name[0]), word) for word in words]
        if words[:1] not in ([], ["cd"]):  # which is the shell's own
            found.append([Path(words[0]).name, *map(os.path.expanduser, words[1:])])
    return found


@pytest.mark.parametrize(("block", "is_script"), SHELL_BLOCKS)
def test_every_command_accepts_its_arguments(block, is_script):
    """By the parser of the command, without running it; no comment and no bare bracket, which zsh reads otherwise."""
    from hf_hybrid_ssm.cli.recipe import check_settings

    if not is_script:
        assert not re.search(r"(^|\s)#|\[", re.sub(r"'[^']*'|\"[^\"]*\"", "", block))
    for program, *words in expected_words(block):
        if program == "python" and not words[0].startswith("-"):
            assert (ROOT / words[0]).is_file(), words
        if program == "python" and words[0].startswith("recipes/"):
            name, words = Path(words[0]).stem, words[1:]
            check_settings(name, [word for word in words if word != "..."])
        elif program == "hf-hybrid-ssm":
            command, *rest = words
            assert command in COMMANDS
            if command == "recipe":
                check_settings(rest[0], rest[1:])
            elif command not in ("run", "eval"):  # what these start reads the rest
                importlib.import_module(f"hf_hybrid_ssm.cli.{command}").build_parser().parse_args(rest)


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


@pytest.mark.parametrize("page", OF_KERNELS, ids=name_of)
def test_who_reads_of_kernels_for_gpus_reads_that_they_never_ran_on_one(page):
    """Until `make gpu` has left a page about one."""
    if not (ROOT / "reports" / "gpu.md").exists():
        assert re.search(r"never\s+run\s+on\s+a\s+GPU|ever\s+run\s+on\s+a\s+GPU", page.read_text(encoding="utf-8"))


def test_every_picture_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = sorted((ROOT / "benchmarks/results").glob("*.png"))
    assert pictures and [path.name for path in pictures if f"/{path.name})" not in text] == []


def test_tables_show_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert rendered(text) == text, "run python benchmarks/tables.py"


def test_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"`python ((?:recipes|benchmarks)/[^`]+)`", text):
        for word in shlex.split(command):
            if word.startswith(("recipes/", "benchmarks/")):
                assert (ROOT / word).exists(), f"{page.name} names {word}"


JOB = re.compile(r"-m tests\.reporting ([a-z][a-z-]*)")
TARGET = re.compile(r"(?:`|^(?: *-? *run:)? *)make ([a-z][a-z-]*)(?=`|$|  | #| [A-Z_]+=)", re.MULTILINE)


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
    """The files in the order named, with those that are skipped and those beside them."""
    text = page.read_text(encoding="utf-8")
    opening = text[: text.index("## Equations")]
    named = re.findall(r"^\d+\. `([\w/.]+)`: \S", opening, re.MULTILINE)
    package = ROOT / "src/hf_hybrid_ssm"
    needed = needed_modules(sorted(set(family_of(page.stem).module_of.values())))
    reached = {module.path.relative_to(package).as_posix() for module in needed}
    assert len(named) >= 6 and len(set(named)) == len(named)
    assert [path for path in named if path not in reached] == []
    folders = {path.split("/")[1] for path in named if path.startswith("models/") and path.count("/") == 2}
    assert folders == {page.stem}
    for skipped in re.findall(r"`((?:models|layers|ops)/[\w/.]*)`", opening):
        assert (package / skipped).exists(), skipped
    for beside in re.findall(r"`(\w+\.py)`", opening):
        assert any(package.rglob(beside)), beside
