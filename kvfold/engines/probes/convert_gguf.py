"""llama.cpp's converter with a tokenizer that it does not know, which is then written as GPT-2's.

This is a script that imports no kvfold. Its first argument is the directory of llama.cpp, the others are the
converter's.
"""

import runpy
import sys
from typing import Any


def main() -> None:
    """Run the converter."""
    home = sys.argv[1]
    sys.path.insert(0, home)
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def name(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = name
    sys.argv = [f"{home}/convert_hf_to_gguf.py", *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
