"""What the user should know about an output before it is loaded, in sentences."""

from collections.abc import Mapping
from typing import Any

from ..families.source import Source
from ..formats.grouped import Grouped
from ..formats.host_class import Rehosted
from ..formats.remote import Remote
from ..formats.serving import SERVING
from ..formats.stock import NORM_EPSILON, Stock
from .form import Form
from .serving_shape import served_notices


def notices_of(
    container: Grouped | Rehosted | Stock | Remote, form: Form | None, source: Source
) -> list[str]:
    """What loading an output takes, where it is not as for any other."""
    if isinstance(container, Stock):
        if container.served is not None:
            return served_notices(source, container)
        return _stock_notices(container, source.config)
    if isinstance(container, Remote):
        because = "" if form is None or form.why is None else f": {form.why}"
        return [f"the output brings its own code, so loading it needs trust_remote_code=True{because}"]
    if container.caches_queries:
        architecture = container.architecture
        return [
            f"transformers' {architecture} caches every query head's keys and values; vLLM the folded ones"
        ]
    return []


def _stock_notices(container: Stock, config: Mapping[str, Any]) -> list[str]:
    """Why an output is for transformers only, where it is (formats.md.

    What other engines silently drop or misread).
    """
    both, only_vllm = [], []
    if container.biases:
        both.append("it has attention biases")
    if container.rope["rope_type"] != "default":
        both.append("its rotary slots have a frequency table of their own")
    config = {**config, **container.block.config(config)}
    if config.get("rms_norm_eps") != NORM_EPSILON:
        both.append(f"its rms_norm_eps is {config.get('rms_norm_eps')}, not {NORM_EPSILON}")
    if config["tie_word_embeddings"]:
        only_vllm.append("its head is tied to the embedding")
    if container.cached != (SERVING.latent, SERVING.rope):
        only_vllm.append("its latent is {}+{} wide, not {}".format(*container.cached, SERVING))
    if not both and not only_vllm:
        return []
    engines = "vLLM and SGLang" if both else "vLLM"
    return [
        f"load the output in transformers; {engines} would not run it right, because "
        f"{', '.join(both or only_vllm)}"
        + (f"; vLLM also because {', '.join(only_vllm)}" if both and only_vllm else "")
    ]
