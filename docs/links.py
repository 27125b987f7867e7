"""Check the links of the built site: every local page, file and anchor that a page refers to is there.

    python docs/links.py docs/_build/html

It prints how many pages and links there are and what the pages weigh; broken links are listed, and the exit code is 1.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme:
                self.targets.add(value)


def broken(site: Path, pages: dict[Path, _Page]) -> list[str]:
    """Return "page: target" of each local target that does not exist."""
    result = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            where = urlsplit(target)
            file = (path.parent / unquote(where.path)).resolve() if where.path else path
            is_there = file.exists() and (
                not where.fragment or file not in pages or where.fragment in pages[file].anchors
            )
            if not is_there:
                result.append(f"{path.relative_to(site)}: {target}")
    return result


def main(folder: str) -> int:
    """Check a site; the exit code is 0 if every local link leads somewhere."""
    site = Path(folder).resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    missing = broken(site, pages)
    sizes = sorted((path.stat().st_size, path) for path in pages)
    total = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(
        f"{len(pages)} pages, {sum(len(page.targets) for page in pages.values())} local links, {len(missing)} broken; "
        f"{total / 2**20:.1f} MiB in all, the median page {sizes[len(sizes) // 2][0] / 2**10:.0f} kB, the largest "
        f"{sizes[-1][1].relative_to(site)} {sizes[-1][0] / 2**10:.0f} kB"
    )
    print("\n".join(missing), end="\n" if missing else "")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
