"""Every public name has a docstring that says what the signature says, and a place in the API pages."""

import inspect
import re
from pathlib import Path
from typing import Any

import docstring_parser
import pytest

import dspark_lightning
from dspark_lightning import callbacks, datamodules

PLACES = {"dspark_lightning": dspark_lightning, "callbacks": callbacks, "datamodules": datamodules}
PUBLIC = {
    f"{place}.{name}".removeprefix("dspark_lightning."): getattr(module, name)
    for place, module in PLACES.items()
    for name in module.__all__
}
DESCRIBED = {name: public for name, public in PUBLIC.items() if callable(public)}
PAGES = Path(__file__).parent.parent / "docs" / "api"


def described(public: Any) -> list[str]:
    """The names that a docstring has under Args or, of a record, under Attributes; a class without a constructor of its
    own may leave them to the class that has it."""
    docstring = docstring_parser.parse(inspect.cleandoc(public.__doc__), docstring_parser.DocstringStyle.GOOGLE)
    names = [each.arg_name.lstrip("*") for each in docstring.params]
    if not names and inspect.isclass(public) and "__init__" not in vars(public):
        return next((described(base) for base in public.__bases__ if base in PUBLIC.values()), [])
    return names


@pytest.mark.parametrize("name", DESCRIBED)
def test_docstrings_name_exactly_the_parameters(name: str) -> None:
    assert described(DESCRIBED[name]) == list(inspect.signature(DESCRIBED[name]).parameters)


def test_described_sees_drift() -> None:
    def drifted(new_name: int) -> None:
        """Do something.

        Args:
            old_name: a number.
        """

    assert described(drifted) == ["old_name"]


def test_every_public_name_has_one_place_in_the_api_pages() -> None:
    listed = [name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert sorted(listed) == sorted(f"dspark_lightning.{name}" for name in PUBLIC)
