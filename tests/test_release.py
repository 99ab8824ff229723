"""What is released: one version, a wheel that works without the repository, a source distribution with everything."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import hf_hybrid_ssm
from tests import processes

ROOT = Path(__file__).parents[1]


HATCHLING_IN_HASTE = """
import functools, gzip
gzip.GzipFile = functools.partial(gzip.GzipFile, compresslevel=0)
from hatchling.cli import hatchling
hatchling()
"""  # 48 megabytes of pictures and weights hardly become smaller


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-c", HATCHLING_IN_HASTE, "build", "-d", folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel's files, in a folder that is named as folders of users are."""
    folder = tmp_path_factory.mktemp("Größe und Maß") / "site packages"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(folder)
    return folder


def run(*command, cwd=ROOT, path=None):
    """By subprocess; with the path of an installation, as if it alone were installed, by a fork."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        done = processes.run(command, cwd=cwd, env=environment | {"PYTHONPATH": str(path)})
    else:
        command = [*map(str, command)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"] and "version" not in project
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == hf_hybrid_ssm.__version__
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]


def test_the_citation_has_what_its_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] in ("software", "dataset")
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
    assert not citation.keys() - {
        *("cff-version", "message", "title", "type", "authors", "version", "license", "keywords", "abstract"),
        *("date-released", "repository-code", "url", "references", "preferred-citation", "identifiers", "doi"),
    }


def test_the_wheel_has_kernels_and_recipes_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names} == {
        "hf_hybrid_ssm",
        f"hf_hybrid_ssm-{hf_hybrid_ssm.__version__}.dist-info",
    }
    for folder in ("src/hf_hybrid_ssm", "recipes"):
        inside = "hf_hybrid_ssm" + ("/recipes" if folder == "recipes" else "")
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".c", ".h", ".yaml", ".typed") and "__pycache__" not in path.parts:
                assert f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_the_source_distribution_has_tests_recipes_and_docs(built):
    with tarfile.open(built[1]) as distribution:
        inside = {name.partition("/")[2] for name in distribution.getnames()}
    committed = ["benchmarks/results/long_context.png", "tests/test_release.py", "model_cards/README.md", "Makefile"]
    for wanted in (*committed, "docs/training.md", "recipes/demo.py", "constraints.txt", "CITATION.cff", "LICENSE"):
        assert wanted in inside
    assert not [name for name in inside if name.startswith((".git/", ".venv", "build/", "runs/", "findings"))]


def test_the_metadata_can_be_shown_anywhere(built):
    with zipfile.ZipFile(built[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == hf_hybrid_ssm.__version__ and metadata["Author"]
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    page = metadata.get_payload()
    assert page.startswith("# hf-hybrid-ssm") and "pip install" in page
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets and all(target.startswith("https://") for target in targets), targets


def test_the_installed_package_runs(installed, tmp_path):
    code = """
import json, pathlib, hf_hybrid_ssm
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("longhorn", vocab_size=16, hidden_size=16, num_hidden_layers=1)
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained("Modell ä", export_code=True)
AutoModelForCausalLM.from_pretrained("Modell ä", local_files_only=True)
print(json.dumps([hf_hybrid_ssm.__file__, hf_hybrid_ssm.__version__]))
"""
    where, version = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, path=installed).splitlines()[-1])
    assert Path(where).is_relative_to(installed) and version == hf_hybrid_ssm.__version__


@pytest.mark.parametrize("recipe", ["demo.py", "pretrain_clm.py", "sft.py"])
def test_installed_recipes_start(installed, tmp_path, recipe):
    if recipe == "sft.py":
        pytest.importorskip("trl")
    script = installed / "hf_hybrid_ssm/recipes" / recipe
    assert "usage" in run(sys.executable, script, "--help", cwd=tmp_path, path=installed)


def test_git_urls_install(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    if not (ROOT / ".git").exists():
        pytest.skip("not a repository")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", tmp_path / "there"]
    run(sys.executable, "-m", "pip", *install, f"git+{ROOT.as_uri()}")
    assert (tmp_path / "there/hf_hybrid_ssm/ops/longhorn_scan/native.c").is_file()
    assert (tmp_path / "there/hf_hybrid_ssm/recipes/demo.py").is_file()


# -- workflows, templates, container --------------------------------------------------------------------------------

GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_workflows_and_templates_are_read(path):
    """Not run: what they name is there, every job ends, and none may write more than it needs."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "ISSUE_TEMPLATE":
        assert content.keys() >= {"name", "description", "body"} or content == {"blank_issues_enabled": True}
        return
    assert content["permissions"] == {"contents": "read"} and content[True]  # YAML 1.1 reads `on` as true
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in content["jobs"].values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"])
            for target in re.findall(r"^make ([a-z]+)", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", text, re.MULTILINE), target
            for file in re.findall(r"\btests/[\w./]+", step.get("run", "")):
                assert (ROOT / file).exists(), file


def test_the_container_is_made_of_files_that_are_there():
    """Not built here: instructions are known, copied files exist and are not ignored, and no layer keeps a cache."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("FROM ") and ":latest" not in lines[0]
    assert {line.split()[0] for line in lines} <= {"FROM", "RUN", "ARG", "COPY", "USER", "WORKDIR", "CMD"}
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for line in lines:
        match line.split():
            case ["COPY", *sources, _]:
                assert all((ROOT / source).exists() and source in allowed for source in sources)
            case ["RUN", "pip", *rest]:
                assert "--no-cache-dir" in rest and "--constraint" in rest
    kinds = [line.split()[0] for line in lines]
    assert kinds.index("USER") < kinds.index("CMD")  # nothing runs as root
    assert "hf-hybrid-ssm" in json.loads(lines[-1].removeprefix("CMD "))
