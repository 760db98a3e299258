"""kvfold folds the KV cache of pretrained decoders, distils them back and measures what was recovered.

A checkpoint flows one way; each function reads model directories and writes a new one:

    source/ --fold--> folded/ --train--> distilled/        evaluate compares any of them with the source

`plan` compares targets before anything is written, `verify` checks an output, `quantize` rounds its weights,
`publish` sends it to the Hub, `report` draws evaluations as a page, `migrate` finds the smallest cache that
stays within a loss limit, `assemble` puts a text tower back into its multimodal checkpoint, and `absorb`
lets a loaded DeepSeek-class model decode from its latent cache.
`import kvfold` loads no torch; a function imports what it needs when it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .api import evaluate as evaluate
    from .api import fold as fold
    from .api import plan as plan
    from .api import publish as publish
    from .api import quantize as quantize
    from .api import report as report
    from .api import train as train
    from .api import verify as verify
    from .convert.formats.absorption import absorb as absorb
    from .convert.request import GQA as GQA
    from .convert.request import MLA as MLA
    from .convert.request import MQA as MQA
    from .core.errors import InvalidInput as InvalidInput
    from .migration.migrate_call import migrate as migrate
    from .tower_run import assemble as assemble

_HOMES = {
    **dict.fromkeys(("fold", "plan", "train", "evaluate", "verify", "quantize", "publish", "report"), ".api"),
    **dict.fromkeys(("GQA", "MQA", "MLA"), ".convert.request"),
    "absorb": ".convert.formats.absorption",
    "assemble": ".tower_run",
    "migrate": ".migration.migrate_call",
    "InvalidInput": ".core.errors",
}
# Names of commands that are functions of another name here, and of commands that only the shell has.
_FUNCTIONS = {"convert": "fold", "distill": "train", "eval": "evaluate"}
_COMMANDS = ("demo", "engines", "families", "lab")
__all__ = [
    "GQA",
    "MLA",
    "MQA",
    "InvalidInput",
    "absorb",
    "assemble",
    "evaluate",
    "fold",
    "migrate",
    "plan",
    "publish",
    "quantize",
    "report",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        hint = f"; the function is kvfold.{_FUNCTIONS[name]}" if name in _FUNCTIONS else ""
        if name in _COMMANDS:
            hint = f"; it is a command only: kvfold {name} --help"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
