#!/bin/sh
# Chat templates of published models, as llama-cpp-python 0.3.36 carries them (llama.cpp's models/templates), rendered
# by transformers 5.24.0, 2026-11-29.
#
# Training code finds the assistant's turns by rendering prefixes of a conversation. A prefix that ends with a turn is
# often no prefix of the whole: templates drop the thoughts of all turns but the last, write an empty thought for the
# last alone, or end the last turn with another mark. Some drop thoughts from the last turn too, so that training on
# what they render teaches a model to answer without the thought that its prompt opens. GLM's render no mark behind a
# turn: the mark of the next role is what ends it, and the last turn has none.
#
# Seen: of 66 templates that render a conversation with thoughts, 14 render its first turn otherwise once others
# follow; 6 leave the thought out of the last turn, four of DeepSeek's among them; with 2 of GLM's nothing stands behind
# the last turn, and `<|user|>` behind the first.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 jinja2==3.1.6
"$work/venv/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" llama-cpp-python==0.3.36
mkdir "$work/templates"
tar --extract --file "$work"/llama_cpp_python-*.tar.gz --directory "$work/templates" --strip-components 5 \
    --wildcards '*/models/templates/*.jinja'
"$work/venv/bin/python" - "$work/templates" <<'EOF'
import re
import sys
from pathlib import Path

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

ENDS = re.compile(r"\s*(</s>)?\s*$")
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nthought-1\n</think>\n\nanswer-1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "<think>\nthought-2\n</think>\n\nanswer-2"},
]
rendered, changed, dropped, unmarked = [], [], [], []
for file in sorted(Path(sys.argv[1]).glob("*.jinja")):

    def render(messages):
        (text,), _ = render_jinja_template(
            [messages], chat_template=file.read_text(), bos_token="<s>", eos_token="</s>"
        )
        return text

    try:
        first, whole = render(TALK[:2]), render(TALK)
    except (TemplateError, TypeError):  # it wants tools or functions
        continue
    rendered.append(file.stem)
    if not whole.startswith(ENDS.sub("", first)):
        changed.append(file.stem)
    if "answer-2" in whole and "thought-2" not in whole:
        dropped.append(file.stem)
    if whole.endswith("answer-2") and "answer-1<|user|>" in whole:
        unmarked.append(file.stem)
print(f"{len(rendered)} templates; the first turn changes in {len(changed)}: {', '.join(changed)}")
print(f"thoughts of the last turn are left out by {', '.join(dropped)}")
print(f"no mark behind the last turn, and the user's behind the first: {', '.join(unmarked)}")
assert (len(rendered), len(changed), len(dropped), len(unmarked)) == (66, 14, 6, 2), "the behaviour changed"
EOF
