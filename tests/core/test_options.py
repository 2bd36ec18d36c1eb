from __future__ import annotations

import re
import subprocess

import pytest

from onebit_serve.core import options
from onebit_serve.core.errors import UsageError

OWN = {"-m": 1, "--model": 1, "-p": 1, "--port": 1, "--no-warmup": 0, "-a": 1, "--alias": 1}
CHILD = {
    "-ngl": 1,
    "--n-gpu-layers": 1,
    "-fa": 1,
    "--jinja": 0,
    "--no-webui": 0,
    "--temp": 1,
    "-s": 1,
    "--reverse-prompt": 1,
    "--prio": 1,
    "--control-vector-layer-range": 2,
    "--api-key": 1,
    "--api-key-file": 1,
    "--rerank": 0,
    "--list-devices": 0,
    "-hf": 1,
    "--warmup": 0,
    "--no-warmup": 0,
}


def split(line: str) -> options.Split:
    return options.split(line.split(), OWN, CHILD)


@pytest.mark.parametrize(
    ("line", "own", "child", "extra"),
    [
        ("", [], "", ""),
        ("-m a.gguf --port 1", [("-m", "a.gguf"), ("--port", "1")], "", ""),
        ("--port=1", [("--port", "1")], "", ""),
        ("--port=", [("--port", "")], "", ""),
        ("--alias=a=b", [("--alias", "a=b")], "", ""),
        ("-ngl 99 -fa on --jinja", [], "-ngl 99 -fa on --jinja", ""),
        ("--temp=0.5", [], "--temp 0.5", ""),
        ("-s -1", [], "-s -1", ""),
        ("--reverse-prompt -p -p 2", [("-p", "2")], "--reverse-prompt -p", ""),
        ("--control-vector-layer-range 1 2", [], "--control-vector-layer-range 1 2", ""),
        ("--no-warmup", [("--no-warmup", None)], "", ""),
        ("-- --no-warmup", [], "", "--no-warmup"),
        ("-p 1 -- -x 2 --", [("-p", "1")], "", "-x 2 --"),
    ],
)
def test_a_command_line_is_split_by_whose_options_they_are(line, own, child, extra):
    assert split(line) == options.Split(tuple(own), tuple(child.split()), tuple(extra.split()))


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--prot 1", "there is no option --prot", "did you mean --port?"),
        ("--jinj", "there is no option --jinj", "did you mean --jinja?"),
        ("--zzzzzzz", "there is no option --zzzzzzz", "after `--`"),
        ("a.gguf", "'a.gguf' belongs to no option", "-m"),
        ("-", "'-' belongs to no option", "-m"),
        ("-p", "-p needs a value", "1bit serve --help"),
        ("-ngl", "-ngl needs a value", "llama-server --help"),
        ("--control-vector-layer-range 1", "needs 2 values", "llama-server --help"),
        ("--jinja=1", "--jinja takes no value", "llama-server --help"),
        ("--no-warmup=1", "--no-warmup takes no value", "1bit serve --help"),
        ("--api-key k", "--api-key cannot be used", "every user"),
        ("--api-key=k", "--api-key cannot be used", "every user"),
        ("--list-devices", "--list-devices cannot be used", "1bit check"),
        ("-hf a/b", "-hf cannot be used", "nothing is downloaded"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_with_a_hint(line, message, hint):
    with pytest.raises(UsageError) as caught:
        split(line)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["--adaptive", "--adaptive-at", "--embed", "--lean", "--rerank"])
def test_a_flag_that_is_not_there_yet_says_so_before_the_backend_is_known(name):
    for child in (CHILD, None):
        with pytest.raises(UsageError, match=f"{name} is not yet supported"):
            options.split([name, "x"], OWN, child)


@pytest.mark.parametrize(
    "word",
    [
        *("--host", "--port", "--alias", "-a", "--api-key", "--api-key-file", "-m", "--model"),
        *("--host=::1", "--port=1", "--alias=x", "--api-key=k", "--api-key-file=f", "-a=x"),
        *("--api-prefix", "--ssl-key-file", "--list-devices", "--help", "-hf"),
    ],
)
def test_what_only_we_may_set_is_refused_after_the_two_dashes(word):
    with pytest.raises(UsageError, match="cannot be given to the backend") as caught:
        split(f"-- {word} x")
    assert caught.value.hint


def test_underscores_stand_for_dashes_as_in_llama_server():
    assert split("--no_warmup").own == split("--no-warmup").own
    assert split("--n_gpu_layers 9").child == split("--n-gpu-layers 9").child
    with pytest.raises(UsageError, match="--api-key cannot be given"):
        split("-- --api_key=x")


def test_before_the_backend_is_known_everything_else_is_kept_unchecked():
    parts = options.split(["-fa", "on", "-p", "1", "--tpyo", "x"], OWN, None)
    assert parts == options.Split((("-p", "1"),), ("-fa", "on", "--tpyo", "x"), ())
    assert options.split(["--reverse-prompt", "-p"], OWN, None).child == ("--reverse-prompt", "-p")


def test_an_option_counts_as_given_in_any_of_its_spellings():
    assert options.given(["--n-gpu-layers", "3"], "-ngl")
    assert options.given(["--gpu-layers=3"], "-ngl")
    assert options.given(["--no-jinja"], "--jinja")
    assert options.given(["--prefill-x"], "--prefill-x")
    assert not options.given(["-n", "3"], "-ngl")


def test_the_variables_of_what_we_set_are_known():
    found = options.variables_of(["-m", "x", "--port", "{port}", "--no-jinja"])
    assert found == (
        "LLAMA_ARG_MODEL",
        "LLAMA_ARG_PORT",
        "LLAMA_ARG_JINJA",
        "LLAMA_ARG_NO_JINJA",
    )


def test_the_variables_of_what_we_share_are_those_of_a_real_build(real_llama_server):
    asked = [real_llama_server, "--help"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    # An entry runs from its names in the first column to the next one.
    entries = [(set(re.split(r"[ ,]+", e.split("\n")[0])), e) for e in re.split(r"\n(?=-)", text)]
    for row in options.SHARED:
        entry = next(e for names, e in entries if not names.isdisjoint(row.spellings))
        read_by_it = set(re.findall(r"\(env: (\w+)\)", entry))
        assert read_by_it <= set(row.variables)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("-c 4096", "4096"),
        ("--ctx-size=8192", "8192"),
        ("-c 1 --ctx-size 2", "2"),
        ("-c", None),
        ("--c 1", None),
        ("", None),
    ],
)
def test_the_value_of_an_option_is_the_last_one_given(line, value):
    assert options.value(line.split(), "-c", "--ctx-size") == value
