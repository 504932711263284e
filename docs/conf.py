"""Sphinx: `make docs` builds the pages of this directory into `_build/html`, from nothing but them
and the docstrings. Each page is plain Markdown, so that a code host shows it too."""

from importlib import metadata

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers
from sphinx.pycode import ModuleAnalyzer

project = "TaskRunner"
author = "the authors of TaskRunner"
copyright = author
version = release = metadata.version("redis-taskrunner")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
lexers["acl"] = TextLexer()  # Redis's own language for rights

myst_heading_anchors = 3

default_role = "py:obj"  # what docstrings put in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"TaskRunner {version}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

# One signature for each name: overloads are for type checkers.
_analyzer = ModuleAnalyzer.for_module("taskrunner.task")
_analyzer.analyze()
_analyzer.overloads.clear()
