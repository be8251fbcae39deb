"""The parser of a command's options, which suggests the option that was meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn


class OptionParser(argparse.ArgumentParser):
    """An `argparse` parser whose errors suggest an option in place of one that does not exist."""

    _words: Sequence[str] = ()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the command's name. A wrong one ends the process with code 2."""
        self._words = words
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Print the usage, the error and a suggestion; exit with code 2."""
        from difflib import get_close_matches  # takes longer to import than most verbs

        options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in (word.partition("=")[0] for word in self._words if word.startswith("--")):
            if not any(option.startswith(word) for option in options) and (
                close := get_close_matches(word, options, n=1)
            ):
                message += f"; did you mean {close[0]} instead of {word}?"
        super().error(message)
