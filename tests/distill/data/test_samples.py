"""A look at the first documents before a run: mistakes in one sentence, and an estimate of the amount."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from transformers import AutoTokenizer

from kvfold.core.errors import InvalidInput
from kvfold.distill.data.samples import take_sample
from kvfold.distill.recipe.data_section import TextSource
from kvfold.distill.recipe.recipe import Recipe
from kvfold.distill.run.job import distill

from ...support.conversations import PLAIN, say
from ...support.distillation import command, write_recipe
from ..conftest import MakeRecipe


def check(recipe: Recipe, tmp_path: Path, *words: str, code: int | None = None) -> Result:
    return command("validate", write_recipe(recipe, tmp_path / "recipe.yaml"), *words, code=code)


def lines(count: int, field: str = "text") -> str:
    return "".join(
        json.dumps({field: f"document {number} " + "word " * 40}) + "\n" for number in range(count)
    )


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", "", "a.jsonl holds no documents"),
    ("a.jsonl", '{"text": ""}\n' * 3, "a.jsonl holds no documents"),
    ("a.jsonl", lines(9, "body"), "has no field 'text'; data.text_field can be body"),
    ("a.jsonl", '{"text": 7}\n' * 9, "the field 'text' holds no text"),
    ("a.jsonl", '{"text": "a', "a.jsonl cannot be read: "),
    ("a.jsonl", '{"text": "short"}\n',
     "holds 6 tokens in 1 document, but one window of data.seq_len 32 takes 33"),
    ("a.txt", "", "a.txt holds no documents"),
    ("a.txt", b"caf\xe9 " * 99, "a.txt cannot be read: it is not UTF-8 text (byte 3); save it as UTF-8"),
    ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read: "),
    ("a.parquet", "no parquet", "a.parquet cannot be read: "),
])  # fmt: skip
def test_what_cannot_be_trained_on_is_told(
    make_recipe: MakeRecipe, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    result = check(make_recipe(data={"source": str(file), "seq_len": 32}), tmp_path, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: recipe.yaml: data.source")


def test_conversations_are_rendered(make_recipe: MakeRecipe, student: Path, tmp_path: Path) -> None:
    data, talker = tmp_path / "chat.jsonl", tmp_path / "talker"
    shutil.copytree(student, talker)
    recipe = make_recipe(
        student=str(talker), data={"source": str(data), "messages_field": "messages", "seq_len": 32}
    )
    data.write_text(json.dumps({"messages": say("hello there", "and hello to you all, one by one")}) + "\n")
    result = check(recipe, tmp_path)
    assert (result.exit_code, "has no chat template" in result.stderr) == (2, True)
    (talker / "chat_template.jinja").write_text(PLAIN)
    assert check(recipe, tmp_path).exit_code == 0
    data.write_text(json.dumps({"messages": [{"speaker": "user", "content": "hello"}]}) + "\n")
    result = check(recipe, tmp_path)
    assert (result.exit_code, "it should be a list of {role, content}" in result.stderr) == (2, True)


def test_the_first_conversations_are_refused(make_recipe: MakeRecipe, student: Path, tmp_path: Path) -> None:
    data, talker = tmp_path / "chat.jsonl", tmp_path / "talker"
    shutil.copytree(student, talker)
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (talker / "chat_template.jinja").write_text(refuse + PLAIN)
    good = say("hello there", "and hello to you all, one by one")
    bad = json.dumps({"messages": [{"role": "system", "content": "be kind"}, *good]}) + "\n"
    recipe = make_recipe(
        student=str(talker), data={"source": str(data), "messages_field": "messages", "seq_len": 32}
    )
    data.write_text(bad * 3)
    result = check(recipe, tmp_path)
    assert (result.exit_code, "no system role" in result.stderr) == (2, True)
    data.write_text(bad * 2000 + (json.dumps({"messages": good}) + "\n") * 2000)
    result = check(recipe, tmp_path, code=0)
    assert "all of the first 64 conversations cannot be trained on and are left out" in result.stderr
    row = json.dumps({"messages": good}) + "\n"
    data.write_text(row * 9 + json.dumps({"messages": "no conversation"}) + "\n" + row * 591)
    result = check(recipe, tmp_path, code=0)
    assert "1 of the first 64 conversations cannot be trained on and are left out" in result.stderr
    assert "a row's 'messages' is 'no conversation'; it should be a list of {role, content}" in result.stderr


def test_an_unknown_token(make_recipe: MakeRecipe, student: Path, teacher: Path, tmp_path: Path) -> None:
    """One entry more than the model, in text that is trained on or held out; to pad with it is no mistake."""
    models = {}
    for role, directory in (("student", student), ("teacher", teacher)):
        models[role] = str(tmp_path / role)
        shutil.copytree(directory, tmp_path / role)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        tokenizer.chat_template = PLAIN
        tokenizer.save_pretrained(tmp_path / role)
    (tmp_path / "good.txt").write_text("some words in a row " * 40, encoding="utf-8")
    (tmp_path / "bad.txt").write_text(
        "<pad>" + " ".join(str(number**2) for number in range(200)), encoding="utf-8"
    )
    talk = json.dumps({"talk": say("hello there", "and hello to you all")})
    (tmp_path / "chat.jsonl").write_text(f"{talk}\n" * 4, encoding="utf-8")
    good, bad, chat = (str(tmp_path / name) for name in ("good.txt", "bad.txt", "chat.jsonl"))
    assert check(make_recipe(**models, data={"source": good, "seq_len": 32}), tmp_path).exit_code == 0
    for keys in (
        {"data": {"source": bad, "seq_len": 32}},
        {"data": {"source": good, "seq_len": 32}, "evaluate": {"source": bad}},
    ):
        result = check(make_recipe(**models, **keys), tmp_path, code=2)
        assert "gives id 258" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        with pytest.raises(InvalidInput, match="gives id 258"):
            distill(make_recipe(**models, **keys))
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
    talks = make_recipe(**models, data={"source": chat, "messages_field": "talk", "seq_len": 64}, tokens=192)
    assert check(talks, tmp_path).exit_code == 0
    assert distill(talks).tokens == 192


def test_about_how_much_there_is(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """900 documents, a token for each of their bytes, of which 64 in each of three files are read."""
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(lines(300))
    recipe = make_recipe(
        data={"source": f"{tmp_path}/*.jsonl", "seq_len": 32}, tokens="1M", batch_tokens=1024
    )
    result = check(recipe, tmp_path, "--json", code=0)
    told = json.loads(result.stdout)
    ((sentence,),) = told["notes"].values()
    about = int(sentence.split(" holds about ")[1].split(" tokens")[0].replace(",", ""))
    really = 3 * sum(len(json.loads(line)["text"]) + 1 for line in lines(300).splitlines())
    assert about == pytest.approx(really, rel=0.02)
    assert "tokens and the run reads 1,000,448, so some are read again" in sentence
    enough = make_recipe(data={"source": f"{tmp_path}/*.jsonl", "seq_len": 32}, tokens=3200, batch_tokens=32)
    assert check(enough, tmp_path).stderr == ""


def test_little_is_read_of_much(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.write_text("wörd " * 10**6)
    sample = take_sample(TextSource(source=str(large), text_field="text"))
    assert sample
    assert 2**20 - 200_000 < len(sample.values[0]) <= 2**20
    assert sample.share == pytest.approx(2**20 / 6e6, rel=1e-3)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(20):
        (many / f"{number:02d}.jsonl").write_text(lines(70) if number in (0, 6, 13, 19) else "damaged {")
    sample = take_sample(TextSource(source=str(many), text_field="text"))
    assert sample
    assert len(sample.values) == 4 * 64
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines(99).encode()))
    sample = take_sample(TextSource(source=str(tmp_path / "packed.jsonl.gz"), text_field="text"))
    assert sample
    assert (len(sample.values), sample.share) == (64, None)


def test_rows_of_parquet_are_counted(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": ["word"] * 256}).to_parquet(str(tmp_path / "a.parquet"))
    sample = take_sample(TextSource(source=str(tmp_path / "a.parquet"), text_field="body"))
    assert sample
    assert (len(sample.values), sample.share) == (64, 0.25)


@pytest.mark.parametrize(("source", "content", "message"), [
    ("held.txt", "", "held.txt holds no text; an evaluation needs"),
    ("held.txt", "a few words",
     "held.txt has 11 tokens, but a window of 32 takes 31 of them; evaluate.seq_len 12 would fit"),
    ("held.jsonl", lines(3, "body"), "has no field 'text'; evaluate.text_field can be body"),
    ("nowhere", None, "evaluate.source nowhere is not a file; name a text, or stdlib"),
    ("held.txt", "TRAIN", "is trained on: "),
])  # fmt: skip
def test_held_out_text_is_looked_at(
    make_recipe: MakeRecipe, text: Path, tmp_path: Path, source: str, content: str | None, message: str
) -> None:
    """The last is a text of its own, by name and bytes, that is made of documents which are trained on."""
    if content is not None:
        train = "\n".join(json.loads(line)["text"] for line in text.read_text().splitlines()[:9])
        (tmp_path / source).write_text(content.replace("TRAIN", train), encoding="utf-8")
    place = str(tmp_path / source) if content is not None else source
    result = check(make_recipe(evaluate={"source": place, "windows": 4}), tmp_path, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_nothing_is_said_of_a_good_recipe(make_recipe: MakeRecipe, held: Path, tmp_path: Path) -> None:
    recipe = make_recipe(evaluate={"source": str(held), "windows": 4}, tokens=3200, batch_tokens=32)
    result = check(recipe, tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
