"""The options of llama-server: which we share, which we refuse, which are passed on.

llama-server's long options are also spelled with one dash (`-ngl 99`, `-fa on`), so a command line
is split here, by whole words, before click sees the part that is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from onebit_serve.core.errors import UsageError, nearest

__all__ = [
    "ALWAYS_UNSET",
    "SHARED",
    "Shared",
    "Split",
    "check_extra",
    "given",
    "split",
    "value",
    "variables_of",
]


class Shared(msgspec.Struct, frozen=True):
    """An option of the child that we set too.

    Args:
        spellings: All its names, those that say the opposite included.
        variables: The variables by which the child reads it (its `--help`, b10068).
    """

    spellings: tuple[str, ...]
    variables: tuple[str, ...]


SHARED: tuple[Shared, ...] = (
    Shared(("-m", "--model"), ("LLAMA_ARG_MODEL",)),
    Shared(("--host",), ("LLAMA_ARG_HOST",)),
    Shared(("--port",), ("LLAMA_ARG_PORT",)),
    Shared(("-a", "--alias"), ("LLAMA_ARG_ALIAS",)),
    Shared(("-dev", "--device"), ("LLAMA_ARG_DEVICE",)),
    Shared(("-ngl", "--gpu-layers", "--n-gpu-layers"), ("LLAMA_ARG_N_GPU_LAYERS",)),
    Shared(("--jinja", "--no-jinja"), ("LLAMA_ARG_JINJA", "LLAMA_ARG_NO_JINJA")),
    Shared(("-c", "--ctx-size"), ("LLAMA_ARG_CTX_SIZE",)),
    Shared(("-np", "--parallel"), ("LLAMA_ARG_N_PARALLEL",)),
    Shared(("-b", "--batch-size"), ("LLAMA_ARG_BATCH",)),
    Shared(("-ub", "--ubatch-size"), ("LLAMA_ARG_UBATCH",)),
    Shared(("-fa", "--flash-attn"), ("LLAMA_ARG_FLASH_ATTN",)),
    Shared(("--embedding", "--embeddings"), ("LLAMA_ARG_EMBEDDINGS",)),
    Shared(("--reranking", "--rerank"), ("LLAMA_ARG_RERANKING",)),
    Shared(("--spec-type",), ("LLAMA_ARG_SPEC_TYPE",)),
    Shared(
        ("-md", "--model-draft", "--spec-draft-model"),
        ("LLAMA_ARG_MODEL_DRAFT", "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    ),
    Shared(
        ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
        ("LLAMA_ARG_N_GPU_LAYERS_DRAFT",),
    ),
    Shared(("--spec-draft-n-max",), ("LLAMA_ARG_SPEC_DRAFT_N_MAX", "LLAMA_ARG_DRAFT_MAX")),
    Shared(
        ("--spec-draft-p-min", "--draft-p-min"),
        ("LLAMA_ARG_SPEC_DRAFT_P_MIN", "LLAMA_ARG_DRAFT_P_MIN"),
    ),
)

# What would put the child where we do not look for it, or keep it from answering us.
ALWAYS_UNSET: tuple[str, ...] = (
    "LLAMA_API_KEY",
    "ONEBIT_API_KEY",
    "LLAMA_ARG_API_KEY_FILE",
    "LLAMA_ARG_API_PREFIX",
    "LLAMA_ARG_SSL_KEY_FILE",
    "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_REUSE_PORT",
    "LLAMA_ARG_HF_REPO",
    "LLAMA_ARG_MODEL_URL",
    "LLAMA_ARG_DOCKER_REPO",
    "LLAMA_ARG_MODELS_DIR",
    "LLAMA_ARG_MODELS_PRESET",
)

_BEFORE = "give it before `--`: `1bit serve` sets it for the backend"
_KEY = "a key on a command line is there for every user to read; the backend needs none"
_DOWNLOAD = "nothing is downloaded; fetch the file and name it with -m"
_ENDS = "it prints and ends; run the llama-server itself, or `1bit check`"
_ROUTER = "its router starts servers of its own; name one model with -m"
_HIDES = "the front door could not reach the backend"

# Never passed on, whether before or after `--`.
_REFUSED: dict[str, str] = {
    "--api-key": _KEY,
    "--api-prefix": _HIDES,
    "--ssl-key-file": _HIDES,
    "--ssl-cert-file": _HIDES,
    "--reuse-port": _HIDES,
    "-hf": _DOWNLOAD,
    "-hfr": _DOWNLOAD,
    "--hf-repo": _DOWNLOAD,
    "-mu": _DOWNLOAD,
    "--model-url": _DOWNLOAD,
    "-dr": _DOWNLOAD,
    "--docker-repo": _DOWNLOAD,
    "--models-dir": _ROUTER,
    "--models-preset": _ROUTER,
    "--list-devices": _ENDS,
    "-cl": _ENDS,
    "--cache-list": _ENDS,
    "--completion-bash": _ENDS,
    "--usage": _ENDS,
    "--version": _ENDS,
}
_REFUSED_AFTER: dict[str, str] = {
    "-m": _BEFORE,
    "--model": _BEFORE,
    "--host": _BEFORE,
    "--port": _BEFORE,
    "--alias": _BEFORE,
    "-a": _BEFORE,
    "--api-key-file": _KEY,
    "-h": _ENDS,
    "--help": _ENDS,
}
# Planned: each with what to do until then. Delete a line when its flag is there.
_NOT_YET: dict[str, str] = {
    "--adaptive": "",
    "--adaptive-at": "",
    "--embed": "serve the model alone: 1bit serve -m M.gguf --embedding",
    "--lean": "",
    "--rerank": "serve the model alone: 1bit serve -m M.gguf --reranking",
}


class Split(msgspec.Struct, frozen=True):
    """A command line in three parts.

    Args:
        own: Options of ours in order, each with its value (`None` where it takes none).
        child: Options of the child that stood before `--`.
        extra: All that stood after `--`.
    """

    own: tuple[tuple[str, str | None], ...]
    child: tuple[str, ...]
    extra: tuple[str, ...]


def split(words: Sequence[str], own: Mapping[str, int], child: Mapping[str, int] | None) -> Split:
    """Split a command line by whose options they are.

    Args:
        words: The command line after `1bit serve`.
        own: Our options and how many values each takes, 0 or 1.
        child: The child's, as its `--help` lists them; `None` while it is not known which child
            it is: what is not ours then goes to the child unchecked.

    Raises:
        UsageError: An option nobody knows, one that is refused, a value too few or too many, or a
            word that belongs to no option.
    """
    ours: list[tuple[str, str | None]] = []
    theirs: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            extra = tuple(words[position:])
            check_extra(extra)
            return Split(tuple(ours), tuple(theirs), extra)
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name.startswith("--"):  # llama-server takes --ctx_size for --ctx-size
            name = name.replace("_", "-")
            word = name + equals + value
        if child is None and name not in own:
            _refuse(name)
            theirs.append(word)
            continue
        count = own[name] if name in own else _values_of(name, own, child or {})
        values = [value] if equals else list(words[position : position + count])
        if len(values) != count and child is None:
            theirs.append(word)  # it may be the value of an option that is not known yet
            continue
        if len(values) != count:
            raise UsageError(
                f"{name} takes no value" if equals and not count else _too_few(name, count),
                hint="see `1bit serve --help`" if name in own else "see `llama-server --help`",
            )
        position += 0 if equals else count
        if name in own:
            ours.append((name, values[0] if values else None))
        else:
            theirs.extend([name, *values])
    return Split(tuple(ours), tuple(theirs), ())


def _too_few(name: str, count: int) -> str:
    return f"{name} needs a value" if count == 1 else f"{name} needs {count} values"


def _values_of(name: str, own: Mapping[str, int], child: Mapping[str, int]) -> int:
    if not name.startswith("-") or name == "-":
        raise UsageError(
            f"{name!r} belongs to no option", hint="the model is named with -m, as for llama-server"
        )
    _refuse(name)
    if name not in child:
        raise UsageError(
            f"there is no option {name}",
            hint=nearest(name, tuple(own), cutoff=0.8)
            or nearest(name, tuple(child))
            or nearest(name, tuple(own))
            or "arguments that only the backend knows go after `--`",
        )
    return child[name]


def _refuse(name: str) -> None:
    if name in _NOT_YET:
        raise UsageError(f"{name} is not yet supported", hint=_NOT_YET[name])
    if name in _REFUSED:
        raise UsageError(f"{name} cannot be used here", hint=_REFUSED[name])


def check_extra(words: Iterable[str]) -> None:
    """Raise where arguments for the child contain what only we may set.

    Raises:
        UsageError: `--host`, `--port`, `--alias`, `--api-key` or a like one, also as `--port=1`.
    """
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            name = name.replace("_", "-")
        hint = _REFUSED_AFTER.get(name) or _REFUSED.get(name)
        if hint:
            raise UsageError(f"{name} cannot be given to the backend", hint=hint)


def given(words: Iterable[str], option: str) -> bool:
    """Say whether a command line gives an option, in any of its spellings."""
    names = next((row.spellings for row in SHARED if option in row.spellings), (option,))
    return any(word.partition("=")[0] in names for word in words)


def value(words: Sequence[str], *spellings: str) -> str | None:
    """Return the value that a command line gives an option; the last one counts, as for the child.

    Args:
        words: The command line.
        spellings: All names of the option.
    """
    found = None
    for number, word in enumerate(words):
        name, equals, said = word.partition("=")
        if name in spellings:
            found = said if equals else next(iter(words[number + 1 : number + 2]), None)
    return found


def variables_of(words: Iterable[str]) -> tuple[str, ...]:
    """Return the variables by which the child would read the options of a command line too."""
    present = {word.partition("=")[0] for word in words}
    return tuple(
        variable
        for row in SHARED
        if not present.isdisjoint(row.spellings)
        for variable in row.variables
    )
