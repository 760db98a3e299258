"""The umbrella command: every sub-command of `kvfold`."""

import click

from . import __version__
from .convert.cli import main as convert
from .convert.families.support import main as families
from .demo import main as demo
from .distill.cli import main as distill
from .eval.cli import main as evaluate
from .eval.page.cli import main as report
from .lab.cli import main as lab
from .migration.cli import main as migrate
from .planning.cli import main as plan
from .publishing.publish import main as publish
from .quantisation.cli import main as quantize
from .verification.engine_table import main as engines
from .verification.verify import main as verify


@click.group()
@click.version_option(__version__, prog_name="kvfold")
def main() -> None:
    """Fold a pretrained decoder's KV cache.

    Convert it to GQA, MQA or MLA, distil it back, measure what was recovered.
    """


for command in (
    convert,
    distill,
    evaluate,
    verify,
    quantize,
    publish,
    demo,
    families,
    engines,
    lab,
    plan,
    report,
    migrate,
):
    main.add_command(command)

if __name__ == "__main__":
    main()
