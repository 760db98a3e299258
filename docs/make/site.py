"""`make docs`: the site of the documentation, as a folder that opens from disk without a server or a network.

The pages of docs/ are copied to build/docs, pages that follow from the code are made next to them, and
Zensical builds build/site of both. Then the one script that its offline search would fetch is replaced by
docs/assets/worker.js.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click

from kvfold.core.errors import InvalidInput

from .api_page import api_page
from .commands_page import commands_page
from .keys_page import keys_page
from .runs_page import runs_page
from .support_page import support_page
from .works_with_page import works_with_page

ROOT = Path(__file__).parents[2]
STAGED = ROOT / "build" / "docs"
PACKAGE = ROOT / "build" / "package"  # sources as they are installed, since mkdocstrings follows no links
SITE = ROOT / "build" / "site"
GENERATED = {
    "commands.md": commands_page,
    "recipe.md": keys_page,
    "support.md": support_page,
    "api.md": api_page,
    "runs.md": runs_page,
    "works-with.md": works_with_page,
}
_COPIED = {".md", ".svg", ".png", ".js", ".css", ".ipynb"}
_SHIM = re.compile(r'<script src="https://[^"]*iframe-worker/shim"[^>]*></script>')
# What a browser fetches by itself, in contrast to links that a reader may follow.
_FETCHED = re.compile(
    r'<(?:script|img|iframe|source|link rel="(?:stylesheet|preconnect|preload|icon)")[^>]*?'
    r'(?:src|href)="(https?:[^"]*)"'
)


def stage() -> None:
    """Copy the pages of docs/ and make the generated ones next to them."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for file in sorted((ROOT / "docs").rglob("*")):
        place = file.relative_to(ROOT / "docs")
        if file.suffix in _COPIED and place.parts[0] != "make":
            (STAGED / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, STAGED / place)
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "kvfold", PACKAGE / "kvfold", ignore=_other_than_python)
    for folder in (PACKAGE / "kvfold").rglob("*/"):
        (folder / "__init__.py").touch()  # the four folders at the top have none
    for name, page in GENERATED.items():
        (STAGED / name).write_text(page(), encoding="utf-8")


def _other_than_python(folder: str, names: list[str]) -> list[str]:
    kept = [name for name in names if Path(folder, name).is_dir() or name.endswith(".py")]
    return [name for name in names if name not in kept or name == "__pycache__"]


def build(builder: Path) -> None:
    """Build the site of the staged pages; any warning fails it.

    Raises:
        InvalidInput: the builder found a broken link or could not build.
    """
    shutil.rmtree(SITE, ignore_errors=True)
    # mkdocstrings formats signatures with the ruff of the builder's environment.
    path = f"{builder.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "NO_COLOR": "1"}
    command = [str(builder), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InvalidInput(f"the site cannot be built:\n{done.stdout}{done.stderr}")


def make_offline() -> None:
    """Let every page search from disk, and check that no page fetches anything from a network.

    Raises:
        InvalidInput: a page would fetch something.
    """
    (SITE / "404.html").unlink()  # only a server shows it
    for page in sorted(SITE.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(SITE).parts) - 1)
        text = _SHIM.sub(f'<script src="{up}assets/worker.js"></script>', text)
        fetched = _FETCHED.findall(text)
        if fetched:
            raise InvalidInput(f"{page.relative_to(SITE)} fetches {fetched[0]}; a page must need no network")
        page.write_text(text, encoding="utf-8")


@click.command()
@click.option(
    "--builder",
    type=click.Path(path_type=Path, exists=True),
    help="The program zensical; without it, pages are only staged.",
)
def main(builder: Path | None) -> None:
    """Make the site in build/site."""
    stage()
    if builder is None:
        click.echo(f"{STAGED.relative_to(ROOT)}: {sum(1 for _ in STAGED.rglob('*.md'))} pages")
        return
    try:
        build(builder.absolute())
        make_offline()
    except InvalidInput as mistake:
        shutil.rmtree(SITE, ignore_errors=True)
        click.echo(f"Error: {mistake}", err=True)
        sys.exit(2)
    click.echo(f"{SITE.relative_to(ROOT)}/index.html: {sum(1 for _ in SITE.rglob('*.html'))} pages")


if __name__ == "__main__":
    main()
