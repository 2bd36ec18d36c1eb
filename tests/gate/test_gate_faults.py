"""Each seeded fault is caught by its check, and only there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from onebit_serve.core.gate.reference import decode, encode

TRANSCRIPTS = Path(__file__).parents[1] / "core" / "gate" / "transcripts"
SERVED = ("kat", "kld", "reuse")


def only(told, check, status="FAIL"):
    others = {name: found for name, found in told.statuses.items() if name != check}
    assert told.statuses[check] == status, told.lines
    assert set(others.values()) == {"PASS"}, told.lines
    assert told.code == {"FAIL": 1, "NOT RUN": 4}[status]


async def test_a_server_without_a_fault_passes_also_behind_the_proxy(gate):
    told = await gate.run("placement", *SERVED, binary=gate.binary())
    assert told.code == 0, told.lines
    assert set(told.statuses) == {"placement", *SERVED}


async def test_a_wrong_token_at_position_7_is_caught_by_kat_only(gate):
    told = await gate.run(*SERVED, binary=gate.binary("token:7"))
    only(told, "kat")
    assert "first difference at token 7" in told.reason("kat")


async def test_noise_on_the_logits_is_caught_by_kld_only(gate):
    told = await gate.run(*SERVED, binary=gate.binary("noise:0.3"))
    only(told, "kld")


async def test_noise_under_the_floor_is_no_alarm(gate):
    told = await gate.run("kld", binary=gate.binary("noise:0.01"))
    assert told.code == 0, told.lines


async def test_nonsense_after_a_warmed_prefix_is_caught_by_reuse_only(gate):
    told = await gate.run(*SERVED, binary=gate.binary("stale"))
    only(told, "reuse")
    assert "changes the answer" in told.reason("reuse")


async def test_a_reply_refused_as_malformed_counts_as_wrong(gate):
    told = await gate.run("kat", binary=gate.binary("malformed"))
    only_kat = told.statuses == {"kat": "FAIL"}
    assert only_kat, told.lines
    assert "does not match the expected" in told.reason("kat")


async def test_a_ring_timeout_between_start_and_end_is_caught_by_ring_only(gate, tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text("amdgpu 0000:c5:00.0: amdgpu: ring gfx_0.0.0 uses VM inv eng 0 on hub 0\n")
    gate.text += f'ring = {{ log = "{log}" }}\n'
    told = await gate.run("ring", *SERVED, binary=gate.binary(f"ring:{log}"))
    only(told, "ring")
    assert "timeout on ring gfx_0.0.0" in told.reason("ring")


async def test_a_quiet_kernel_log_passes_and_an_unreadable_one_is_not_run(gate, tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text("eth0: link up\n")
    whole = gate.text
    gate.text = whole + f'ring = {{ log = "{log}" }}\n'
    assert (await gate.run("ring")).statuses == {"ring": "PASS"}
    gate.text = whole + f'ring = {{ log = "{tmp_path / "missing.log"}" }}\n'
    told = await gate.run("ring")
    assert (told.code, told.statuses) == (4, {"ring": "NOT RUN"})


def operator_tests(folder, output, code=0):
    program = folder / "test-backend-ops"
    text = folder / "output.txt"
    text.write_text(output)
    program.write_text(f'#!/bin/sh\ncat "{text}"\nexit {code}\n')
    program.chmod(0o755)
    return f'ops = {{ program = "{program}", device = "Vulkan0" }}\n'


async def test_a_truncated_operator_log_is_caught_by_ops(gate, tmp_path):
    whole = (TRANSCRIPTS / "ops-published-passed.txt").read_text()
    text = gate.text
    gate.text = text + operator_tests(tmp_path, whole)
    assert (await gate.run("ops")).statuses == {"ops": "PASS"}
    gate.text = text + operator_tests(tmp_path, whole[: whole.index("3/3")])
    told = await gate.run("ops", "kat")
    only(told, "ops")
    assert "without a summary" in told.reason("ops")


async def test_a_build_without_operator_tests_is_not_run(gate):
    told = await gate.run("ops")
    assert (told.code, told.statuses) == (4, {"ops": "NOT RUN"})


async def test_a_missing_model_is_not_run_with_its_path(gate):
    gate.use_model("/no/such/folder/gone.gguf")
    told = await gate.run(*SERVED)
    assert told.code == 4
    assert set(told.statuses.values()) == {"NOT RUN"}
    assert "gone.gguf is missing" in told.reason("kat")


async def test_a_reference_of_another_quantisation_is_refused(gate, recorded):
    stored = decode(recorded)
    origin = msgspec.structs.replace(stored.origin, file_type=7)
    place = gate.folder / "references" / "tiny.json"
    place.write_bytes(encode(msgspec.structs.replace(stored, origin=origin)))
    told = await gate.run(*SERVED)
    assert told.code == 4
    assert told.statuses == {"kat": "NOT RUN", "kld": "NOT RUN", "reuse": "PASS"}
    assert "quantisation" in told.reason("kat")


async def test_other_flags_than_the_reference_has_are_refused(gate):
    gate.text = gate.text.replace('"-np", "1"', '"-np", "1", "-fa", "off"')
    told = await gate.run("kat")
    assert told.statuses == {"kat": "NOT RUN"}
    assert "-fa off" in told.reason("kat")


async def test_a_missing_reference_is_not_run(gate):
    (gate.folder / "references" / "tiny.json").unlink()
    told = await gate.run("kat")
    assert (told.code, told.statuses) == (4, {"kat": "NOT RUN"})
    assert "--record" in told.reason("kat")


async def test_a_server_that_dies_fails_its_check_and_the_next_ones_get_a_new_server(gate):
    told = await gate.run(*SERVED, binary=gate.binary("die:2"))
    assert told.code == 1
    assert told.statuses["kat"] == "FAIL"
    assert set(told.statuses) == set(SERVED)


async def test_a_server_that_does_not_start_is_a_failure_to_load(gate, tmp_path):
    refusing = tmp_path / "refusing-llama-server"
    refusing.write_text(
        f'#!/bin/sh\ncase "$1" in --*) exec "{gate.real}" "$@";; esac\necho no memory; exit 3\n'
    )
    refusing.chmod(0o755)
    told = await gate.run("reuse", "kat", binary=str(refusing))
    assert told.code == 1
    assert told.statuses == {"load": "FAIL", "kat": "NOT RUN", "reuse": "NOT RUN"}
    assert "no memory" in told.reason("load")


HRX = "model=hrx devices='HRX0: AMD Radeon 8060S (65536 MiB, 65000 MiB free)'"
WARM = """device = "hrx"
warm = { prompt_tokens = 465, limits = { prefill = 0.1, decode = 0.03 } }
"""


async def test_a_server_without_warm_up_is_caught_by_warm(gate, fake_llama):
    gate.text = gate.text.replace('device = "cpu"\n', WARM)
    gate.env["FAKE_LLAMA"] = HRX
    told = await gate.run("warm", binary=fake_llama)
    assert (told.code, told.statuses) == (0, {"warm": "PASS"}), told.lines
    gate.env["ONEBIT_NO_WARMUP"] = "1"
    told = await gate.run("warm", binary=fake_llama)
    assert (told.code, told.statuses) == (1, {"warm": "FAIL"}), told.lines
    assert "prefill of request 1" in told.reason("warm")
    assert "decode of request 1" in told.reason("warm")


def has_software_vulkan(binary):
    env = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "0"}
    asked = subprocess.run([binary, "--list-devices"], env=env, capture_output=True, check=False)
    return b"Vulkan0:" in asked.stdout and b"llvmpipe" in asked.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_one_layer_on_the_cpu_is_caught_by_placement_only(gate):
    if not has_software_vulkan(gate.real):
        pytest.skip("no Vulkan in software: apt-get install mesa-vulkan-drivers")
    vulkan = 'device = "vulkan"\nenv = { GGML_VK_VISIBLE_DEVICES = "0" }\n'
    allowed = 'placement = { allowed = [{ op = "GET_ROWS", name = "embd" }] }\n'
    gate.text = gate.text.replace('device = "cpu"\n', vulkan + allowed)
    gate.text = gate.text.replace("request_s = 60", "request_s = 600")
    gate.text = gate.text.replace("ready_s = 60", "ready_s = 600")
    told = await gate.run("placement", "reuse")
    assert told.code == 0, told.lines
    gate.text = gate.text.replace('"-np", "1"', '"-np", "1", "-ngl", "2"')
    told = await gate.run("placement", "reuse")
    only(told, "placement")
    assert "RMS_NORM norm-0 on CPU" in told.reason("placement")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_context_that_forgets_the_middle_is_caught_by_needle_only(gate, smollm2):
    gate.use_model(smollm2)
    assert (await gate.run("needle")).code == 0
    told = await gate.run("needle", "reuse", binary=gate.binary("forget"))
    only(told, "needle")
    assert "depth 0.5" in told.reason("needle")


async def test_reports_and_evidence_are_on_disk_after_a_run(gate):
    told = await gate.run("kat")
    assert {each.name for each in told.folder.iterdir()} == {
        "report.json",
        "report.md",
        "report.xml",
        "results.jsonl",
        "tiny",
    }
    assert {"kat.json", "origin.json", "serve.log", "llama-server-1.log"} <= {
        p.name for p in (told.folder / "tiny").iterdir()
    }
