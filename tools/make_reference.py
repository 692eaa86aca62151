"""Writes docs/reference.md from the docstrings of shardcore's public names, and
docs/deepspeed_keys.md from DeepSpeed's keys.

Run: python -m tools.make_reference [--check]. With --check it writes nothing, and fails if a file
is not what it would be.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import shardcore
import shardcore.dcp
from shardcore.deepspeed.keys import ALIASES, KEYS
from shardcore.deepspeed.training_engine import TrainingEngine

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# Reference

Every public name, with its docstring. [guide.md](guide.md) shows how they are used. Every rank must
call a collective function, in the same order. `python -m tools.make_reference` generates this page.
"""
GROUPS = {
    "Optimizers": ("FusedAdam", "CPUAdam", "clip_grad_norm_"),
    "Sharding": (
        "shard",
        "LossScale",
        "full_params",
        "full_grad",
        "full_state",
        "no_sync",
        "memory_report",
        "MemoryReport",
        "offload_states",
        "reload_states",
    ),
    "Training loops": ("EMA", "join", "register_forward_method", "unfreeze"),
    "Reproducibility": ("digest", "check_determinism", "Determinism", "SilentCorruption"),
    "Activations": (
        "checkpoint_wrapper",
        "apply_activation_checkpointing",
        "chunked_cross_entropy",
    ),
    "Pipelines": ("shard_pipeline",),
    "Long sequences": ("SequenceParallelLoader", "split_sequences", "ulysses_attention"),
    "Tensor parallel": ("tensor_parallel",),
    "Checkpoints": (
        *(
            "save",
            "Saving",
            "load",
            "Loaded",
            "resume",
            "consolidate",
            "sharded_state_dict",
            "load_sharded_state_dict",
        ),
        *("dcp.Writer", "dcp.Reader"),
    ),
    "DeepSpeed": ("initialize", "TrainingEngine"),
    "Launching": ("notebook_launcher",),
    "More": (),  # what is in no other group
}
# Made by shardcore's functions, never by users, so how they are made is not shown.
MADE_BY = {
    TrainingEngine: "initialize",
    shardcore.Saving: "save",
    shardcore.Loaded: "load",
    shardcore.MemoryReport: "memory_report",
    shardcore.Determinism: "check_determinism",
}
LEFT_OUT = {"hold", "start"}  # what the engine calls of a Saving
# "name, name: text", and in a section any such line; "Raises", which begins a paragraph of its own.
ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")
ITEM_OF_SECTION = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")
# its code, with the empty lines around it
EXAMPLE = re.compile(r"^Example:\n((?: {4}.*\n|\n)+)", re.MULTILINE)
# code, which stays; what Markdown would take for its own
MARKED = re.compile(r"(`+[^`]*`+)|([*<]|(?<!\w)_|_(?!\w))")


def _text(thing: Any) -> str:
    """Return a docstring as Markdown: paragraphs, the code of examples, and lists of arguments and
    errors.
    """
    parts = EXAMPLE.split(inspect.cleandoc(thing.__doc__ or "") + "\n")
    parts[::2] = map(_prose, parts[::2])
    parts[1::2] = [
        f"**Example:**\n\n```python\n{textwrap.dedent(code).strip()}\n```\n" for code in parts[1::2]
    ]
    return "\n".join(parts)


def _prose(docstring: str) -> str:
    """Return the parts of a docstring between examples as Markdown."""
    text: list[str] = []
    in_section, before = False, ""
    for line in docstring.splitlines():
        line = MARKED.sub(lambda found: found[1] or "\\" + found[2], line)
        is_start = before == "" or before[-1] in ".:)"
        ends = line.startswith(("Raises ", "Returns ", "Source: "))
        item = (ITEM_OF_SECTION if in_section else ITEM).fullmatch(line) if is_start else None
        if line in ("Args:", "Raises:"):
            text += ["", f"**{line}**", ""]
            in_section = True
        elif item:
            text += [
                *([] if in_section or text[-1:] == [""] or text[-1][:1] in "- " else [""]),
                f"- `{item[1]}`: {item[2]}",
            ]
        elif line == "":
            text.append("")
            in_section = False
        elif text and text[-1][:1] in ("-", " ") and not (is_start and ends):
            if line.strip().startswith("- "):  # an item of a list, or of one inside an item
                text.append(line.strip() if line[0] == "-" else f"    {line.strip()}")
            else:  # the next line of an item
                indent = "      " if text[-1].startswith("    ") else "  "
                text.append(indent + line.strip())
        else:
            text += [
                *([""] if text and (text[-1][:1] in ("-", " ") or (is_start and ends)) else []),
                line.strip(),
            ]
        before = line
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text).strip()) + "\n"


def _code(call: str) -> str:
    lines = textwrap.fill(call, 100, subsequent_indent="    ", break_long_words=False)
    return f"```python\n{lines}\n```\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower())


def _signature(name: str, thing: Any) -> str:
    """Return a call with the names of arguments and their defaults; what annotations say stands
    in the docstring.
    """
    shown: list[str] = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{stars}{parameter.name}{default}")
    return f"{name}({', '.join(shown)})"


