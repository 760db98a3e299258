"""The `data` section of a recipe: the texts, their weights in the mixture, and how they are cut."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ...core.settings import LARGEST_SEED, Settings
from ...texts.document_rows import DocumentSource

SELF = "self"  # text that the teacher writes
Packing = Literal["documents", "stream"]
_TWO_FIELDS = "text_field and messages_field are both given; documents are either text or conversations"


class TextSource(Settings):
    """One text of a mixture, or only its name. A key that is missing here is taken from `data`."""

    source: str = Field(min_length=1)
    """The text, as in `data.source`."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Proportion of the run's windows that are read from this text, relative to the other weights."""
    name: str | None = None
    """As `data.name`."""
    split: str | None = None
    """As `data.split`."""
    text_field: str | None = None
    """As `data.text_field`."""
    messages_field: str | None = None
    """As `data.messages_field`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, source: object) -> object:
        return {"source": source} if isinstance(source, str) else source

    @model_validator(mode="after")
    def _is_text_or_chat(self) -> "TextSource":
        if self.text_field and self.messages_field:
            raise ValueError(_TWO_FIELDS)
        return self

    @property
    def documents(self) -> DocumentSource:
        """The documents of a source that is complete: its conversations, or else its texts."""
        key = "messages_field" if self.messages_field else "text_field"
        return DocumentSource(
            self.source,
            getattr(self, key) or "text",
            config=self.name,
            split=self.split or "train",
            field_option=f"data.{key}",
        )


# Discriminated by type, so that a mistake in a list is reported at its place in the list. The tags appear in
# pydantic's errors.
OneOrMore = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[tuple[TextSource, ...], Field(min_length=1), Tag("<mixture>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<mixture>"),
]


class Data(Settings):
    """The source of the text, and how it is cut into windows."""

    source: OneOrMore
    """The training text: a .jsonl, .json, .txt or .parquet file (may be compressed as .gz, .xz, .bz2 or
    .zst), a directory or glob of such files, the Hub id of a data set, `stdlib` (the source text of Python's
    standard library), or `self` (text that the teacher writes). A list of `{source: ..., weight: ...}` mixes
    the windows of several texts by weight."""
    name: str | None = None
    """Configuration of a Hub data set, such as `sample-10BT`."""
    split: str = "train"
    """Split of a Hub data set."""
    text_field: str = "text"
    """Field that holds the text of a document."""
    messages_field: str | None = None
    """Field that holds a conversation: a list of `{role, content}`, written with the tokenizer's chat
    template. Only the assistant's words are trained on. null: documents are text."""
    packing: Packing = "documents"
    """How documents are packed into windows. `documents`: each ends with EOS and attends only to
    itself, and a conversation is never split between two windows. `stream`: documents follow each other, and
    attention crosses from one to the next."""
    seq_len: int = Field(ge=2)
    """Tokens per window."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the order of documents and windows, and of the text that `self` writes."""

    @field_validator("source", mode="before")
    @classmethod
    def _is_named(cls, source: object) -> object:
        if not isinstance(source, str | list | tuple) or source == "":
            raise ValueError(
                "it should be the name of a text, or a list of texts such as {source: stdlib, weight: 1}"
            )
        return source

    @model_validator(mode="after")
    def _is_text_or_chat(self) -> "Data":
        if self.text_field != "text" and self.messages_field:
            raise ValueError(_TWO_FIELDS)
        return self

    @property
    def sources(self) -> tuple[TextSource, ...]:
        """The texts with every key filled in.

        A text that names a field of its own takes neither field from `data`.
        """
        given = (TextSource(source=self.source),) if isinstance(self.source, str) else self.source
        found = []
        for source in given:
            has_field = source.text_field is not None or source.messages_field is not None
            said = {
                "name": source.name or self.name,
                "split": source.split or self.split,
                "text_field": source.text_field or self.text_field,
                "messages_field": source.messages_field if has_field else self.messages_field,
            }
            found.append(source.model_copy(update=said))
        return tuple(found)
