"""The page: everything is in it, nothing is fetched, and what is shown can't become markup."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from neuron_pushkv.errors import ConfigError
from neuron_pushkv.report.page import Page
from neuron_pushkv.report.plots import Series, lines


class Elements(HTMLParser):
    """Names of elements, with what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def page() -> Page:
    made = Page("<b>bench</b>", {"machine": "2 cores & more"})
    made.heading("Load")
    made.text("KV went over <tcp>", warning=True)
    made.table("Times", ["rate", "TTFT"], [["1", "<12>"], ["2", "13"]])
    made.plot(lines([Series("<script>", (1, 2), (3.0, 4.0))], title="a & b", x_label="x", y_label="y"), "a caption")
    return made


def test_nothing_is_fetched_from_anywhere() -> None:
    elements = Elements(page().html())
    assert {"script", "link", "img", "iframe"}.isdisjoint(elements.names)
    assert all(reference.startswith("#") for reference in elements.references)
    assert "@import" not in page().html()
    assert not re.search(r"url\((?!#)", page().html())


def test_what_is_shown_is_escaped() -> None:
    text = page().html()
    for shown in (
        "&lt;b&gt;bench&lt;/b&gt;",
        "2 cores &amp; more",
        "&lt;tcp&gt;",
        "&lt;12&gt;",
        "&lt;script&gt;",
        "a &amp; b",
    ):
        assert shown in text


def test_parts_come_in_order() -> None:
    names = [name for name in Elements(page().html()).names if name in ("h1", "h2", "p", "table", "svg", "figcaption")]
    assert names == ["h1", "h2", "p", "table", "svg", "figcaption"]


def test_it_is_one_file(tmp_path: Path) -> None:
    page().write(tmp_path / "reports" / "r.html")
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["r.html"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"report can't be written to .*/file/r\.html"):
        page().write(tmp_path / "file" / "r.html")


def test_missing_packages_are_named() -> None:
    code = (
        "import importlib.util; find = importlib.util.find_spec\n"
        "from neuron_pushkv.report import needs\n"
        "needs.find_spec = lambda name: None if name == 'matplotlib' else find(name)\n"
        "needs.check('pushkv bench')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("pushkv bench needs matplotlib: pip install 'neuron-pushkv[bench]'"), (
        done.stderr
    )
