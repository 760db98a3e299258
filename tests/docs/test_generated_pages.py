"""The generated pages name every command, option, key, family, rule and public function."""

import re

import click
import pytest
from pydantic import BaseModel

import kvfold
from docs.make import api_page, commands_page, keys_page, runs_page, support_page
from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.request import FoldRequest
from kvfold.distill.recipe.recipe_file import SECTIONS
from kvfold.engines.rules.engine_rules import RULES

from ..support.shown_code import ROOT


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of every table."""
    return [re.split(r"(?<!\\) \| ", line[2:-2]) for line in page.splitlines() if line.startswith("| ")]


def test_every_option_has_a_row() -> None:
    page = commands_page.commands_page()
    for words, command in commands_page.all_commands():
        section = page.split(f"## {words}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            names = parameter.opts if isinstance(parameter, click.Option) else []
            assert all(f"| `{name}`" in section for name in names[:1]), (words, names)


def test_a_command_or_an_option_without_help_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = click.Command("bare", params=[click.Option(["--dark"])], help="Do something.")
    monkeypatch.setattr(commands_page, "all_commands", lambda: [("kvfold bare", bare)])
    with pytest.raises(ValueError, match="kvfold bare --dark has no help"):
        commands_page.commands_page()
    monkeypatch.setattr(commands_page, "all_commands", lambda: [("kvfold bare", click.Command("bare"))])
    with pytest.raises(ValueError, match="kvfold bare has no help"):
        commands_page.commands_page()


def test_every_key_has_a_row_with_its_meaning() -> None:
    found = {row[0]: row for row in rows(keys_page.keys_page())}
    models: list[type[BaseModel]] = [*SECTIONS.values(), FoldRequest]
    for model in models:
        for name, field in model.model_fields.items():
            row = found[f"`{field.alias or name}`"]
            assert len(row) == 4, row
            assert row[1], row
            assert row[2], row
            assert len(row[3]) > 10, row


def test_types_and_defaults_are_those_of_the_schema() -> None:
    page = keys_page.keys_page()
    assert "| `lr` | number | by the size of the student, as for `kvfold distill FOLD` |" in page
    assert "| `batch_tokens` | integer or `null` | `null` |" in page
    assert "| `grad_clip` | number or `null` | `1.0` |" in page
    assert "| `schedule` | `cosine` or `wsd` or `constant` | `cosine` |" in page


def test_every_family_is_listed() -> None:
    kinds = {row[1].strip("`") for row in rows(support_page.support_page())}
    assert FAMILIES.keys() <= kinds


def test_every_rule_is_listed() -> None:
    listed = [" | ".join(row) for row in rows((ROOT / "docs/engines.md").read_text(encoding="utf-8"))]
    for rule in RULES:
        assert any(" ".join(rule.why.split()) in row for row in listed), rule.why


def test_every_public_name_has_a_section() -> None:
    page = api_page.api_page()
    for name in kvfold.__all__:
        assert f"heading: kvfold.{name}\n" in page


def test_every_result_has_a_row_with_its_command_and_day() -> None:
    found = rows(runs_page.runs_page())[1:]
    assert {row[0] for row in found} == {f"`{file.name}`" for file in runs_page.RESULTS.glob("*.json")}
    for file, command, day, machine, *_ in found:
        assert command.startswith("`benchmarks."), file
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", day), file
        assert len(machine) > 5, file


def test_a_result_without_a_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no benchmark writes .*dark-demo"):
        runs_page.command("dark-demo")