def _default(value: Any) -> str:
    """Return a default in words; a function by its name, as its repr has an address."""
    return value.__name__ if inspect.isfunction(value) else repr(value)


def _methods(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class, or a base class of shardcore's, documents."""
    found = {}
    for base in reversed(
        [base for base in kind.__mro__ if base.__module__.startswith("shardcore")]
    ):
        for name, thing in vars(base).items():
            if (
                not name.startswith("_")
                and (callable(thing) or isinstance(thing, property))
                and thing.__doc__
            ):
                found[name] = thing
    return sorted(found.items())


def page() -> str:
    """Return the text of the page."""
    parts, shown = [HEAD], set[int]()
    public = {name: getattr(shardcore, name) for name in shardcore.__all__} | {
        "TrainingEngine": TrainingEngine
    }
    public |= {"dcp.Writer": shardcore.dcp.Writer, "dcp.Reader": shardcore.dcp.Reader}
    grouped = {name for names in GROUPS.values() for name in names}
    others = [name for name in sorted(public) if name not in grouped and callable(public[name])]
    for group, names in GROUPS.items():
        if names or others:
            parts.append(f"## {group}\n")
        for name in names or others:
            thing = public[name]
            if isinstance(thing, type) and issubclass(thing, Exception):
                parts.append(f"### shardcore.{name}\n\n{_text(thing)}")
            elif thing in MADE_BY:
                parts.append(
                    f"### {name}\n\nReturned by `shardcore.{MADE_BY[thing]}`.\n\n{_text(thing)}"
                )
            else:
                parts.append(
                    f"### shardcore.{name}\n\n{_code(_signature(name, thing))}\n{_text(thing)}"
                )
            methods: dict[str, Any] = {}
            for method, of in (
                _methods(thing) if isinstance(thing, type) and not name.startswith("dcp.") else ()
            ):
                # torch wraps step per class when an optimizer is first made
                own = id(inspect.unwrap(of))
                if own not in shown and method not in LEFT_OUT:  # CPUAdam has those of FusedAdam
                    shown.add(own)
                    methods[method] = of
            if len(methods) > 3:
                links = ", ".join(
                    f"[{method}](#{_anchor(f'{name}.{method}')})" for method in methods
                )
                parts.append(f"Methods and properties: {links}.\n")
            for method, of in methods.items():
                title = (
                    "A property.\n" if isinstance(of, property) else _code(_signature(method, of))
                )
                parts.append(f"#### {name}.{method}\n\n{title}\n{_text(of)}")
    return "\n".join(parts)


KINDS = {
    "honoured": "## Honoured\n\nshardcore checks these values and uses them.",
    "accepted": "## Accepted, without effect\n\n`initialize` logs the reason, once.",
    "refused": "## Refused\n\n`initialize` raises an error, unless the value turns the "
    'feature off (`false`, `null`, `{"enabled": false}`). Remove the key, or follow the table.',
    "removed": "## Removed by DeepSpeed itself\n\nshardcore refuses these keys, too, unless they "
    "are off.",
}
COLUMNS = {"honoured": "effect", "accepted": "reason"}
ALIASES_HEAD = """## Other spellings

| spelling | key |
|---|---|"""
KEYS_HEAD = """# Keys of a DeepSpeed configuration

`shardcore.initialize` checks each key of a configuration against these tables. Search this page for
your key.

- **Unknown keys** raise an error with the nearest known key.
- **Notes**: keys that begin with `_` or `comment`, `comms_config` and `monitor_config` are ignored.
- **Prefix**: keys of `zero_optimization` may begin with `stage3_`.
- **Numbers**: a whole number may be written as `5e8`.
- **Old forms**: `cpu_offload`, `cpu_offload_params` and `zero_optimization: true` are supported.
- **`"auto"`** is filled in by a trainer ([Hugging Face](huggingface.md)).

`python -m tools.make_reference` generates this page from the table in
`shardcore/deepspeed/keys.py`.
"""


def keys_page() -> str:
    """Return the text of the page of DeepSpeed's keys."""
    parts = [KEYS_HEAD]
    for kind, title in KINDS.items():
        notes: dict[str, list[str]] = {}
        for path, key in KEYS.items():
            if key.kind == kind:
                notes.setdefault(key.note, []).append(f"`{path}`")
        rows = [f"| {', '.join(paths)} | {note} |" for note, paths in notes.items()]
        column = COLUMNS.get(kind, "alternative or reason")
        parts.append("\n".join([title, "", f"| key | {column} |", "|---|---|", *rows, ""]))
    rows = [f"| `{old}` | `{new}` |" for old, new in ALIASES.items()]
    parts.append("\n".join([ALIASES_HEAD, *rows, ""]))
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if --check finds another text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(arguments).check
    for name, text in (("reference.md", page()), ("deepspeed_keys.md", keys_page())):
        path = DOCS / name
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{name} is not what the code says; run python -m tools.make_reference")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
