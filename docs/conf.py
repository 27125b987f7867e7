"""Sphinx settings of the documentation site: `make docs` builds it into docs/_build/html.

Pages need no network when they are read: MathML instead of a script for formulas, a theme without remote fonts. Links
into the documentation of other libraries need one when the site is built, and are made if GPEXT_DOCS_ONLINE is set.
With GPEXT_DOCS_EXECUTE=0 no code is run, and the pages have no outputs: enough to check them (`make docs-check`).
"""

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings  # noqa: E402
import gallery  # noqa: E402
import landing  # noqa: E402
import public  # noqa: E402

import gpext  # noqa: E402

os.environ["KEOPS_VERBOSE"] = "0"  # in executed pages: KeOps would say that there is no GPU
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # likewise tqdm that there are no widgets

_EXECUTE = os.environ.get("GPEXT_DOCS_EXECUTE", "1") == "1"

project = "gpext"
author = "The gpext developers"
copyright = author
release = version = gpext.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
]
exclude_patterns = ["_build"]

pygments_style = "default"
pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"gpext {release}"
html_static_path = ["_static"]
html_css_files = ["gpext.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00599a", "color-brand-content": "#00599a"},
    "dark_css_variables": {"color-brand-primary": "#6cb6f0", "color-brand-content": "#6cb6f0"},
}
copybutton_exclude = ".linenos, .gp, .go"  # copies a doctest without its prompts and output

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache" if _EXECUTE else "off"
suppress_warnings = [] if _EXECUTE else ["myst-nb.lexer"]  # the language is known from execution alone
nb_execution_cache_path = str(HERE / "_build" / "executed")
nb_execution_excludepatterns = ["gallery/*"]  # executed by gallery.py
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "groupwise"}
default_role = "code"  # single backticks
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100

_ONLINE = {
    "arviz": "https://python.arviz.org/en/stable/",
    "botorch": "https://botorch.readthedocs.io/en/stable/",
    "gpytorch": "https://docs.gpytorch.ai/en/stable/",
    "pyro": "https://docs.pyro.ai/en/stable/",
    "python": "https://docs.python.org/3/",
    "sklearn": "https://scikit-learn.org/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
intersphinx_mapping = {name: (url, None) for name, url in _ONLINE.items() if "GPEXT_DOCS_ONLINE" in os.environ}
nitpick_ignore_regex = [
    ("py:.*", r"(?!gpext\.).*"),  # names of other libraries: unknown without a network
    ("py:(class|exc)", r"gpext\.(\w+\.){2,}\w+|gpext\.saving\._Model"),  # internal types in annotations
]


def mathml(tex: str, display: str) -> str:
    """Return a formula as MathML, which browsers draw and screen readers read; ValueError if a command is unknown."""
    result = convert(tex.replace("{aligned}", "{align*}"), display=display).replace(r"\_", "_")
    if "\\" in result or "<mi>&</mi>" in result:
        raise ValueError(f"latex2mathml does not know a command of {tex!r}")
    return re.sub(r"(<mi>[a-z]{2,}</mi>)(?=<m[infrsu])", r'\1<mspace width="0.17em" />', result)  # log p, not logp


def inline_math(writer, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block_math(writer, node: nodes.math_block) -> None:
    """Write a displayed formula, with its number if it has one."""
    writer.body.append(writer.starttag(node, "div", CLASS="math"))
    number = f'<span class="eqno">({node["number"]})</span>' if node["number"] else ""
    writer.body.append(number + mathml(node.astext(), "block") + "</div>")
    raise nodes.SkipNode


def resolve_public_name(app, env, node, content):
    """Lead a reference to where an object is defined, as of annotations, to the public name that is documented."""
    name = public.names().get(node.get("reftarget"))
    if name is not None:
        python = env.get_domain("py")
        return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def setup(app):
    """Register the renderer of formulas, and what is drawn and converted before pages are read."""
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", docstrings.skip)
    app.connect("missing-reference", resolve_public_name)
    landing.draw(HERE / "_build" / "figures")
    gallery.write(HERE / "gallery", _EXECUTE)


html_math_renderer = "mathml"
