"""Tokens, costs and slots of the fake: pure values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_process import Llama, until

from onebit_serve.fake_llama import text
from onebit_serve.fake_llama.costs import Costs
from onebit_serve.fake_llama.options import OptionError, read
from onebit_serve.fake_llama.slots import Slots

Fake = Callable[..., Llama]


@given(st.text() | st.text("abcz \n<|im_start|>", max_size=60))
@settings(max_examples=200, deadline=None)
def test_every_text_comes_back_from_its_tokens(sample: str) -> None:
    tokens = text.tokenize(sample)
    assert b"".join(map(text.piece, tokens)).decode() == sample
    assert all(0 <= token < text.N_VOCAB for token in tokens)


def test_tokens_have_pieces_of_their_own_except_letters_which_are_bytes_too() -> None:
    pieces = [text.piece(token) for token in range(text.N_VOCAB)]
    assert len(set(pieces)) == text.N_VOCAB - 26
    assert all(pieces)


def test_two_newlines_are_one_token_and_specials_are_parsed_where_asked() -> None:
    assert len(text.tokenize("\n\n")) == 1
    assert text.tokenize("<|im_end|>") == [text.EOS]
    assert len(text.tokenize("<|im_end|>", parse_special=False)) > 1
    assert text.tokenize("a", bos=True)[0] == text.BOS


def test_a_last_assistant_message_is_left_open() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert text.render({"messages": messages}, "chatml").endswith("<|im_start|>assistant\nb")


def test_a_reply_depends_on_the_prompt_alone() -> None:
    first = text.reply_tokens([1, 2, 3], "plain", "", garbage=False)
    assert first == text.reply_tokens([1, 2, 3], "plain", "", garbage=False)
    assert first != text.reply_tokens([9, 8, 7, 6], "plain", "", garbage=False)


@pytest.mark.parametrize("tokens", [1, 100, 465, 511, 512])
def test_an_hrx_build_costs_what_was_measured(tokens: int) -> None:
    (batch,) = Costs("hrx", 1, 0, 0).batches(tokens, 512)
    assert 130 <= batch.build_ms <= 200
    assert batch.shape == f"prefill:{tokens}"


def test_a_warm_up_sized_prompt_pays_20_to_28_percent_on_hrx() -> None:
    (batch,) = Costs("hrx", 1, 0, 0).batches(465, 512)
    assert 0.20 <= batch.build_ms / batch.ms <= 0.28


@pytest.mark.parametrize("sequences", [1, 2, 4, 8])
def test_the_request_that_meets_a_decode_shape_is_5_to_7_percent_slower(sequences: int) -> None:
    costs = Costs("hrx", 1, 0, 0)
    shape = costs.decode_shape(sequences)
    warm = costs.step_ms(shape, built=True, met_unbuilt=False)
    first = costs.step_ms(shape, built=False, met_unbuilt=True)
    assert 1.05 <= first / warm <= 1.07


def test_a_prompt_is_full_batches_and_a_rest() -> None:
    batches = Costs("hrx", 1, 0, 0).batches(1100, 512)
    assert [batch.tokens for batch in batches] == [512, 512, 76]
    assert [batch.shape for batch in batches] == ["prefill:512", "prefill:512", "prefill:76"]


def test_vulkan_has_eleven_classes() -> None:
    costs = Costs("vulkan", 1, 0, 0)
    shapes = [costs.batches(tokens, 512)[0].shape for tokens in range(1, 513)]
    assert len(set(shapes)) == 11
    borders = [at + 1 for at in range(1, 512) if shapes[at] != shapes[at - 1]]
    assert borders == [2, 3, 4, 5, 6, 7, 8, 9, 33, 65]
    assert costs.decode_shape(3) == "batch:3"


REUSE = [
    ("dense", "same", 39),
    ("swa", "same", 35),
    ("hybrid", "same", 36),
    ("dense", "longer", 40),
    ("swa", "longer", 35),
    ("hybrid", "longer", 40),
    ("dense", "shorter", 36),
    ("swa", "shorter", 35),
    ("hybrid", "shorter", 36),
    ("dense", "other", 5),
    ("swa", "other", 0),
    ("hybrid", "other", 0),
]


@pytest.mark.parametrize(("arch", "next_prompt", "reused"), REUSE)
def test_a_prompt_reuses_what_its_kind_of_model_can(
    arch: str, next_prompt: str, reused: int
) -> None:
    slots = Slots(1, arch, 0.1, 0)
    prompt = list(range(40))
    slot = slots.all[0]
    slot.start(prompt, 0, arch, 512)
    if next_prompt != "longer":
        slot.tokens += [900, 901, 902]
    wanted = {
        "same": prompt,
        "longer": [*prompt, 50, 51, 52],
        "shorter": prompt[:37],
        "other": [*prompt[:5], 700, 701],
    }
    assert slot.reusable(wanted[next_prompt], arch) == reused


def test_slots_go_from_the_top_and_pinned_ones_wait() -> None:
    slots = Slots(3, "dense", 0.1, 0)
    taken = [slots.take([number] * 5, -1) for number in range(3)]
    assert [slot.number for slot, _ in filter(None, taken)] == [2, 1, 0]
    assert slots.take([9], -1) is None
    assert slots.take([9], 4) is None
    slots.release(slots.all[1])
    found = slots.take([9], 4)
    assert found is not None
    assert found[0].number == 1


@pytest.mark.parametrize(
    ("shared", "kept"), [(30, 100), (45, 100), (49, 100), (51, 51), (55, 55), (70, 70)]
)
def test_the_host_cache_saves_only_what_shares_less_than_half(shared: int, kept: int) -> None:
    slots = Slots(1, "dense", 0.1, 2**30)
    old = list(range(100))
    new = [*old[:shared], *range(1000, 1100 - shared)]
    for prompt in (old, new):
        slot, _ = slots.take(prompt, -1) or pytest.fail("no slot")
        slot.start(prompt, slot.reusable(prompt, "dense"), "dense", 512)
        slots.release(slot)
    slot, _ = slots.take([*old, 5000], -1) or pytest.fail("no slot")
    assert slot.reusable([*old, 5000], "dense") == kept


def test_unknown_options_are_kept_with_their_values() -> None:
    options = read(["--new", "x", "-c", "512", "--flag", "--other", "-1", "--jinja"], {})
    assert options.unknown == ["--new", "x", "--flag", "--other", "-1"]
    assert options.number("ctx-size", 0) == 512
    with pytest.raises(OptionError, match="invalid argument: --new"):
        read(["--new"], {}, strict=True)
    with pytest.raises(OptionError, match="expected value"):
        read(["-m"], {})


def test_the_environment_comes_before_the_command_line() -> None:
    env = {"LLAMA_ARG_PORT": "1", "LLAMA_ARG_CTX_SIZE": "256", "LLAMA_API_KEY": "k"}
    options = read(["--port", "2"], env)
    assert (options.number("port", 0), options.number("ctx-size", 0)) == (2, 256)
    assert options.text("api-key") == "k"


def test_the_record_marks_who_met_an_unbuilt_shape(fake: Fake) -> None:
    llama = fake("model=hrx scale=0.001", "-np", "2").ready()
    for _ in range(2):
        llama.complete([300] * 100, cache_prompt=False, n_predict=8, id_slot=0)
    until(lambda: len(llama.record("reply")) == 2, "the record of both")
    first, second = llama.record("reply")
    assert first["unbuilt"] == first["shapes"] == ["prefill:100", "decode:1"]
    assert (second["unbuilt"], second["shapes"]) == ([], ["prefill:100", "decode:1"])
    prefill = first["timings"]["prompt_ms"] - second["timings"]["prompt_ms"]
    assert 130 <= prefill <= 200
    decode = first["timings"]["predicted_ms"] / second["timings"]["predicted_ms"]
    assert 1.05 <= decode <= 1.07
    assert llama.get("/fake/shapes").json() == {"built": ["decode:1", "prefill:100"]}


def test_timings_carry_no_noise(fake: Fake) -> None:
    llama = fake("model=hrx scale=0.001").ready()
    body = {"cache_prompt": False, "n_predict": 6}
    llama.complete([300] * 70, **body)
    timings = [llama.complete([300] * 70, **body)["timings"] for _ in range(3)]
    assert timings[0] == timings[1] == timings[2]


def test_two_sequences_together_are_a_shape_of_their_own(fake: Fake) -> None:
    llama = fake("model=hrx scale=0.2", "-np", "2").ready()
    body = {"prompt": [300] * 9, "n_predict": 200}
    socks = [llama.open_stream("/completion", {**body, "id_slot": slot}) for slot in range(2)]

    def both() -> bool:
        return "decode:2" in llama.get("/fake/shapes").json()["built"]

    until(both, "the shape of two sequences")
    for sock in socks:
        sock.close()


def test_one_token_builds_no_decode_shape(fake: Fake) -> None:
    llama = fake("model=hrx scale=0.001").ready()
    llama.complete([300] * 20, n_predict=1)
    assert llama.get("/fake/shapes").json() == {"built": ["prefill:20"]}


def test_software_vulkan_pays_by_class(fake: Fake) -> None:
    llama = fake("model=vulkan scale=0.0001").ready()
    ms = []
    for tokens in (100, 200, 20, 30, 8, 8):
        timings = llama.complete([300] * tokens, cache_prompt=False, n_predict=1)["timings"]
        ms.append(timings["prompt_ms"] - 2.2 * tokens)
    assert [round(extra) for extra in ms] == [12988, 0, 3283, 0, 14833, 0]
