"""Write the pages of docs/ that come from the program: its help, and its settings.

python scripts/make_docs.py            # write them
python scripts/make_docs.py --check    # write nothing; exit 1 where one is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from onebit_serve.cli import COMMANDS, one_bit

__all__ = ["command_line", "configuration", "main", "settings"]

ROOT = Path(__file__).parent.parent
WIDTH = 96
TABLE = re.compile(r"\[+([\w.]+)\]+$")
# A key with its default, or one without a default, commented out with an example.
KEY = re.compile(r"(?P<without># )?(?P<key>[a-z_]+) = (?P<value>.+)$")
NOTE = "<!-- Written by `make docs`; edit its source, {source}. -->"


def command_line() -> str:
    """Return the page with the help of every command."""
    lines = ["# The command line", "", NOTE.format(source="the help texts in onebit_serve/cli"), ""]
    group = click.Context(one_bit, info_name="1bit", terminal_width=WIDTH, max_content_width=WIDTH)
    for name in COMMANDS:
        command = one_bit.get_command(group, name)
        if command is None:
            continue
        context = click.Context(
            command, parent=group, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH
        )
        lines += [f"## 1bit {name}", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(lines)


def settings(text: str) -> list[tuple[str, str, str, str]]:
    """Return table, key, default and explanation of every key of a commented configuration."""
    found: list[tuple[str, str, str, str]] = []
    table, comment = "", list[str]()
    for line in text.splitlines():
        key = KEY.match(line)
        if title := TABLE.match(line):
            table, comment = title[1], []
        elif key and table:
            default = "none" if key["without"] else f"`{key['value']}`"
            found.append((table, key["key"], default, " ".join(comment)))
            comment = []
        elif line.startswith("# "):
            comment.append(line[2:])
        else:
            comment = []
    return found


def configuration() -> str:
    """Return the page with every setting."""
    source = ROOT / "configs" / "serve.toml"
    lines = [
        "# The settings",
        "",
        NOTE.format(source="configs/serve.toml"),
        "",
        "Flags win over environment variables, and those over the file that `--config` names.",
    ]
    last = ""
    for table, key, default, what in settings(source.read_text()):
        if table != last:
            lines += ["", f"## {table}", "", "| key | default | variable | what |"]
            lines += ["| --- | --- | --- | --- |"]
            last = table
        variable = f"ONEBIT_{table}_{key}".replace(".", "_").upper()
        cells = (f"`{key}`", default, f"`{variable}`", what)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


PAGES = {"command-line.md": command_line, "configuration.md": configuration}


def main(arguments: list[str]) -> int:
    """Write or check every page; return the exit code."""
    stale = []
    for name, make in PAGES.items():
        page = ROOT / "docs" / name
        text = make()
        if page.exists() and page.read_text() == text:
            continue
        stale.append(f"docs/{name}")
        if "--check" not in arguments:
            page.write_text(text)
            print(f"wrote docs/{name}")
    if stale and "--check" in arguments:
        print(f"out of date: {', '.join(stale)}\nhint: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
