"""Conversations and a chat template."""

TURN = "{% for m in messages %}[{{ m['role'] }}]"
PROMPT = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = "<s>" + TURN + "{{ m['content'] }};" + PROMPT


def say(*contents: str) -> list[dict[str, str]]:
    """Make a conversation that the user begins."""
    return [
        {"role": ("user", "assistant")[index % 2], "content": content}
        for index, content in enumerate(contents)
    ]
