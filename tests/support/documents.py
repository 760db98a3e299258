"""Documents to train on."""

import json
import random
from pathlib import Path


def write_documents(file: Path) -> None:
    """Write 60 documents of about 300 characters, as jsonl."""
    draw = random.Random(0)
    words = ["key", "value", "cache", "head", "fold", "rank", "layer", "query", "token", "window"]
    documents = [" ".join(draw.choices(words, k=60)) for _ in range(60)]
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
