"""The site is built without a warning, its links lead somewhere, and a phone shows it without scrolling sideways."""

import functools
import http.server
import os
import re
import shutil
import sys
import threading
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hf_hybrid_ssm
from tests import processes

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of the browsers {', '.join(BROWSERS)} is installed")
BAR, HAT = "\N{MODIFIER LETTER MACRON}", "\N{MODIFIER LETTER CIRCUMFLEX ACCENT}"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1440, "height": 1000}


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
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").rglob("*.md")]:
        assert (site / path.relative_to(ROOT)).with_suffix(".html").is_file()


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
    """What is seen before a reader opens a part: at most twenty entries."""
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 10 < len(re.findall(r'<li class="toctree-l1', front)) <= 20
    listed = {
        urllib.parse.unquote(target) for target in re.findall(r'class="reference internal" href="([^"#]+)', front)
    }
    own = {path.relative_to(site).as_posix() for path in pages if "_modules" not in path.parts}
    assert own - listed == {"index.html", "README.html", "search.html"}
    assert not (site / "model_cards").exists()  # cards of models without weights


def test_code_can_be_copied(site):
    pytest.importorskip("sphinx_copybutton")
    assert "copybutton.js" in (site / "docs/quickstart.html").read_text(encoding="utf-8")


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
    for name in ("ops.longhorn_scan.longhorn_scan", "upcycle.upcycle", "hub.export_kernels", "hub.check_contents"):
        assert f"hf_hybrid_ssm.{name}" in anchors


def test_the_reference_says_what_goes_in_and_out_and_nothing_twice(pages, site):
    """Every model's `forward` with its inputs and what it returns; no text that transformers gives each of its own."""
    text = (site / "docs/reference.html").read_text(encoding="utf-8")
    anchors = pages[site / "docs/reference.html"].anchors
    models = [name for name in hf_hybrid_ssm.__all__ if not name.endswith("Config") and name[0].isupper()]
    for name in models:
        assert f"hf_hybrid_ssm.{name}.forward" in anchors
    returned = "transformers\N{RIGHT SINGLE QUOTATION MARK} <code"
    assert text.count("Inputs of every model (above)") == len(models) == text.count(returned)
    for words in ("This model inherits from", "glossary#", "&lt;Tip&gt;", "[<code", "Bases:"):
        assert words not in text, words
    assert not re.search(r"Return type<span", text)  # `Returns:` is a sentence, not "type: sentence"


def test_the_search_shows_excerpts(site):
    """Which it cuts from the sources of the pages, as they were built."""
    page = (site / "search.html").read_text(encoding="utf-8")
    assert "searchtools.js" in page and 'data-content_root="./"' in page
    options = (site / "_static/documentation_options.js").read_text(encoding="utf-8")
    assert "SHOW_SEARCH_SUMMARY: true" in options


