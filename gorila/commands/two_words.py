"""Commands of two words beside a command of the first: `gorila replay` is a role, `gorila replay inspect` looks at one."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TwoWords(TyperGroup):
    """A group in which a command may be called "replay inspect"; it is found before "replay"."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The longer name wins."""
        words = " ".join(args[:2])
        if len(args) > 1 and words in self.commands:
            return words, self.commands[words], args[2:]
        return super().resolve_command(ctx, args)
