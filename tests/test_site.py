"""The site is built without a warning, and its links lead somewhere."""

import os
import re
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hf_hybrid_ssm
from tests import processes

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]
BAR, HAT = "\N{MODIFIER LETTER MACRON}", "\N{MODIFIER LETTER CIRCUMFLEX ACCENT}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As `make site` builds it; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs", "."]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    built = processes.run([*command, folder], cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


class Page(HTMLParser):
    """The targets of a page, its anchors, and whether it adapts to narrow screens."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.anchors, self.adapts = [], set(), False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]
        self.adapts |= given.get("name") == "viewport" and "width=device-width" in given.get("content", "")


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def test_every_page_is_there(site):
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").rglob("*.md"), *notebooks]:
        assert (site / path.relative_to(ROOT)).with_suffix(".html").is_file()
    for path in notebooks:  # with what they printed and drew
        page = (site / path.relative_to(ROOT)).with_suffix(".html").read_text(encoding="utf-8")
        assert "<img" in page and "highlight-text" in page, path


def test_links_and_pictures_lead_somewhere(site, pages):
    missing, inside = [], 0
    for path, page in pages.items():
        assert page.adapts, f"{path} does not adapt to a phone's width"
        for target in page.targets:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or target.startswith(("//", "data:")):
                continue
            found = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            inside += 1
            if not found.exists() or (parts.fragment and found in pages and not known(pages[found], parts.fragment)):
                missing.append(f"{path.relative_to(site)}: {target}")
    assert inside > 1000 and not missing, missing


def test_the_contents_fit_a_sidebar_and_reach_every_page(site, pages):
    """What is seen before a reader opens a part: at most 23 entries."""
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 10 < len(re.findall(r'<li class="toctree-l1', front)) <= 23
    listed = {
        urllib.parse.unquote(target) for target in re.findall(r'class="reference internal" href="([^"#]+)', front)
    }
    own = {path.relative_to(site).as_posix() for path in pages if "_modules" not in path.parts}
    assert own - listed == {"index.html", "README.html", "search.html"}
    assert not (site / "model_cards").exists()  # cards of models without weights


def known(page, fragment):
    return urllib.parse.unquote(fragment) in page.anchors


def test_equations_are_set_as_written(pages, site):
    r"""The index of \bar A_n and \hat q_t stands beside the accented letter, and `aligned` has its own columns."""
    bst = (site / "docs/families/bst.html").read_text(encoding="utf-8")
    for letter, index, accent in (("A", "n", BAR), ("q", "t", HAT)):
        text = re.sub(r">\s+<", "><", bst)
        accented = rf'<mover accent="true"><mi>{letter}</mi><mo stretchy="false">{accent}</mo></mover><mi>{index}</mi>'
        assert f"<msub>{accented}</msub>" in text
    assert not re.search(rf"<munderover>\s*<mi>\w</mi>\s*<mi>\w</mi>\s*<mo[^>]*>[{BAR}{HAT}]", bst)
    assert 'class="ams-align"' in bst and "site.css" in bst and (site / "_static/site.css").is_file()


def test_nothing_is_loaded_from_elsewhere(pages):
    """Neither fonts nor scripts: the site works without a network, and tells nobody who reads it."""
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, path


def test_the_reference_has_every_public_name(pages, site):
    anchors = pages[site / "docs/reference.html"].anchors
    missing = {name for name in hf_hybrid_ssm.__all__ if not any(anchor.split(".")[-1] == name for anchor in anchors)}
    assert not missing
    for name in ("ops.longhorn_scan", "upcycle.upcycle", "hub.export_kernels", "hub.check_contents"):
        assert f"hf_hybrid_ssm.{name}" in anchors


def test_the_search_knows_words_of_pages_and_docstrings(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("longhorn", "perplex", "seq_idx", "quantiz"):
        assert word in index
