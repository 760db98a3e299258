"""kvfold: convert pretrained decoders to a much smaller KV cache, distil them back, measure what was
recovered.

A checkpoint flows one way through pure steps; every stage reads model directories and writes a new one:

    source/ --convert--> folded/ --distill--> folded-distilled/        eval compares any of them with the
    source

Where things are (installed as kvfold.convert and so on; in the repository each folder stands at the top):

    convert   targets (GQA, MQA, MLA), the algebra from weights to weights, the lazy reader and the streamed
    writer distill   recipes, data, losses, the training loop and its exact resume
    eval      suites: perplexity, fidelity, cache, speed, retrieval, tasks; the HTML report
    migrate   (migrate.py itinerary.py migration.py milestones.py arrival.py here) all three, step by step
    under a bound recipes   complete runs, one YAML a file; recipes/demo is the bundled checkpoint

`kvfold.absorb(model)` lets a loaded DeepSeek-class model decode from its latent cache without expanding it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convert.formats.absorption import absorb as absorb

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "absorb":  # `import kvfold` alone loads no torch
        from .convert.formats.absorption import absorb

        return absorb
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
