"""A plugin of vLLM that serves folds to MLA of any width from their compressed cache.

vLLM finds it by the entry point `kvfold` of the group `vllm.general_plugins`; nothing else imports it. Models
that are no folds, and folds that vLLM has kernels for, stay vLLM's own. `VLLM_PLUGINS` turns it off where it
does not name `kvfold`.
"""

import logging
from functools import cache

KNOWN = ("0.32",)  # releases of vLLM that this was written for and run in

logger = logging.getLogger(__name__)


@cache
def register() -> None:
    """Let vLLM serve folds; vLLM calls this in each of its processes.

    In a release of vLLM that the plugin does not know nothing changes, and a warning says so.
    """
    import vllm

    reason = unknown_release(vllm.__version__)
    if reason:
        logger.warning(reason)
        return
    from .registration import register_folds

    register_folds()


def unknown_release(version: str) -> str:
    """Return a sentence if the plugin does not know a version of vLLM; else ""."""
    if ".".join(version.split(".")[:2]) in KNOWN:
        return ""
    return (
        f"kvfold's plugin does nothing in vLLM {version}, because it knows {', '.join(KNOWN)} only; install "
        "such a release, or a newer kvfold, to serve MLA of other widths than 512+64"
    )