def test_the_search_knows_words_of_pages_and_docstrings(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("longhorn", "perplex", "seq_idx", "quantiz"):
        assert word in index


@pytest.fixture(scope="module")
def browser():
    """Debian's chromium or an installed Chrome, driven by playwright."""
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


READ = """() => ({
    width: Math.max(...[...document.querySelectorAll("html, .content")].map(element => element.scrollWidth)),
    broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
})"""


@in_a_browser
def test_a_browser_shows_every_page_on_a_phone(site, pages, browser, address):
    phone = browser.new_page(viewport=PHONE)
    problems = []
    phone.on("pageerror", lambda error: problems.append(f"{phone.url}: {error}"))

    def note(said):  # the console's errors; that there is no icon is none of a page's
        if said.type == "error" and not said.location["url"].endswith("favicon.ico"):
            problems.append(f"{phone.url}: {said.text}")

    phone.on("console", note)
    phone.on("response", lambda answer: answer.status < 400 or problems.append(f"{answer.url}: {answer.status}"))
    for path in pages:
        if "_modules" in path.parts:
            continue
        phone.goto(f"{address}/{path.relative_to(site).as_posix()}", wait_until="load")
        found = phone.evaluate(READ)
        if found["width"] > PHONE["width"] or found["broken"]:
            problems.append(f"{path.relative_to(site)}: {found}")
    phone.close()
    assert not problems, "\n".join(problems)


TABLES = """() => [...document.querySelectorAll("article table.docutils")].map(table => {
    const box = table.parentElement, first = [...table.querySelectorAll("td:first-child")];
    box.scrollLeft = box.scrollWidth;
    const edge = box.getBoundingClientRect().left;
    return {
        scrolls: box.scrollWidth <= box.clientWidth || getComputedStyle(box).overflowX === "auto",
        first: box.scrollWidth <= box.clientWidth
            || first.every(cell => Math.abs(cell.getBoundingClientRect().left - edge) < 5),
        text: Math.min(200, ...[...table.querySelectorAll("td:not(.text-right)")].map(cell => cell.offsetWidth)),
    };
})"""


@in_a_browser
def test_tables_can_be_read_on_a_phone(browser, address):
    """They scroll in their box, the first column stays, and no column of text is a word wide."""
    phone, seen = browser.new_page(viewport=PHONE), 0
    for name in (
        "README",
        "docs/choosing",
        "docs/comparison",
        "docs/experiments",
        "docs/upcycling",
        "docs/performance",
    ):
        phone.goto(f"{address}/{name}.html", wait_until="load")
        for found in phone.evaluate(TABLES):
            seen += 1
            assert found["scrolls"] and found["first"] and found["text"] >= 80, (name, found)
    assert seen > 20
    phone.close()


def test_signatures_have_an_argument_a_line(site):
    text = (site / "docs/reference.html").read_text(encoding="utf-8")
    signature = text[text.index('id="hf_hybrid_ssm.LonghornConfig"') :].partition("</dt>")[0]
    assert signature.count("<dd>") > 20


def test_a_page_of_a_family_shows_its_use_before_its_equations(site):
    for page in sorted((ROOT / "docs/families").glob("*.md")):
        text = (site / f"docs/families/{page.stem}.html").read_text(encoding="utf-8")
        assert text.index('id="use-it"') < text.index('id="equations"')


def test_every_page_shows_its_source(site):
    text = (site / "docs/quickstart.html").read_text(encoding="utf-8")
    assert "_sources/docs/quickstart.md.txt" in text and (site / "_sources/docs/quickstart.md.txt").is_file()


OVERFLOWING = """() => [
    [...document.querySelectorAll("article div.highlight-python pre")]
        .filter(code => code.scrollWidth > code.clientWidth + 1).length,
    document.documentElement.scrollWidth,
]"""


@in_a_browser
def test_code_fits_its_box_on_a_desktop(site, pages, browser, address):
    desktop = browser.new_page(viewport=DESKTOP)
    problems = []
    for path in pages:
        if "docs" in path.relative_to(site).parts:
            desktop.goto(f"{address}/{path.relative_to(site).as_posix()}", wait_until="load")
            too_wide, width = desktop.evaluate(OVERFLOWING)
            if too_wide or width > DESKTOP["width"]:
                problems.append(f"{path.relative_to(site)}: {too_wide} blocks, {width} pixels")
    desktop.close()
    assert not problems, "\n".join(problems)


@in_a_browser
def test_a_browser_searches(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/search.html?q=rollback")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    assert "batching" in page.inner_text("#search-results").lower()
    page.wait_for_selector("#search-results p.context", timeout=20_000)  # an excerpt of the page
    page.close()


@in_a_browser
def test_a_browser_copies_the_code_that_is_shown(browser, address):
    """Every block of a page has its button, and what it copies is what the page shows, without prompts."""
    pytest.importorskip("sphinx_copybutton")
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{address}/docs/quickstart.html")
    page.wait_for_selector("button.copybtn", state="attached")
    blocks = page.locator("div.highlight > pre")
    assert blocks.count() == page.locator("button.copybtn").count() > 4
    for number in range(blocks.count()):
        page.locator("button.copybtn").nth(number).click(force=True)
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.strip() == blocks.nth(number).inner_text().strip()
    context.close()
