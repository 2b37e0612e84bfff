"""The pages of the documentation site, without the site itself: `make docs` builds it, and fails on
a dead link.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import diesel_fs
import diesel_fs.torch
from deploy.docs.site import gather
from dlcmd.main import VERBS
from tests.test_house import FILES, TREE


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "pages"
    gather(folder)
    return folder


def targets(found: object) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        found = list(found.values())
    for each in found if isinstance(found, list) else ():
        yield from targets(each)


def test_the_navigation_has_each_page_once(pages: Path) -> None:
    settings = yaml.safe_load((TREE / "deploy/docs/mkdocs.yaml").read_text())
    shown = sorted(targets(settings["nav"]))
    assert shown == sorted(str(each.relative_to(pages)) for each in pages.rglob("*.md"))
    written = {str(each.relative_to(TREE)) for each in FILES if each.suffix == ".md"}
    assert written == set(shown) - {"reference/commands.md", "reference/python.md"}


def test_each_verb_has_its_help_and_each_name_its_entry(pages: Path) -> None:
    commands = (pages / "reference/commands.md").read_text()
    for verb in VERBS:
        assert f"\n## dlcmd {verb}\n\n```text\nUsage: dlcmd {verb} " in commands
    entries = (pages / "reference/python.md").read_text().split()
    for package in (diesel_fs, diesel_fs.torch):
        for name in package.__all__:
            assert f"{package.__name__}.{name}" in entries


def test_a_link_to_a_source_file_leads_to_its_text(pages: Path) -> None:
    assert "](LICENSE.txt)" in (pages / "README.md").read_text()
    assert (pages / "LICENSE.txt").read_bytes() == (TREE / "LICENSE").read_bytes()
