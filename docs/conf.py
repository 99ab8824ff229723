"""The site, by Sphinx: `make site` writes it to build/site.

Sphinx with MyST and Furo, because it reads the pages as they are (links to files beside docs/ included), takes the API
reference from the docstrings, and searches without a server. The sources are the repository's root, so that README.md
is the front page.
"""

import gc
import html
import importlib.util
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import hf_hybrid_ssm
from hf_hybrid_ssm.repository import source_address

sys.path.insert(0, str(Path(__file__).parent))

import signatures

gc.set_threshold(20_000, 20, 50)  # else a sixth of the time goes into looking through pages that stay

project = "hf-hybrid-ssm"
author = "hf-hybrid-ssm contributors"
copyright = author
release = version = hf_hybrid_ssm.__version__

root_doc = "README"
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/notebooks/*.ipynb",
    "reports/**.md",
    "checkpoints/**.md",
    "examples/*.md",
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
if importlib.util.find_spec("sphinx_copybutton"):  # an environment that is older than this extra goes without
    extensions.append("sphinx_copybutton")
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
default_role = "literal"  # docstrings name code between single backticks
html_math_renderer = "mathml"
suppress_warnings = ["myst.header"]  # generated cards begin their sections at the second level
nitpicky = False

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_use_index = html_domain_indices = False  # too wide for a phone, and the search knows all names
html_title = f"{project} {release}"
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": ["view"]}  # the page as it is written
if address := source_address():
    html_theme_options["announcement"] = f'<a href="{html.escape(address)}">The sources of {project}</a>'

maximum_signature_line_length = 60  # longer ones have an argument a line
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# what Sphinx calls a table of contents, which pages need not show where they are read without Sphinx
CONTENTS = {
    "README": {
        "Use": [
            *("quickstart", "/examples/README", "fine_tuning", "training", "generating", "batching"),
            *("serving", "command_line", "upcycling", "sharing"),
        ],
        "Families": ["choosing", "families/longhorn", "families/spade", "families/bst", "families/lmu_isa", "layers"],
        "Evidence": ["experiments", "comparison", "quality"],
        "Project": ["limits", "troubleshooting", "extending", "reference"],
    },
    "examples/README": {"": ["notebooks/longhorn", "notebooks/upcycling"]},
    "docs/fine_tuning": {"": ["classification", "summarization"]},
    "docs/training": {"": ["scaling"]},
    "docs/sharing": {"": ["onnx", "executorch", "works_with"]},
    "docs/upcycling": {"": ["upcycling_tables"]},
    "docs/experiments": {
        "": [
            *("experiments_tables", "experiments_methods", "performance", "long", "reproducing"),
            "/checkpoints/README",
        ]
    },
    "docs/quality": {"": ["/reports/*"]},
    "docs/extending": {
        "": [
            *(
                "teaching/token",
                "teaching/s4d",
                "teaching/legendre_memory",
                "teaching/bst_block",
                "teaching/online_learners",
            ),
            *("kernels", "kernels_design", "first_card", "tensor_core_scan"),
            *("/CONTRIBUTING", "/SECURITY", "/CHANGELOG"),
        ]
    },
    "checkpoints/README": {"": ["/checkpoints/*/README", "/checkpoints/deltas/*/README"]},
}
ORPHANS = {"docs/README"}  # the list of pages, for readers of the repository


def add_contents(app, name, source):
    parts = [from_notebook(source[0]) if app.env.doc2path(name).suffix == ".ipynb" else source[0]]
    if name in ORPHANS:
        app.env.metadata[name]["orphan"] = ""
    for caption, pages in CONTENTS.get(name, {}).items():
        entries = "\n".join(page if page.startswith("/") else f"/docs/{page}" for page in pages)
        options = ":hidden:\n:glob:\n" + (f":caption: {caption}\n" if caption else "")
        parts.append(f"```{{toctree}}\n{options}\n{entries}\n```")
    source[0] = re.sub(r"<!-- classes: (\w+) -->", _classes_of, "\n\n".join(parts))


def from_notebook(text):
    """Markdown: the cells, with what they have printed and drawn."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if picture := data.get("image/png"):
                parts.append(f"![what the cell above draws](data:image/png;base64,{''.join(picture.split())})")
            elif "text/html" not in data:  # a bar
                parts.append(f"```text\n{''.join(data['text/plain'])}\n```")
    return "\n\n".join(parts)


def _classes_of(found):
    """The public classes of a family, configurations and bodies first."""
    names = [name for name in hf_hybrid_ssm.__all__ if name.startswith(found[1])]
    names.sort(key=lambda name: ("For" in name, not name.endswith("Config"), name))
    lines = []
    for name in names:
        shown = "preset" if name.endswith("Config") else "forward"
        lines += [f".. autoclass:: hf_hybrid_ssm.{name}", "", f"   .. automethod:: {shown}", ""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def read_markdown(app, what, name, obj, options, lines):
    """Docstrings are nearly reStructuredText: equations are indented, and code stands between fences."""
    text = "\n".join(lines)
    if what == "class":
        text = signatures.without_boilerplate(text)
    if re.fullmatch(r"hf_hybrid_ssm\.\w+\.forward", name):  # of a model, by its public name
        text = "\n".join(signatures.of_forward(obj))
    text = signatures.on_one_line(text)
    text = re.sub(r"\[`~?([\w.]+)`\]", r"`\1`", text)  # a link of transformers' own documentation
    text = re.sub(r"(?m)^( *)(?!Args|Raises|Returns|Example)(\S.*[^:\n]):\n\n(?=\1 +\S)", r"\1\2::\n\n", text)
    text = re.sub(r"\):\n +(?=\w)", "): ", text)  # an argument whose description begins on the next line
    text = re.sub(r"(?ms)^( *)```(\w+)\n(.*?)^ *```$", _code_block, text)
    # a bar stands for itself, unless it is in code
    bar = re.compile(r"\|(?=[^`]*(?:`[^`]*`[^`]*)*$)")
    lines[:] = [line if line[:1] in ("", " ") else bar.sub(r"\\|", line) for line in text.split("\n")]


def _code_block(found):
    indent, language, code = found.groups()
    inside = "\n".join(f"    {line}" if line.strip() else "" for line in code.split("\n"))
    return f"\n{indent}.. code-block:: {language}\n\n{inside}\n"


def write_math(translator, node):
    """As MathML, which browsers draw by themselves: nothing is loaded from elsewhere."""
    as_block = isinstance(node, nodes.math_block)
    code = re.sub(r"\\[bB]ig+[lr]?(?![a-z])", "", node.astext().strip())  # brackets grow by themselves
    if as_block and r"\\" in code and r"\begin" not in code:
        code = rf"\begin{{aligned}}{code}\end{{aligned}}"
    translator.body.append(with_accents(tex2mathml(code, as_block=as_block)))
    raise nodes.SkipNode


ACCENTS = {"\N{MODIFIER LETTER MACRON}", "\N{MODIFIER LETTER CIRCUMFLEX ACCENT}", "\N{SMALL TILDE}"}
MATHML = "http://www.w3.org/1998/Math/MathML"


def with_accents(mathml):
    """An accented letter with an index is <munderover> to docutils, index below; here the index stands beside it."""
    ET.register_namespace("", MATHML)
    mathml = re.sub(r"&(?!lt;|gt;|amp;|quot;)\w+;", lambda name: html.unescape(name[0]), mathml)  # XML knows no others
    root = ET.fromstring(mathml)  # of docutils' own making  # noqa: S314
    for element in root.iter(f"{{{MATHML}}}munderover"):
        letter, index, accent = element
        if (accent.text or "").strip() in ACCENTS:
            accented = ET.Element(f"{{{MATHML}}}mover", {"accent": "true"})
            accented.extend([letter, accent])
            element.tag = f"{{{MATHML}}}msub"
            element[:] = [accented, index]
    return ET.tostring(root, encoding="unicode")


def make_index(app, exception):
    """The front page under the name that servers look for."""
    if exception is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app):
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("autodoc-process-docstring", read_markdown, priority=400)  # before napoleon
    app.connect("source-read", add_contents)
    app.connect("build-finished", make_index)
