"""Hooks of mkdocs (mkdocs.yml), by which links that are right on a code host become right in the
site.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site. Any other file of the checkout
that a page links to is added to it, too: pictures and JSON as they are, text as a page that shows
it. A link to a folder, or to what is not there, stays as it is, so that mkdocs' own check reports
it. Markdown files that are no pages, such as examples/README.md, are checked when the site is
built: their links, and the anchors of pages that they name.

A code host's alerts (`> [!NOTE]`) become callouts. The header shows the version.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
AS_THEY_ARE = {".png", ".svg", ".json"}
LANGUAGES = {
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".yaml": "yaml",
    ".json": "json",
    ".h": "cpp",
    ".cpp": "cpp",
}
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)(?=[#)])")
ALERT = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:>.*\n?)+)", re.MULTILINE)
CALLOUTS = {"IMPORTANT": "info", "CAUTION": "danger"}
# What a browser would fetch from another host.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|(?:@import|url\()\W*https?:"""
)


def _in_site(path: str) -> str:
    """Return where a file of the checkout is in the site's source."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if Path(path).suffix in AS_THEY_ARE else f"{path}.md"


def _in_checkout(uri: str) -> str:
    """Return which file of the checkout a page of the site is."""
    return {site: path for path, site in PAGES.items()}.get(uri, f"docs/{uri}")


def _links(path: str) -> list[str]:
    """Return the files of the checkout, outside of docs, that a page links to."""
    prose = CODE.sub("", (ROOT / path).read_text())
    targets = (
        posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        for target in LINK.findall(prose)
    )
    return [
        target for target in targets if not target.startswith("docs/") and (ROOT / target).is_file()
    ]


def on_config(config: Any) -> Any:
    """Put the pages of a folder into the navigation where it has "folder/*.md"; without any
    leave it out. Add the version to the site's name.
    """
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "shardcore/version.py").read_text())
    config["site_name"] += f" {version}"
    nav: list[Any] = []
    for entry in config["nav"]:
        ((title, of),) = entry.items()
        if isinstance(of, str) and of.endswith("/*.md"):
            found = sorted(
                Path(config["docs_dir"]).glob(of),
                key=lambda page: (page.stem != "index", page.stem),
            )
            entry = {title: [page.relative_to(config["docs_dir"]).as_posix() for page in found]}
        if next(iter(entry.values())):
            nav.append(entry)
    config["nav"] = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root of the checkout, and what pages link to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for page in [file.src_uri for file in files if file.is_documentation_page()]:
        for path in _links(_in_checkout(page)):
            uri = _in_site(path)
            if files.get_file_from_path(uri) is None:
                if uri == path:
                    added = File.generated(config, uri, abs_src_path=str(ROOT / path))
                else:
                    language = LANGUAGES.get(Path(path).suffix, "text")
                    text = f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"
                    added = File.generated(
                        config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV
                    )
                files.append(added)
    return files


def _callout(match: re.Match[str]) -> str:
    kind = CALLOUTS.get(match[1], match[1].lower())
    text = re.sub(r"^> ?", "    ", match[2], flags=re.MULTILINE)
    return f"!!! {kind}\n{text}"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links as the site has the files, and alerts as its theme has them."""
    path = _in_checkout(page.file.src_uri)
    if not (ROOT / path).is_file():  # one that shows a file
        return markdown

    def in_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        uri = _in_site(target)
        if files.get_file_from_path(uri) is None:
            return match[1]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    return "".join(
        part if CODE.fullmatch(part) else LINK.sub(in_site, part)
        for part in CODE.split(ALERT.sub(_callout, markdown))
    )


def _dead_links(path: Path, site: Path) -> list[str]:
    """Return the links of a Markdown file to nothing, or to an anchor that a page lacks."""
    dead = []
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", CODE.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            dead.append(link)
        elif anchor and target.is_relative_to(ROOT):
            page = site / Path(_in_site(target.relative_to(ROOT).as_posix())).with_suffix(".html")
            if page.exists() and f'id="{anchor}"' not in page.read_text():
                dead.append(link)
    return dead


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Refuse a list or a table without an empty line before it, which a code host shows and this
    site would not.
    """
    if lost := re.search(r"<p>[^<]*\n(?:- |\d+\. |\|)[^\n]*", html):
        raise PluginError(
            f"{page.file.src_uri}: expected an empty line before a list or table: {lost[0]}"
        )
    return html


def on_post_build(config: Any) -> None:
    """Refuse a site that loads anything from another host, and dead links in Markdown files
    beside it.
    """
    for folder in ("examples", "benchmarks", ".github"):
        for path in sorted((ROOT / folder).rglob("*.md")):
            if dead := _dead_links(path, Path(config["site_dir"])):
                raise PluginError(f"{path.relative_to(ROOT)}: links lead nowhere: {dead}")
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css") and (found := FETCHED.search(path.read_text())):
            raise PluginError(f"{path}: expected nothing from another host, but has {found[0]}")
