# ruff: noqa: INP001 - mkdocs loads it by its path
"""What `make docs` adds to the pages of docs/: the files of the repository that they link, and those that these link.

The site's root is docs/, so a link that leaves docs/ on GitHub (`../deploy/README.md`) would lead nowhere in the site.
Each linked file gets a place in the site at its path in the repository, and links are rewritten to where their targets
are. A linked folder is its README, or a list of its files.
"""

import re
from os.path import normpath, relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s#]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link outside docs/, directly or through one another."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while pages:
        page = pages.pop()
        for target in (_target(page, link) for link in LINK.findall(page.read_text(encoding="utf-8"))):
            for path in (target, *_listed(target)):
                place = _place(path)
                if not path.exists() or files.get_file_from_path(place):
                    continue
                source = {"content": _listing(path)} if path.is_dir() else {"abs_src_path": str(path)}
                files.append(File.generated(config, place, inclusion=InclusionLevel.NOT_IN_NAV, **source))
                if path.suffix == ".md":
                    pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page with its links to where their targets are in the site."""
    if not page.file.abs_src_path:
        return markdown
    source, folder = Path(page.file.abs_src_path), str(Path(page.file.src_uri).parent)
    return LINK.sub(lambda link: relpath(_place(_target(source, link[0])), folder), markdown)


def _target(page: Path, link: str) -> Path:
    """The file that a link means, or the folder if it has no README."""
    path = Path(normpath(page.parent / link))
    return path / "README.md" if (path / "README.md").exists() else path


def _place(path: Path) -> str:
    """Where a file of the repository is in the site, from its root. Nothing in a site begins with a dot."""
    place = path.relative_to(ROOT).as_posix().removeprefix("docs/").lstrip(".")
    return f"{place}/index.md" if path.is_dir() else place


def _listed(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def _listing(path: Path) -> str:
    names = [file.relative_to(path).as_posix() for file in _listed(path)]
    return "\n".join([f"# {path.relative_to(ROOT)}", "", *(f"- [{name}]({name})" for name in names)])
