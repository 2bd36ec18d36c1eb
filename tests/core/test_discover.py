from __future__ import annotations

import re
from bisect import bisect_right
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit_serve.core.discover import MAX_PROBES, Discovery
from onebit_serve.core.shapes import VULKAN_STARTS, classes_for


class Device:
    """A device that builds one thing per class at its first use, and takes time for it."""

    def __init__(self, starts, build_s, *, noise=0.02, token_s=0.0005, built_in=True, seed=1):
        self.starts = starts
        self.build_s = build_s
        self.noise = noise
        self.token_s = token_s
        self.random = Random(seed)
        self.built = {self.class_of(2)} if built_in else set()

    def class_of(self, tokens):
        return bisect_right(self.starts, tokens) - 1

    def time(self, tokens):
        seconds = 0.01 + self.token_s * tokens
        seconds *= 1 + self.random.uniform(-self.noise, self.noise)
        kind = self.class_of(tokens)
        if kind >= 0 and kind not in self.built:
            self.built.add(kind)
            seconds += self.build_s(kind) if callable(self.build_s) else self.build_s
        return seconds


def discover(device, ubatch_tokens=512):
    discovery = Discovery(ubatch_tokens)
    while (tokens := discovery.next()) is not None:
        first_s, *again_s = (device.time(tokens) for _ in range(3))
        discovery = discovery.observe(tokens, first_s, *again_s)
        assert len(discovery.seen) <= MAX_PROBES
    return discovery.found()


def test_the_classes_of_software_vulkan_are_found():
    device = Device(VULKAN_STARTS, lambda kind: 0.17 if kind == 0 else 2.5, noise=0.15)
    found = discover(device)
    assert found.classes.starts == VULKAN_STARTS
    assert found.unsure == ()
    assert found.probes <= 30


def test_the_times_measured_on_software_vulkan_give_its_classes():
    # First and second time in seconds, llama-server on lavapipe with no shader cache, growing;
    # lengths that were not measured take the times of their neighbours.
    measured = {1: (0.173, 0.010), 2: (0.015, 0.019), 3: (2.475, 0.036), 4: (3.775, 0.022)}
    measured |= {8: (14.876, 0.043), 9: (3.318, 0.035), 16: (0.053, 0.043), 32: (0.133, 0.106)}
    measured |= {33: (2.974, 0.093), 64: (0.153, 0.157), 65: (13.127, 0.139), 100: (0.206, 0.206)}
    measured |= {200: (0.503, 0.462), 512: (1.1, 1.05)} | dict.fromkeys((5, 6, 7), (5.0, 0.03))
    discovery = Discovery(512)
    while (tokens := discovery.next()) is not None:
        known = max(n for n in measured if n <= tokens)
        first_s, again_s = measured[known]
        if known != tokens:
            first_s = again_s * 1.1
        discovery = discovery.observe(tokens, first_s, again_s, again_s * 1.08)
    assert discovery.found().classes.starts == VULKAN_STARTS


# llama-server b10068 on lavapipe, tiny llama, no shader cache, no flash attention, on two busy
# cores: seconds of the first, second and third prompt of each length.
BUSY = """
1: 0.981 0.076 0.088   2: 0.063 0.055 0.060   3: 21.442 0.052 0.068   4: 13.022 0.041 0.061
5: 13.963 0.063 0.039  6: 156.36 0.134 0.128  7: 229.564 0.188 0.067  8: 118.384 0.164 0.167
9: 26.086 0.123 0.152  12: 0.345 0.220 0.200  16: 0.232 0.198 0.263   17: 0.416 0.492 0.456
24: 0.724 0.738 0.591  32: 0.833 0.907 0.807  33: 28.964 1.255 0.637  48: 0.724 0.788 0.979
64: 1.104 1.827 1.269  65: 129.47 1.126 1.459 96: 2.288 2.493 3.021   128: 2.976 2.961 3.139
129: 3.686 2.977 2.518 192: 3.004 2.847 2.717 256: 4.488 4.208 5.952  257: 5.524 4.173 4.316
384: 6.556 6.155 5.680 512: 10.744 8.456 9.114
"""


