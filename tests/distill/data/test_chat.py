"""Of a conversation only what the assistant says is predicted."""

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AddedToken, AutoTokenizer

from kvfold.core.errors import InvalidInput
from kvfold.distill.data import chat
from kvfold.distill.data.chat import conversation, fill_windows, messages_of
from kvfold.distill.data.token_documents import SCORED, START, Piece
from kvfold.distill.data.token_store import open_windows, write_tokens
from kvfold.distill.recipe.data_section import Data

from ...support.conversations import PLAIN, PROMPT, TURN, say
from ...support.tokenizers import save_tokenizer

MARKED = (
    "<s>" + TURN + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }};{% endgeneration %}"
    "{% else %}{{ m['content'] }};{% endif %}" + PROMPT
)
SILENT = "<s>" + TURN + "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %};" + PROMPT
TYPED = "<s>" + TURN + "{{ '' + m['content'] }};" + PROMPT
# As families render turns: each is learnt behind the history as it looked when the turn was spoken.
_TALK = [{"role": "system", "content": "S"}, *say("p", "a", "q", "b")]
_ASSISTANT = "{% if m['role'] == 'assistant' %}"
_LAST_THINKS = _ASSISTANT + "{% if loop.last %}<t></t>{% endif %}{% endif %}"
_DROPS_THOUGHTS = _ASSISTANT + "{{ m['content'].split('</t>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
FAMILIES = {
    "thoughts of the last turn alone (Qwen3)": (
        TURN + _LAST_THINKS + "{{ m['content'] }}<end>" + PROMPT,
        _TALK,
        [
            "[system]S<end>[user]p<end>[assistant]{<t></t>a<end>}",
            "[system]S<end>[user]p<end>[assistant]a<end>[user]q<end>[assistant]{<t></t>b<end>}",
        ],
    ),
    "the same, where calls of tools follow each other": (
        TURN
        + _ASSISTANT
        + "{% if not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
        "<t></t>{% endif %}{% endif %}{{ m['content'] }}<end>" + PROMPT,
        [*say("p", "a"), {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"}],
        ["[user]p<end>[assistant]{<t></t>a<end>}[tool]r<end>[assistant]{<t></t>b<end>}"],
    ),
    "thoughts that are prompted for and left out (R1)": (
        "<s>"
        + TURN
        + _DROPS_THOUGHTS
        + "<end>{% endfor %}{% if add_generation_prompt %}[assistant]<t>{% endif %}",
        say("p", "<t>x</t>a", "q", "b"),
        [
            "<s>[user]p<end>[assistant]<t>{x</t>a<end>}",
            "<s>[user]p<end>[assistant]a<end>[user]q<end>[assistant]{b<end>}",
        ],
    ),
    "the system's words at the last question (Mistral)": (
        "<s>{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}[user]"
        "{% if m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}S {% endif %}"
        "{{ m['content'] }}[/user]{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}",
        _TALK,
        ["<s>[user]S p[/user]{a<end>}", "<s>[user]p[/user]a<end>[user]S q[/user]{b<end>}"],
    ),
    "the next role ends a turn (GLM)": (
        "<s>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        say("p", "a", "q", "b"),
        ["<s><user>p<assistant>{a<user>}q<assistant>{b<user>}"],
    ),
    "a mark behind the whole conversation (Phi-3)": (
        TURN + "{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% else %}<eos>{% endif %}",
        say("p", "a", "q", "b"),
        ["[user]p<end>[assistant]{a<end>}[user]q<end>[assistant]{b<end><eos>}"],
    ),
    "a mark behind the last turn alone": (
        TURN + "{{ m['content'] }}{% if loop.last %}<eos>{% endif %}" + PROMPT,
        say("p", "a", "q", "b"),
        ["[user]p[assistant]{a<eos>}", "[user]p[assistant]a[user]q[assistant]{b<eos>}"],
    ),
    "what others say last is not read": (PLAIN, say("p", "a", "q"), ["<s>[user]p;[assistant]{a;}"]),
    "marked turns that change once others follow": (
        TURN + _ASSISTANT + "{% if loop.last %}<t></t>{% endif %}{% generation %}{{ m['content'] }}<end>"
        "{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}" + PROMPT,
        say("p", "a", "q", "b"),
        [
            "[user]p<end>[assistant]<t></t>{a<end>}",
            "[user]p<end>[assistant]a<end>[user]q<end>[assistant]<t></t>{b<end>}",
        ],
    ),
}
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}" + PLAIN
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def learnt(tokenizer: Any, ids: Any, marks: Any) -> str:
    shown = (tokenizer.decode(id) if mark & SCORED else "_" for id, mark in zip(ids, marks, strict=True))
    return "".join(shown)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistant_is_learnt_and_nobody_else(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    ((ids, marks),) = conversation(
        [{"role": "system", "content": "sys"}, *say("hi", "ho ho", "and", "so")], tokenizer, "a"
    )
    assert tokenizer.decode(ids) == "<s>[system]sys;[user]hi;[assistant]ho ho;[user]and;[assistant]so;"
    before, between = 1 + len("[system]sys;[user]hi;[assistant]"), len("[user]and;[assistant]")
    assert learnt(tokenizer, ids, marks) == "_" * before + "ho ho;" + "_" * between + "so;"
    assert [int(mark & START) for mark in marks] == [START] + [0] * (len(ids) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_learnt_as_they_looked_when_they_were_spoken(tokenizer: Any, family: str) -> None:
    """Braces stand around what is learnt."""
    tokenizer.chat_template, talk, expected = FAMILIES[family]
    tokenizer.add_tokens(
        [AddedToken(mark, special=True) for mark in ("<end>", "<eos>", "<user>", "<assistant>")]
    )
    found = []
    for ids, marks in conversation(talk, tokenizer, "a"):
        runs = groupby(zip(ids, marks & SCORED, strict=True), itemgetter(1))
        texts = [(tokenizer.decode([id for id, _ in run]), learnt) for learnt, run in runs]
        found.append("".join(f"{{{text}}}" if learnt else text for text, learnt in texts))
    assert found == expected


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistant_may_speak_first(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    talk = [{"role": "assistant", "content": "a b"}, *say("hi", "ho")]
    ((ids, marks),) = conversation(talk, tokenizer, "a")
    assert tokenizer.decode(ids) == "<s>[assistant]a b;[user]hi;[assistant]ho;"
    assert (
        learnt(tokenizer, ids, marks)
        == "_" * len("s[assistant]") + "a b;" + "_" * len("[user]hi;[assistant]") + "ho;"
    )


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_template_that_renders_too_much_is_refused(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = "{{ 'a' * 20000000 }}" + template
    with pytest.raises(chat.Refused, match=r"the chat template makes 20,000,0\d\d characters of the conv"):
        conversation(say("hi", "ho"), tokenizer, "a")


def test_conversations_that_a_template_refuses_are_left_out(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One does not stop a run; where all are refused, reading ends before the source does."""
    tokenizer.chat_template = STRICT
    seen: list[Any] = []
    rows: list[Any] = [say("q", "a")[::-1], say("q", "b"), say("q", "c"), {"role": [], "content": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"talk": row}) + "\n" for row in rows[:3]))
    data = Data(source=str(tmp_path / "a.jsonl"), messages_field="talk", seq_len=32)
    write_tokens(tmp_path / "tokens.bin", data, tokenizer, 100, vocabulary=258)
    said = caplog.text
    assert (
        'begins with {"role": "assistant", "content": "a"}: the user speaks first: 1 of 3 read'
        in " ".join(said.split())
    )
    assert conversation(messages_of(rows[3], data.sources[0]), tokenizer, "a") == []
    (tmp_path / "a.jsonl").write_text((json.dumps({"talk": rows[0]}) + "\n") * 200)
    monkeypatch.setattr(chat, "conversation", lambda *given: (seen.append(given), conversation(*given))[1])
    with pytest.raises(InvalidInput, match="the user speaks first"):
        write_tokens(tmp_path / "tokens.bin", data, tokenizer, 100, vocabulary=258)
    assert len(seen) < 100


@pytest.mark.parametrize("row", [
    "text",
    [{"from": "human", "value": "q"}],
    [{"role": None, "content": "q"}],
    {"role": ["user"], "content": ["a", "b"]},
    [*say("q"), {"role": "assistant", "content": 1}],
])  # fmt: skip
def test_an_unusable_row_is_left(
    row: Any, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = TYPED
    rows = [say("q", "a")] * 200
    rows.insert(150, row)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"talk": row}) + "\n" for row in rows))
    data = Data(source=str(tmp_path / "a.jsonl"), messages_field="talk", seq_len=32)
    write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10**4, vocabulary=258)
    assert "a.jsonl: conversations left out: " in caplog.text
    assert ": 1 of 201 read" in caplog.text
    assert open_windows(tmp_path / "tokens.bin", data).scored(range(3)) > 0


def test_padding_is_a_token_that_the_student_has(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    (tmp_path / "a.jsonl").write_text(json.dumps({"talk": say("q" * 9, "a" * 9)}) + "\n")
    data = Data(source=str(tmp_path / "a.jsonl"), messages_field="talk", seq_len=64)
    tokenizer.add_special_tokens({"eos_token": "end", "pad_token": "<pad>"})
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, 258)
    for vocabulary, padding in ((259, 258), (258, 257), (257, 0)):
        write_tokens(tmp_path / "tokens.bin", data, tokenizer, 1, vocabulary=vocabulary)
        assert open_windows(tmp_path / "tokens.bin", data).tokens[0][-1] == padding


def test_a_token_without_an_embedding_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """In text, in what is said, and at the end of documents."""
    tokenizer.chat_template = PLAIN
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "word " * 20 + "<pad>", "talk": say("q", "a<pad>" * 20)}) + "\n"
    )
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    for field in ("text_field", "messages_field"):
        keys = {field: "text" if field == "text_field" else "talk"}
        data = Data(source=str(tmp_path / "a.jsonl"), seq_len=32, **keys)
        with pytest.raises(
            InvalidInput, match=r"a\.jsonl: the tokenizer .* gives id 258 \('<pad>'\), but .* has"
        ):
            write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10, vocabulary=258)
        assert not (tmp_path / "tokens.bin").exists()
        write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10, vocabulary=259)
        (tmp_path / "tokens.bin").unlink()
    tokenizer.eos_token = "<pad>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 5}) + "\n")
    with pytest.raises(InvalidInput, match="gives id 258"):
        write_tokens(
            tmp_path / "tokens.bin",
            Data(source=str(tmp_path / "a.jsonl"), seq_len=8),
            tokenizer,
            9,
            vocabulary=258,
        )


def test_both_kinds_of_template_and_data_give_the_same_windows(tmp_path: Path, tokenizer: Any) -> None:
    talks = [say("a" * number, "b" * (number % 5), "c", "d" * number) for number in range(1, 40)]
    columns = [{key: [message[key] for message in talk] for key in ("role", "content")} for talk in talks]
    found = []
    for name, template, rows in (
        ("list", PLAIN, talks),
        ("marked", MARKED, talks),
        ("columns", PLAIN, columns),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"talk": row}) + "\n" for row in rows))
        tokenizer.chat_template = template
        data = Data(source=str(file), messages_field="talk", seq_len=128)
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name / "tokens.bin", data, tokenizer, 10**4, vocabulary=258)
        windows = open_windows(tmp_path / name / "tokens.bin", data)
        found.append(windows.batch(range(len(windows))))
    for other in found[1:]:
        assert (other.input_ids_BS == found[0].input_ids_BS).all()
        assert (other.labels_BS == found[0].labels_BS).all()
    # Every word of the assistant's is there once, and no conversation is split: each begins in the window
    # that ends it.
    texts = [tokenizer.decode(ids) for ids in found[0].input_ids_BS]
    assert sum(text.count("[user]c;[assistant]d") for text in texts) == len(talks)
    assert all(text.startswith("<s>") for text in texts)
    assert found[0].count == sum(number % 5 + 1 + number + 1 for number in range(1, 40))


def test_windows_are_filled_with_what_fits() -> None:
    def piece(number: int, length: int) -> Piece:
        return Piece(np.full(length, number, dtype=np.int32), np.full(length, SCORED, dtype=np.uint8))

    lengths = [6, 5, 4, 10, 9, 1, 3]
    filled = list(
        fill_windows(iter([piece(number, length) for number, length in enumerate(lengths, 1)]), 10, 0)
    )
    ids = np.concatenate([piece.ids for piece in filled])
    windows = [[int(number) for number in dict.fromkeys(ids[at : at + 10])] for at in range(0, 40, 10)]
    assert windows == [[1, 3], [2, 7, 6, 0], [4], [5, 0]]
    assert len(ids) == 41
    marks = np.concatenate([piece.marks for piece in filled])
    assert not (marks[ids == 0] & SCORED).any()
    assert (marks[[19, 39, 40]] == START).all()


def test_long_and_silent_talks(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = PLAIN
    rows = [say("q", "a" * 50), say("q" * 60, "a"), say("q"), say("q", "a")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"talk": row}) + "\n" for row in rows))
    data = Data(source=str(tmp_path / "a.jsonl"), messages_field="talk", seq_len=32)
    write_tokens(tmp_path / "tokens.bin", data, tokenizer, 100, vocabulary=258)
    said = caplog.text
    assert "a.jsonl: conversations cut to data.seq_len 32: 2 of 4 read" in said
    assert "a.jsonl: conversations left out, without a word of the assistant's: 2 of 4 read" in said
    windows = open_windows(tmp_path / "tokens.bin", data)
    assert (len(windows), windows.scored(range(2))) == (2, 32 - len("s[user]q;[assistant]") + len("a;"))


def test_mistakes_about_chat_are_named(tmp_path: Path, tokenizer: Any) -> None:
    talks = [say("q", "a", "q", "a")]
    for template, rows, message in (
        (None, talks, "has no chat template, which defines how a conversation is written"),
        (SILENT, talks, "leaves out what message 2 of the conversation .* says, so there is nothing to learn"),
        (STRICT, [say("q", "a")[::-1]],
         r"cannot render the conversation .* begins with \{.*\"a\"\}: the user speaks"),
        ("{{ 1 / 0 }}", talks, "cannot render the conversation .*: division by zero"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", talks,
         "cannot render the conversation .*recursion"),
        (PLAIN, [{"role": ["user"], "content": ["a", "b"]}], "it should be a list of {role, content}"),
        (PLAIN, ["text"], "a row's 'talk' is 'text'; it should be a list of {role, content}"),
        (PLAIN, [[{"from": "human", "value": "q"}]], "it should be a list of {role, content}"),
        (PLAIN, [say("q"), say("r")], "none of its 2 conversations has a word of the assistant's"),
    ):  # fmt: skip
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"talk": row}) + "\n" for row in rows))
        tokenizer.chat_template = template
        data = Data(source=str(tmp_path / "a.jsonl"), messages_field="talk", seq_len=32)
        with pytest.raises(InvalidInput, match=message):
            write_tokens(tmp_path / "tokens.bin", data, tokenizer, 10, vocabulary=258)
    with pytest.raises(InvalidInput, match=r"has no field 'chat'; data\.messages_field can be talk"):
        write_tokens(
            tmp_path / "tokens.bin",
            data.model_copy(update={"messages_field": "chat"}),
            tokenizer,
            10,
            vocabulary=258,
        )
