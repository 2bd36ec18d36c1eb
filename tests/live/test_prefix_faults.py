"""Backends that lack a route, refuse, or do not count: what is then said of a warm prompt."""

from __future__ import annotations

import json
import os
import time

import pytest
import trio

from onebit_serve.core.http import Reply
from onebit_serve.core.warm_prompts import PROBES, parse
from onebit_serve.live.prefix import PromptWarmer
from onebit_serve.live.prompt_backend import PromptBackend
from onebit_serve.live.saves import Saves, private_directory, prune
from onebit_serve.live.upstream import GoneError

SYSTEM = {"role": "system", "content": "Be brief and kind, and say so."}
ENTRIES = parse(json.dumps([[SYSTEM]]), "-")
GARBAGE = {"error": {"message": "output that does not match the expected Content-only format"}}


class Backend:
    """Just enough of llama-server: a token is a character, a slot remembers its last prompt."""

    def __init__(self, **answers):
        self.answers = answers
        self.slots = [[], []]
        self.asked = []

    async def __call__(self, method, path, body):
        await trio.lowlevel.checkpoint()
        self.asked.append((method, path))
        route = path.split("?")[0].strip("/").split("/")[0].replace("-", "_")
        answer = self.answers.get(route, getattr(self, route))
        if callable(answer):
            answer = answer(json.loads(body or b"{}"))
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        return Reply(status, value if isinstance(value, bytes) else json.dumps(value).encode())

    def props(self, _body):
        settings = {"n_ctx": 1000}
        return {"total_slots": 2, "default_generation_settings": settings, "chat_template": "x"}

    def apply_template(self, body):
        return {"prompt": "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])}

    def tokenize(self, body):
        return {"tokens": [ord(c) for c in body["content"]]}

    def completion(self, body):
        slot, prompt = max(body["id_slot"], 0), body["prompt"]
        held = self.slots[slot]
        same = next((i for i, (a, b) in enumerate(zip(held, prompt)) if a != b), len(held))  # noqa: B905
        self.slots[slot] = prompt
        cached = min(same, len(prompt) - 1)
        return {"id_slot": slot, "timings": {"cache_n": cached, "prompt_n": len(prompt) - cached}}

    def slots_action(self, _body):
        return {"n_erased": 1}


class Gone(Backend):
    """A backend that dies at its n-th request."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    async def __call__(self, method, path, body):
        if len(self.asked) >= self.at:
            raise GoneError("connection refused")
        return await super().__call__(method, path, body)


@pytest.fixture
def told():
    return []


async def warmed(backend, told, **more):
    warmer = PromptWarmer(backend, ENTRIES, say=told.append, **more)
    await warmer.warm()
    return warmer.standings[0]


async def test_a_backend_that_does_all_is_proven(told) -> None:
    standing = await warmed(Backend(), told)
    assert (standing.proven, standing.slots, standing.source) == (True, (0, 1), "prefill")
    assert standing.tokens == standing.reused_tokens == len("<system><user>") + 30
    assert told == [told[-1]]


async def test_the_tokens_of_entries_that_render_alike_are_counted_once(told) -> None:
    warmer = PromptWarmer(Backend(), parse(json.dumps([[SYSTEM]] * 3), "-"), say=told.append)
    await warmer.warm()
    assert [one.same_as for one in warmer.standings] == ["", "entry 1", "entry 1"]
    assert "3 completed, 0 skipped, 44 prompt tokens" in told[-1]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"props": (404, {})}, "this backend has no /props"),
        ({"props": (200, b"<html>")}, "this backend has no /props"),
        ({"apply_template": (404, {})}, "this backend has no /apply-template"),
        ({"apply_template": {}}, "/apply-template answered without a prompt"),
        ({"apply_template": {"prompt": "gemma"}}, "the template ignores the user's text"),
        (
            {"apply_template": (400, {"error": {"message": "no\nsystem role"}})},
            "/apply-template answered 400: no system role",
        ),
        (
            {"apply_template": (400, {"error": {"message": "x" * 500 + " the end"}})},
            "... " + "x" * 92 + " the end",
        ),
        ({"tokenize": {"tokens": "none"}}, "/tokenize answered without tokens"),
        ({"completion": (500, {"error": "no object"})}, "/completion answered 500: no reason"),
        ({"completion": {}}, "the backend reports no cached tokens"),
        ({"completion": (500, GARBAGE)}, "the backend reports no cached tokens"),
        ({"completion": {"timings": {"cache_n": 0}}}, "0 of 44 tokens are reused"),
        ({"completion": {"timings": {"cache_n": 22}}}, "22 of 44 tokens are reused"),
        (
            {"props": {"total_slots": 1, "default_generation_settings": {"n_ctx": 20},
                       "chat_template": "x"}},
            "44 tokens do not fit a slot of 20",
        ),
        (
            {"props": {"total_slots": 1, "chat_template": "{{ strftime_now('%H') }}"}},
            "the template writes the time",
        ),
    ],
)  # fmt: skip
async def test_what_is_not_warm_is_told_with_the_reason(answers, why, told) -> None:
    standing = await warmed(Backend(**answers), told)
    assert not standing.proven
    assert why in standing.why
    assert told[0].startswith("warm prompt entry 1 is not warm: ")
    assert "0 completed, 1 skipped, 0 prompt tokens" in told[-1]


@pytest.mark.parametrize("at", [0, 1, 10, 31, 35])
async def test_a_backend_that_dies_leaves_entries_that_are_not_warm(at, told) -> None:
    standing = await warmed(Gone(at), told)
    assert not standing.proven
    assert standing.why == "the backend went away: connection refused"


async def test_a_cache_that_was_not_cleared_is_told(told) -> None:
    assert not await PromptWarmer(Gone(0), ENTRIES, say=told.append).clear()
    assert told == ["the prompt cache was not cleared: the backend went away: connection refused"]
    assert await PromptWarmer(Backend(slots={"n_erased": 0}), ENTRIES).clear()


async def test_a_repair_of_a_backend_that_dies_raises_nothing(told) -> None:
    backend = Backend()
    warmer = PromptWarmer(backend, ENTRIES, say=told.append)
    await warmer.warm()
    warmer.used(0, 0)
    warmer._backend = PromptBackend(Gone(0))
    assert await warmer.repair() == 1
    assert "the backend went away" in warmer.standings[0].why


class Spoilt(Backend):
    """A backend in which client traffic takes the slot before the first proofs come."""

    def __init__(self, proofs):
        super().__init__()
        self.proofs = proofs

    def completion(self, body):
        if len(body["prompt"]) > 44 and self.proofs:
            self.proofs -= 1
            self.slots[body["id_slot"]] = []
        return super().completion(body)


async def test_what_traffic_kept_from_being_proven_is_due_and_a_repair_proves_it(told) -> None:
    # Where one proof is spoilt, the second finds what the first one left.
    assert (await warmed(Spoilt(1), told)).proven
    warmer = PromptWarmer(Spoilt(2), ENTRIES, say=told.append)
    await warmer.warm()
    assert (warmer.standings[0].proven, warmer.due) == (False, [0])
    assert await warmer.repair() == 1
    assert (warmer.standings[0].proven, warmer.standings[0].why, warmer.due) == (True, "", [])


@pytest.mark.parametrize(
    "answers",
    [
        {"completion": {"timings": {"cache_n": 0}}},
        {"completion": (500, {"error": {"message": "Compute error."}})},
        {"props": (404, {})},
    ],
)
async def test_what_no_repair_can_prove_is_left_alone_after_three(answers, told) -> None:
    backend = Backend(**answers)
    warmer = PromptWarmer(backend, ENTRIES, say=told.append)
    await warmer.warm()
    for _ in range(3):
        assert (warmer.due, warmer.standings[0].evicted) == ([0], True)
        assert await warmer.repair() == 1
    asked = len(backend.asked)
    assert (await warmer.repair(), warmer.standings[0].evicted) == (0, False)
    assert len(backend.asked) == asked
    await warmer.warm()
    assert warmer.due == [0]


async def test_what_a_template_or_the_room_refuses_is_not_tried_again(told) -> None:
    for answers in (
        {"apply_template": (400, {})},
        {
            "props": {
                "total_slots": 1,
                "default_generation_settings": {"n_ctx": 20},
                "chat_template": "x",
            }
        },
    ):
        warmer = PromptWarmer(Backend(**answers), ENTRIES, say=told.append)
        await warmer.warm()
        assert warmer.due == []


class Failing(Backend):
    """A backend whose first prefills and proofs fail."""

    def __init__(self, times, *, by_reset):
        super().__init__()
        self.times = times
        self.by_reset = by_reset

    def completion(self, body):
        if not self.times:
            return super().completion(body)
        self.times -= 1
        if self.by_reset:
            raise GoneError("connection reset")
        return 500, {"error": {"message": "Compute error."}}


@pytest.mark.parametrize("by_reset", [False, True])
async def test_one_failure_is_tried_again_at_once_and_more_while_idle(by_reset, told) -> None:
    warmer = PromptWarmer(Failing(1, by_reset=by_reset), ENTRIES, say=told.append)
    await warmer.warm()
    assert (warmer.standings[0].proven, warmer.standings[0].slots) == (True, (0, 1))
    warmer = PromptWarmer(Failing(2, by_reset=by_reset), ENTRIES, say=told.append)
    await warmer.warm()
    assert (warmer.standings[0].proven, warmer.due) == (False, [0])
    assert await warmer.repair() == 1
    assert (warmer.standings[0].proven, warmer.due) == (True, [])


async def test_a_repair_that_a_client_cancelled_counts_as_no_try(told) -> None:
    backend = Backend(completion={"timings": {"cache_n": 0}})
    warmer = PromptWarmer(backend, ENTRIES, say=told.append)
    await warmer.warm()
    for _ in range(4):
        with trio.CancelScope() as scope:
            scope.cancel()
            await warmer.repair()
        assert scope.cancelled_caught
    assert warmer.due == [0]


async def test_a_template_nobody_knows_is_rendered_twice_a_while_apart(
    told,
    autojump_clock,  # noqa: ARG001  # pytest-trio looks for it among the arguments
) -> None:
    started_s = trio.current_time()
    backend = Backend(props={"total_slots": 1})
    assert (await warmed(backend, told)).proven
    assert trio.current_time() - started_s > 1
    ticks = iter(range(100))
    backend = Backend(
        props={"total_slots": 1},
        apply_template=lambda b: {
            "prompt": f"{next(ticks) // len(PROBES)}{b['messages'][-1]['content']}"
        },
    )
    assert "the template writes the time" in (await warmed(backend, told)).why


async def test_a_saved_slot_of_other_content_is_removed_and_written_anew(told, tmp_path) -> None:
    saves = Saves(private_directory(tmp_path / "slots"), binary="b", model="m")

    def act(body):
        if body["filename"].endswith(".part"):
            (saves.directory / body["filename"]).write_bytes(b"state")
            return {"n_saved": 44}
        return {"n_restored": 43}

    assert (await warmed(Backend(slots=act), told, saves=saves)).source == "prefill"
    (path,) = saves.directory.iterdir()
    assert path.read_bytes() == b"state"
    path.write_bytes(b"other")
    assert (await warmed(Backend(slots=act), told, saves=saves)).source == "prefill"
    assert path.read_bytes() == b"state"


async def test_a_save_of_other_length_leaves_nothing_behind(told, tmp_path) -> None:
    saves = Saves(private_directory(tmp_path / "slots"), binary="b", model="m")

    def act(body):
        (saves.directory / body["filename"]).write_bytes(b"half")
        return {"n_saved": 7}

    assert (await warmed(Backend(slots=act), told, saves=saves)).proven
    assert list(saves.directory.iterdir()) == []


async def test_a_folder_of_saved_slots_that_became_a_file_is_no_fault(told, tmp_path) -> None:
    saves = Saves(tmp_path / "slots", binary="b", model="m")
    saves.directory.write_text("a file")
    assert (await warmed(Backend(slots=(501, {})), told, saves=saves)).proven


def test_only_the_owner_can_look_into_the_directory_of_saved_slots(tmp_path) -> None:
    loose = tmp_path / "slots"
    loose.mkdir(mode=0o755)
    assert private_directory(loose).stat().st_mode & 0o777 == 0o700
    assert private_directory(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_told(tmp_path) -> None:
    from onebit_serve.core.errors import UsageError

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep saved slots in"):
        private_directory(tmp_path / "file" / "slots")


def test_the_longest_unused_states_are_removed_first(tmp_path) -> None:
    for age, name in enumerate(("warm-new.bin", "warm-old.bin", "other.bin", "warm-older.bin")):
        path = tmp_path / name
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    prune(tmp_path, limit_bytes=200)
    assert {p.name for p in tmp_path.iterdir()} == {"warm-new.bin", "warm-old.bin", "other.bin"}
    prune(tmp_path, limit_bytes=199)
    assert {p.name for p in tmp_path.iterdir()} == {"warm-new.bin", "other.bin"}


def test_no_two_saves_write_to_the_same_place(tmp_path) -> None:
    saves = Saves(tmp_path, binary="b", model="m")
    path = saves.path((1, 2))
    parts = {saves.part(path) for _ in range(3)}
    assert len(parts) == 3
    assert all(f".{os.getpid()}-" in part.name and part.suffix == ".part" for part in parts)
    assert path not in parts


def test_what_a_writer_left_behind_is_removed_and_what_is_being_written_counts(tmp_path) -> None:
    ages = {"warm-a.bin": 50, "warm-b.bin": 40, "warm-c.7-0.part": 30, "warm-d.7-1.part": 7200}
    for name, age_s in ages.items():
        path = tmp_path / name
        path.write_bytes(b"x" * 100)
        os.utime(path, (time.time() - age_s,) * 2)
    prune(tmp_path, limit_bytes=300)
    assert {p.name for p in tmp_path.iterdir()} == {"warm-a.bin", "warm-b.bin", "warm-c.7-0.part"}
    prune(tmp_path, limit_bytes=200)
    assert {p.name for p in tmp_path.iterdir()} == {"warm-b.bin", "warm-c.7-0.part"}
