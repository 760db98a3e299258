"""The `data` section of a recipe: which texts, in which shares, cut how."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from ...texts.document_rows import DocumentSource

SELF = "self"  # the source whose text the teacher writes
Packing = Literal["documents", "stream"]
_TWO_FIELDS = "text_field and messages_field are both given; documents are either text or conversations"


class Section(BaseModel):
    """Part of a recipe: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Source(Section):
    """One text of a mixture, or only its name. What is not said here is as it is in `data`."""

    source: str
    """As `data.source`, of one text."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the run's windows, relative to the other weights."""
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
    def _is_text_or_chat(self) -> "Source":
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


# Told apart by type, so that a mistake in a list is told as one in a list; the tags stand in pydantic's
# errors.
OneOrMore = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[tuple[Source, ...], Field(min_length=1), Tag("<mixture>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<mixture>"),
]


class Data(Section):
    """Where the text comes from and how it is cut."""

    source: OneOrMore
    """A .jsonl, .json, .txt or .parquet file (may be .gz, .xz, .bz2, .zst), a directory or glob of them, a
    dataset's Hub id,
    `stdlib`, the source text of Python's standard library, or `self`, text that the teacher writes; or a
    list of
    `{source: ..., weight: ...}`, whose windows are mixed by weight."""
    name: str | None = None
    """Configuration of a Hub dataset, e.g. `sample-10BT`."""
    split: str = "train"
    """Split of a Hub dataset."""
    text_field: str = "text"
    """The field that holds a document's text."""
    messages_field: str | None = None
    """The field that holds a conversation, a list of `{role, content}`, for the tokenizer's chat template;
    only what the
    assistant says is learnt. null: documents are text."""
    packing: Packing = "documents"
    """`documents`: a document ends with EOS and attends to itself alone, and a conversation is never split
    over two windows;
    `stream`: documents follow each other, and attention goes from one to the next."""
    seq_len: int = Field(ge=2)
    """Tokens in a window."""
    seed: int = Field(default=0, ge=0)
    """Decides which documents are taken first, the order of windows, and what `self` writes."""

    @field_validator("source", mode="before")
    @classmethod
    def _is_named(cls, source: object) -> object:
        if not isinstance(source, str | list | tuple):
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
    def sources(self) -> tuple[Source, ...]:
        """The texts with everything said.

        One that names a field of its own takes neither field from `data`.
        """
        if isinstance(self.source, str):
            said = {
                key: getattr(self, key) for key in ("source", "name", "split", "text_field", "messages_field")
            }
            return (Source.model_construct(**said, weight=1.0),)
        return tuple(self._complete(source) for source in self.source)

    def _complete(self, source: Source) -> Source:
        own = source.text_field is not None or source.messages_field is not None
        said = {
            "name": source.name or self.name,
            "split": source.split or self.split,
            "text_field": source.text_field or self.text_field,
            "messages_field": source.messages_field if own else self.messages_field,
        }
        return source.model_copy(update=said)
