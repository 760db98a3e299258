"""One checkpoint in MLX: the log-probabilities of a text, greedy tokens, and the cache.

This is a script that imports no kvfold. It reads one JSON object from stdin and writes one to stdout, as
probe.py does, whose answers it is compared with.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Score and continue the text that stdin gives."""
    sys.modules["kvfold"] = None  # type: ignore[assignment]
    asked = json.load(sys.stdin)
    import mlx.core as mx  # type: ignore[import-not-found]
    from mlx_lm.models.cache import make_prompt_cache  # type: ignore[import-not-found]
    from mlx_lm.utils import load_model  # type: ignore[import-not-found]

    model, _ = load_model(Path(asked["directory"]))
    if asked["dtype"] == "float32":
        model.set_dtype(mx.float32)
    scores, tokens, cache = [], [], None
    for ids in asked["text"]:
        logits = model(mx.array([ids]))[0].astype(mx.float32)
        known = logits[:-1] - mx.logsumexp(logits[:-1], axis=-1, keepdims=True)
        picked = mx.take_along_axis(known, mx.array(ids[1:])[:, None], axis=-1)
        scores.append(picked[:, 0].tolist())
    for ids in asked["text"]:
        cache = make_prompt_cache(model)
        last = model(mx.array([ids[: asked["prompt"]]]), cache=cache)[:, -1]
        chosen = []
        for _ in range(asked["steps"]):
            chosen.append(int(mx.argmax(last[0]).item()))
            last = model(mx.array([[chosen[-1]]]), cache=cache)[:, -1]
        tokens.append(chosen)
    dtype = str(model(mx.array([asked["text"][0][:2]])).dtype).removeprefix("mlx.core.")
    told = {
        "version": f"mlx-lm {version('mlx-lm')}",
        "dtype": dtype,
        "log_probs": scores,
        "tokens": tokens,
        "cache": [
            float(sum(part.shape[0] * part.shape[1] * part.shape[3] for part in (layer.keys, layer.values)))
            for layer in cache or ()
        ],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
