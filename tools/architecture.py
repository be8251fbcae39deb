"""Rewrite the module list of ARCHITECTURE.md from the modules' own first sentences.

With --check nothing is written, and the exit status is 1 where the page has gone stale.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("holdfast", "holdfast_bench")
PAGE = ROOT / "ARCHITECTURE.md"
START, END = "<!-- modules: make architecture -->", "<!-- /modules -->"
COLUMN = 21


def floors(package: str) -> list[list[str]]:
    """The names on each floor, highest first; the import contract is the one list of them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = tools["importlinter"]["contracts"]
    [layers] = [each["layers"] for each in contracts if each.get("containers") == [package]]
    return [["__init__", "__main__"], *([n.strip("() ") for n in at.split("|")] for at in layers)]


def line(label: str, module: Path) -> str:
    """A module's name and the first sentence of its docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    sentence = docstring.partition("\n")[0]
    return f"{label:{COLUMN}} {sentence}".rstrip()


def listing(package: str, name: str) -> Iterator[str]:
    """The lines of one module, or of one folder and the modules in it."""
    root = ROOT / "src" / package
    folder, module = root / name, root / f"{name}.py"
    if module.exists():
        yield line(module.name, module)
    if (folder / "__init__.py").exists():
        yield line(f"{name}/", folder / "__init__.py")
        for inner in sorted(folder.rglob("*.py")):
            if inner != folder / "__init__.py":
                yield line(f"  {inner.relative_to(folder)}", inner)


def section() -> str:
    """The lists of both packages, floor by floor, highest first."""
    lists = []
    for package in PACKAGES:
        blocks = [
            "\n".join(entry for name in floor for entry in listing(package, name))
            for floor in floors(package)
        ]
        lists.append(f"`src/{package}`\n\n```text\n" + "\n\n".join(filter(None, blocks)) + "\n```")
    return "\n\n".join(lists)


def main() -> int:
    """Rewrite the page, or with --check say whether it is up to date."""
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    fresh = f"{before}{START}\n{section()}\n{END}{after}"
    if "--check" in sys.argv:
        if fresh != page:
            print("ARCHITECTURE.md has gone stale; run `make architecture`", file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
