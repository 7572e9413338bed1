"""Argument parser of the console commands, and types of their arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

from smddp import validation
from smddp.text import printable


class Parser(argparse.ArgumentParser):
    """Reports an invalid command line in one line, without the usage, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")


def path(text: str) -> str:
    """The name of a file or folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file or folder, got an empty text")
    return text


def seconds(text: str) -> float:
    """A time of more than zero, at most a year."""
    try:
        return validation.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_utf8(words: list[str]) -> None:
    """Raises ValueError for a word that is not UTF-8, which the native core cannot receive."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"invalid argument {word!a}: expected UTF-8 text") from None
