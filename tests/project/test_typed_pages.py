"""Every Python block of the README, the docs and the notebooks passes `mypy --strict` and pyright
as it stands.
"""

import pytest
from places import ROOT
from typed_pages import complaints_about, modules_of

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
# its blocks are parts of the project's tests, which have no types
PAGES.remove(ROOT / "docs/contributing.md")
WRONG = """# A page

```python
from ft_ckpt import CheckpointSaver

CheckpointSaver(directory="runs/sft", evrey=5)
saver.save(model).tensor
```
"""
# Both take a minute of a processor's time, most of it for the types of torch and transformers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pages = pytest.mark.parametrize(
    "page", [page for page in PAGES if modules_of(page)], ids=lambda path: path.stem
)


@pytest.fixture(scope="module")
def wrong_page(tmp_path_factory):
    page = tmp_path_factory.mktemp("wrong") / "wrong.md"
    page.write_text(WRONG, encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def complaints(request, tmp_path_factory, wrong_page):
    """The errors by page, of the pages that are tested: each checker runs once, and loads the
    libraries once.
    """
    tests = [
        item for item in request.session.items if "complaints" in getattr(item, "fixturenames", ())
    ]
    asked = {item.callspec.params["page"] for item in tests if hasattr(item, "callspec")}
    modules = {page: modules_of(page) for page in [*sorted(asked), wrong_page]}
    return complaints_about(modules, tmp_path_factory.mktemp("modules"))


@pages
def test_type_checkers_accept_the_blocks_of_a_page(page, complaints):
    assert complaints[page] == []


def test_an_error_is_reported_by_both_with_its_line(wrong_page, complaints):
    places = {tuple(complaint.split(": ")[:2]) for complaint in complaints[wrong_page]}
    assert places == {
        (f"wrong.md:{line}", checker) for line in (6, 7) for checker in ("mypy", "pyright")
    }
