"""The umbrella command: every sub-command of `kvfold`."""

import click

from . import __version__
from .convert.architectures.support import main as families
from .convert.cli import main as convert
from .convert.lab import main as lab
from .convert.planning.advise import main as plan
from .convert.publishing.publish import main as publish
from .convert.verification.verify import main as verify
from .demo import main as demo
from .distill.cli import main as distill
from .eval.cli import main as evaluate
from .eval.page.cli import main as report
from .migrate import main as migrate


@click.group()
@click.version_option(__version__, prog_name="kvfold")
def main() -> None:
    """Fold a pretrained decoder's KV cache: convert it to GQA, MQA or MLA, distil it back, measure what was recovered."""


for command in (convert, distill, evaluate, verify, publish, demo, families, lab, plan, report, migrate):
    main.add_command(command)

if __name__ == "__main__":
    main()
