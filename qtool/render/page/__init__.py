"""A report as a document: a page of HTML, Markdown, a table of values, or one picture.

The only importer of jinja2 and matplotlib.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qtool import memory
from qtool.errors import QtoolError
from qtool.render.text import many, place, print_line, safe, size, stream

# Kind of document: the module that makes it, and the libraries that it needs.
_MODULES = {
    "html": ("html", ("jinja2", "matplotlib")),
    "png": ("overview", ("matplotlib",)),
    "md": ("markdown", ()),
    "csv": ("sheet", ()),
}
_DRAWING = 96 << 20  # bytes; OpenBLAS, which matplotlib calls, ends the process without its share


def drawer(kind: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], bytes]:
    """What makes that kind of document of a report and its pictures.

    Raises QtoolError where a library is missing, MemoryError where there is too little.
    """
    module, libraries = _MODULES[kind]
    for library in libraries:
        try:
            with _without_settings():
                importlib.import_module(library)
        except ModuleNotFoundError as error:
            raise QtoolError(
                f".{kind}", f"needs {library}", f"install it: pip install {library}"
            ) from error
    if libraries:
        memory.check(_DRAWING)
    document: Callable[[Mapping[str, Any], Mapping[str, Any]], bytes]
    document = importlib.import_module(f"qtool.render.page.{module}").document
    return document


@contextmanager
def _without_settings() -> Iterator[None]:
    """Let matplotlib be imported without a word, and without a user's settings or those of a file
    in the current folder, which could have it run LaTeX on what is drawn."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where it keeps its list of fonts
    os.environ["MATPLOTLIBRC"] = os.devnull
    os.environ.pop("MPLBACKEND", None)
    here = os.open(".", os.O_PATH)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def written(result: Mapping[str, Any]) -> None:
    """The lines of `report`, on standard error."""
    console = stream(err=True)
    for note in result["notes"]:
        print_line(console, f"warning: {safe(note)}", style="yellow")
    tensors = many(result["tensors"], "tensor")
    print_line(console, f"{place(result['output'])}: {tensors}, {size(result['output']['bytes'])}")
