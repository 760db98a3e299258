"""The umbrella command: every sub-command of `kvfold`, each imported when it is asked for."""

from importlib import import_module

import click

from .core.console import refusing
from .core.version import __version__

# In the order in which they are used: the module whose `main` is the command, and its purpose.
COMMANDS = {
    "plan": ("planning.cli", "List the targets that fit a memory, best first."),
    "convert": ("convert.cli", "Fold a checkpoint to GQA, MQA or MLA."),
    "distill": ("distill.cli", "Train a fold against its source."),
    "assemble": ("convert.towers.cli", "Put a text tower back into its multimodal checkpoint."),
    "eval": ("eval.cli", "Measure a checkpoint, paired with its source."),
    "report": ("eval.page.cli", "Show evaluations as one HTML page."),
    "verify": ("engines.cli", "Check an output against the rules of engines."),
    "quantize": ("quantisation.cli", "Round the weights of a checkpoint to 8 or 4 bits."),
    "publish": ("publishing.publish", "Upload a checkpoint with a model card."),
    "migrate": ("migration.cli", "Find the smallest cache that stays within a loss limit."),
    "families": ("convert.families.support", "Show which families can be folded to what."),
    "engines": ("engines.engine_table", "Show which engine runs which kind of output."),
    "lab": ("lab.cli", "Compare attention variants at a shape."),
    "demo": ("demo", "Fold, distil and evaluate the bundled checkpoint."),
}


class _Commands(click.Group):
    """A group that imports a command when it is run."""

    make_context = refusing()(click.Group.make_context)
    resolve_command = refusing()(click.Group.resolve_command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, if there is one."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"{__package__}.{COMMANDS[cmd_name][0]}").main
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command with its purpose."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in COMMANDS.items()])


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="kvfold")
def main() -> None:
    """Fold a pretrained decoder's KV cache.

    Convert it to GQA, MQA or MLA, distil it back, measure what was recovered.
    """


if __name__ == "__main__":
    main()
