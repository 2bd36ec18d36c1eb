"""What the gate keeps on disk, reads from the machine, and records."""

from __future__ import annotations

import msgspec
import pytest

from onebit_serve.core.errors import UsageError
from onebit_serve.core.gate.config import Kat, Model
from onebit_serve.core.gate.kld import Distribution, Position
from onebit_serve.core.gate.tokens import Answer, Step, Token
from onebit_serve.gate.evidence import Evidence, Kept, sha256
from onebit_serve.gate.identify import MissingError, model_path, scheduler_device
from onebit_serve.gate.programs import read_kernel_log
from onebit_serve.gate.record import kept_answers
from onebit_serve.gate.requests import noise_floor
from onebit_serve.gate.serving import Subject

MODEL = Model(name="m", profile="p", model="/no/m.gguf", device="hrx")


def test_a_hash_is_read_again_only_when_the_file_has_changed(tmp_path):
    kept = Kept(tmp_path / "hashes.json")
    file = tmp_path / "a"
    file.write_bytes(b"one")
    first = sha256([file], kept)
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    kept.table = dict.fromkeys(kept.table, "remembered")
    assert sha256([file], kept) == "remembered"
    file.write_bytes(b"two!")
    assert sha256([file], kept) not in {first, "remembered"}


def test_the_hash_of_parts_depends_on_each_and_their_order(tmp_path):
    kept = Kept(tmp_path / "hashes.json")
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert sha256([one, two], kept) != sha256([two, one], kept) != sha256([one], kept)


def test_what_is_kept_survives_and_a_broken_file_costs_only_time(tmp_path):
    kept = Kept(tmp_path / "deep" / "table.json")
    kept.table["a"] = 1.5
    kept.save()
    assert Kept(tmp_path / "deep" / "table.json").table == {"a": 1.5}
    (tmp_path / "deep" / "table.json").write_text("{")
    assert Kept(tmp_path / "deep" / "table.json").table == {}


def test_a_former_report_may_be_written_over_and_other_files_may_not(tmp_path):
    Evidence(tmp_path / "report")
    Evidence(tmp_path / "report")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        Evidence(tmp_path / "other")


def test_a_named_kernel_log_is_read_with_growing_marks(tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text("a\nb\n")
    named = msgspec.structs.replace(MODEL, ring=msgspec.structs.replace(MODEL.ring, log=str(log)))
    assert read_kernel_log(named).lines == ((0.0, "a"), (1.0, "b"))
    log.unlink()
    assert "cannot be read" in read_kernel_log(named).problem


@pytest.mark.parametrize(
    ("word", "name"),
    [("hrx", "HRX0"), ("vulkan", "Vulkan0"), ("rocm", "ROCm0"), ("cpu", "CPU"), ("CUDA1", "CUDA1")],
)
def test_device_words_have_the_scheduler_s_names(word, name):
    assert scheduler_device(word) == name


@pytest.mark.parametrize(
    ("model", "words"),
    [("/no/m.gguf", "/no/m.gguf is missing"), ("${MODELS}/m.gguf", "variable that is not set")],
)
def test_a_model_that_is_not_there_is_told_as_missing(model, words):
    with pytest.raises(MissingError, match="model file") as caught:
        model_path(msgspec.structs.replace(MODEL, model=model))
    assert words in caught.value.reason


def test_a_server_gets_the_model_s_arguments_after_two_dashes():
    model = msgspec.structs.replace(MODEL, args=("-ctk", "q8_0"), env={"A": "1"})
    subject = Subject(model, "/m.gguf", "/bin/llama-server", {"A": "0", "B": "2"})
    command = subject.command(warm_up=False, extra=["-lv", "5"])
    said = " ".join(command[command.index("-m") :])
    assert said == (
        "-m /m.gguf --device hrx -c 8192 -p 0 --llama-server /bin/llama-server "
        "--no-restart --no-warmup -- -ctk q8_0 -lv 5"
    )
    idle = {"ONEBIT_WARMUP_IDLE": "0"}
    assert subject.environment(C="3") == {"A": "1", "B": "2", "C": "3", **idle}


def answer(name, *leads, first=100):
    steps = tuple(Step(Token(first + n, "x"), lead) for n, lead in enumerate(leads))
    return Answer(name, (1,), steps)


KAT = Kat(tokens=4, min_lead=0.5, min_tokens=3)


def test_a_recorded_answer_ends_before_its_first_undecided_token():
    given = answer("a", 1, 1, 1, 0.1)
    kept, problems = kept_answers((given,), (given,), KAT)
    assert len(kept[0].steps) == 3
    assert problems == []


def test_an_answer_with_too_few_decided_tokens_is_refused_by_name():
    given = answer("week", 1, 0.1, 1, 1)
    _, problems = kept_answers((given,), (given,), KAT)
    assert "week is decided for 1 tokens only" in problems[0]


def test_a_short_answer_that_is_decided_to_its_end_is_kept():
    given = answer("a", 1, 1)
    kept, problems = kept_answers((given,), (given,), KAT)
    assert (len(kept[0].steps), problems) == (2, [])


def test_what_two_loads_say_differently_is_not_kept():
    first, second = answer("a", 1, 1, 1, 1), answer("a", 1, 1, 1, 1, first=200)
    kept, problems = kept_answers((first,), (second,), KAT)
    assert kept[0].steps == ()
    assert problems


def test_the_noise_floor_tells_loads_and_paths_apart():
    one, other = Distribution((1, 2), (-0.1, -2.5)), Distribution((1, 2), (-0.2, -2.0))
    first = (Position("t", 9, "decode", one), Position("t", 9, "prefill", other))
    floor = noise_floor(first, first)
    assert floor.loads == 0
    assert floor.paths == floor.mean > 0
    moved = (Position("t", 9, "decode", other), Position("t", 9, "prefill", other))
    assert noise_floor(first, moved).loads > 0
