"""The assistant's turns of a conversation, as they looked when they were spoken.

A chat template may render an earlier turn otherwise than the last one: Qwen3's leaves its thoughts out, and
Mistral's moves the system's words to the last question. So each turn is rendered as the last one, behind the
history as it is rendered at that time. Turns whose renderings continue each other share one text; a turn that
is rendered otherwise once others follow has a text of its own, in which it alone is learnt.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # messages, and whether the prompt for the assistant follows

_OPEN_TAG = re.compile(r"<[^<>]*$")  # texts may begin alike up to the inside of a tag


class Unrendered(Exception):
    """A template leaves out what the assistant says; `number` is that of the message, from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Rendered:
    """The beginning of a conversation as text.

    Attributes:
        count: number of messages.
        text: their rendering.
        turns: begin and end of each turn in it that is learnt, in characters, with the mark at its end.
        spoken: where the words of the last turn end.
    """

    count: int
    text: str
    turns: list[tuple[int, int]] = field(default_factory=list)
    spoken: int = 0


def rendered_turns(
    messages: list[Message], render: Render, marks: tuple[str, ...], *, verbatim: bool = True
) -> list[Rendered]:
    """Return texts in which every turn of the assistant's is learnt once.

    Args:
        messages: `{role, content, ...}`.
        render: the chat template.
        marks: special tokens of the tokenizer; one of them ends a turn. Where the template renders none
            (GLM's next role ends a turn), the one that is rendered when the user speaks next is learnt.
        verbatim: words that the template leaves out of the last turn, as R1's does with thoughts, are written
            as they were given, between what is rendered around other words.

    Raises:
        Unrendered: a turn has no words in its rendering.
    """
    found: list[Rendered] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = _turn(messages[: index + 1], render, verbatim=verbatim)
        kept = _end_within(found[-1], turn.text, marks) if found else None
        if kept is not None:
            *before, (start, _) = found.pop().turns
            turn.turns[:0] = [*before, (start, kept)]
        found.append(turn)
    if verbatim:
        for turn in found:
            _learn_ends(turn, messages, render, marks)
    return found


def _turn(messages: list[Message], render: Render, *, verbatim: bool) -> Rendered:
    """Render a conversation whose last message is the assistant's."""
    *history, message = messages
    text = render(messages, False)
    prompt, before = (render(history, True), render(history, False)) if history else ("", "")
    said = message.get("content")
    words = said.strip() if isinstance(said, str) else ""
    known = len(_shared(text, before))
    counts = [_squeezed(each[known:]).count(_squeezed(words)) for each in (text, prompt)]
    is_shown = counts[0] > counts[1]  # a word may stand in the name of the role too
    if not (prompt and text.startswith(prompt) and (is_shown or not verbatim)):
        around, behind = _around(messages, render)
        if verbatim and not is_shown:
            text = around + words + behind
        if not (prompt and text.startswith(prompt)):
            prompt = _OPEN_TAG.sub("", _shared(around, text))
    spoken = max(len(prompt), text.rfind(words) + len(words))
    return Rendered(len(messages), text, [(len(prompt), len(text))], spoken)


def _around(messages: list[Message], render: Render, *more: Message) -> tuple[str, str]:
    """Return what a template renders around what the assistant says last, before `more` messages."""
    *history, message = messages
    is_list = isinstance(message.get("content"), list)
    one, other = (
        render(
            [*history, {**message, "content": [{"type": "text", "text": word}] if is_list else word}, *more],
            False,
        )
        for word in "ab"
    )
    around = _shared(one, other)
    if around == one:
        raise Unrendered(len(messages))
    return around, one[len(around) + 1 :]


def _shared(one: str, other: str) -> str:
    """Return how two texts begin alike; slices are compared, since a loop over characters takes seconds."""
    alike, most = 0, min(len(one), len(other))
    while alike < most:
        middle = (alike + most + 1) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return one[:alike]


def _squeezed(text: str) -> str:
    """Return a text without its spaces, which templates add and remove."""
    return "".join(text.split())


def _end_within(earlier: Rendered, text: str, marks: tuple[str, ...]) -> int | None:
    """Return where the last turn of a text ends in the rendering of a longer conversation.

    None if that renders it otherwise, up to the mark that ends it. A template may end a conversation with
    more than it ends a turn with (Phi-3); what it ends a turn with is enough.
    """
    if text.startswith(earlier.text):
        return len(earlier.text)
    shared = _shared(text, earlier.text)
    ends = [
        shared.rfind(mark, earlier.spoken) + len(mark) for mark in marks if mark in shared[earlier.spoken :]
    ]
    return max(ends, default=None)


def _learn_ends(turn: Rendered, messages: list[Message], render: Render, marks: tuple[str, ...]) -> None:
    """Let turns without a mark at their end have the one that follows."""
    if not marks:
        return
    behind = re.compile(r"\s*(?:" + "|".join(map(re.escape, marks)) + ")")
    if not turn.text.rstrip().endswith(marks):
        _, rest = _around(messages[: turn.count], render, {"role": "user", "content": "c"})
        following = behind.match(rest)
        turn.text += following[0] if following else ""
    for at, (start, end) in enumerate(turn.turns):
        following = behind.match(turn.text, end)
        if following and not turn.text[start:end].rstrip().endswith(marks):
            turn.turns[at] = (start, following.end())