def test_the_noise_of_a_busy_machine_is_not_taken_for_a_class():
    rows = re.findall(r"(\d+): ([\d.]+) ([\d.]+) ([\d.]+)", BUSY)
    times = {int(tokens): [float(s) for s in seconds] for tokens, *seconds in rows}
    discovery = Discovery(512)
    while (tokens := discovery.next()) is not None:
        discovery = discovery.observe(tokens, *times.pop(tokens))
    assert times == {}
    assert discovery.found().classes.starts == VULKAN_STARTS
    assert discovery.found().unsure == ()


def test_a_device_that_builds_for_every_length_is_told_by_a_few_of_them():
    found = discover(Device(range(1, 513), 0.15, token_s=0.001))
    assert found.classes == classes_for("hrx")
    assert found.probes <= 20


def test_a_long_prompt_that_pays_a_seventh_is_still_cold():
    # A 27B model: 130 ms more on a prefill of about 0.9 s.
    found = discover(Device(range(1, 513), 0.13, token_s=0.0017, noise=0.01))
    assert found.classes == classes_for("hrx")


@pytest.mark.parametrize(
    ("token_s", "build_s", "noise"),
    [(0.0015, 0.165, 0.045), (0.003, 0.13, 0.02), (0.003, 0.13, 0.045), (0.01, 0.15, 0.03)],
)
def test_on_a_slow_model_long_prompts_whose_first_use_drowns_in_the_noise_decide_nothing(
    token_s, build_s, noise
):
    for seed in range(8):
        device = Device(range(1, 513), build_s, token_s=token_s, noise=noise, seed=seed)
        assert discover(device).classes == classes_for("hrx")


@pytest.mark.parametrize(("token_s", "build_s"), [(0.0005, 0.3), (0.003, 0.3), (0.003, 0.13)])
def test_no_class_is_missed_where_long_prompts_are_below_the_noise(token_s, build_s):
    for seed in range(8):
        device = Device(VULKAN_STARTS, build_s, token_s=token_s, noise=0.04, seed=seed)
        assert set(discover(device).classes.starts) >= set(VULKAN_STARTS)


def test_short_lengths_that_are_classes_each_say_nothing_of_the_long_ones():
    found = discover(Device(range(1, 18), 0.3))
    assert found.classes.starts == tuple(range(1, 18))


def test_a_flat_device_has_no_classes():
    found = discover(Device((), 0.0, noise=0.1))
    assert found.classes.starts == ()
    assert found.first_s == {}
    assert found.probes <= 17


def test_a_class_that_only_long_prompts_have_is_found():
    found = discover(Device((200,), 1.0))
    assert 200 <= found.classes.starts[1] <= 257
    assert found.unsure[0][0] < 200 <= found.unsure[0][1]


def test_a_class_hidden_between_two_steps_is_found():
    starts = (1, 257, 300, 400)
    found = discover(Device(starts, 1.0))
    assert len(found.classes.starts) == 4


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.integers(2, 512), max_size=5).map(lambda s: (1, *sorted(s))),
    st.integers(0, 1000),
)
def test_representatives_of_what_was_found_warm_every_class_that_has_a_step(starts, seed):
    device = Device(starts, 0.8, seed=seed)
    found = discover(device)
    # Whatever the discovery itself has built, it can account for.
    fresh = Device(starts, 0.8, seed=seed)
    for tokens in found.classes.starts:
        fresh.time(tokens)
    assert fresh.built == device.built


@pytest.mark.parametrize("ubatch_tokens", [1, 8, 32, 500, 2048])
def test_any_micro_batch_comes_to_an_end(ubatch_tokens):
    starts = [s for s in VULKAN_STARTS if s <= ubatch_tokens]
    found = discover(Device(starts, 1.0, built_in=False), ubatch_tokens)
    assert max(found.classes.starts) <= ubatch_tokens
    assert set(starts) == set(found.classes.starts)


def test_without_any_time_there_is_nothing_to_conclude():
    assert Discovery(512).found().classes.starts == ()
    assert Discovery(512).next() == 1
