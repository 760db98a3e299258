"""The umbrella command: every sub-command of `kvfold`."""

from typing import Any

import click

from .convert.cli import main as convert
from .convert.families.support import main as families
from .convert.towers.cli import main as assemble
from .core.console import refusing
from .core.version import __version__
from .demo import main as demo
from .distill.cli import main as distill
from .eval.cli import main as evaluate
from .eval.page.cli import main as report
from .lab.cli import main as lab
from .migration.cli import main as migrate
from .planning.cli import main as plan
from .publishing.publish import main as publish
from .quantisation.cli import main as quantize
from .verification.cli import main as verify
from .verification.engine_table import main as engines


class _InOrder(click.Group):
    """A group whose help lists the commands as they were added: in the order in which they are used."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the options before the command, and report what cannot be read as one sentence."""
        with refusing():
            return super().make_context(info_name, args, parent, **extra)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and report one that does not exist as one sentence."""
        with refusing():
            return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)


@click.group(cls=_InOrder)
@click.version_option(__version__, prog_name="kvfold")
def main() -> None:
    """Fold a pretrained decoder's KV cache.

    Convert it to GQA, MQA or MLA, distil it back, measure what was recovered.
    """


for command, purpose in (
    (plan, "List the targets that fit a memory, best first."),
    (convert, "Fold a checkpoint to GQA, MQA or MLA."),
    (distill, "Train a fold against its source."),
    (assemble, "Put a text tower back into its multimodal checkpoint."),
    (evaluate, "Measure a checkpoint, paired with its source."),
    (report, "Show evaluations as one HTML page."),
    (verify, "Check an output against the rules of engines."),
    (quantize, "Round the weights of a checkpoint to 8 or 4 bits."),
    (publish, "Upload a checkpoint with a model card."),
    (migrate, "Find the smallest cache that holds a bound."),
    (families, "Show which families can be folded to what."),
    (engines, "Show which engine runs which kind of output."),
    (lab, "Compare attention variants at a shape."),
    (demo, "Fold, distil and evaluate the bundled checkpoint."),
):
    command.short_help = purpose
    main.add_command(command)

if __name__ == "__main__":
    main()
