from __future__ import annotations

from pathlib import Path

import pytest

from onebit_serve.core.gate.ops import judge, parse

TRANSCRIPTS = Path(__file__).parent / "transcripts"
PASSED = (TRANSCRIPTS / "ops-published-passed.txt").read_text()
FAILED = (TRANSCRIPTS / "ops-published-failed.txt").read_text()


def test_passed_and_unsupported_cases_are_counted_apart():
    found = parse(PASSED)["Vulkan0"]
    assert (found.ok, found.unsupported, found.passed, found.total) == (3, 1, 3, 3)
    assert found.finished
    verdict = judge(PASSED, "Vulkan0", 0)
    assert verdict.status == "PASS"
    assert verdict.figure == "3/3 passed, 1 unsupported"


def test_a_failing_case_fails_and_is_named():
    found = judge(FAILED, "Vulkan0", 1)
    assert found.status == "FAIL"
    assert "MUL_MAT(type_a=q4_0" in found.reason


def test_accepted_failures_are_accepted_up_to_their_number():
    assert judge(FAILED, "Vulkan0", 1, max_failed=1).status == "PASS"


@pytest.mark.parametrize("lines", range(3, len(PASSED.splitlines()) - 1))
def test_an_output_cut_off_anywhere_never_passes(lines):
    cut = "\n".join(PASSED.splitlines()[:lines]) + "\n"
    assert judge(cut, "Vulkan0", None).status == "FAIL"


def test_an_output_that_ends_within_a_case_says_which():
    cut = PASSED[: PASSED.index("SOFT_MAX")] + "SOFT_MAX(type=f32,ne=[16,2,32,1]): "
    found = judge(cut, "Vulkan0", -11)
    assert found.status == "FAIL"
    assert "in SOFT_MAX" in found.reason


def test_nothing_supported_is_not_run_although_the_program_says_ok():
    text = (
        "Testing 1 devices\n\nBackend 1/1: HRX0\n"
        "  SET_ROWS(type_idx=i32,ne0=128): not supported [HRX0] \n"
        "  0/0 tests passed\n  Backend HRX0: OK\n1/1 backends passed\nOK\n"
    )
    assert judge(text, "HRX0", 0).status == "NOT RUN"


@pytest.mark.parametrize("device", ["HRX0", "CPU"])
def test_a_device_that_was_skipped_or_not_named_is_not_run(device):
    assert judge(PASSED, device, 0).status == "NOT RUN"


def test_a_clean_summary_with_a_bad_exit_fails():
    assert judge(PASSED, "Vulkan0", 1).status == "FAIL"
    assert judge(PASSED, "Vulkan0", -6).status == "FAIL"


def test_a_verdict_on_a_line_of_its_own_belongs_to_its_case():
    text = PASSED.replace(
        "nf=1): \033[1;32mOK", "nf=1): ggml_vulkan: a message of the driver\n\033[1;32mOK"
    )
    assert parse(text)["Vulkan0"].ok == 3
