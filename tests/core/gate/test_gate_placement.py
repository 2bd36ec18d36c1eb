from __future__ import annotations

from pathlib import Path

import pytest

from onebit_serve.core.gate.placement import Allowed, judge, parse

TRANSCRIPTS = Path(__file__).parent / "transcripts"
EMBEDDING = (Allowed("GET_ROWS", "embd"),)


def graphs_of(name):
    return parse((TRANSCRIPTS / f"scheduler-b10068-{name}.log").read_text())


def test_every_graph_and_node_of_a_real_log_is_read():
    graphs = graphs_of("vulkan0")
    assert [graph.splits for graph in graphs] == [2, 2, 2, 2][: len(graphs)]
    assert all(graph.unread == () for graph in graphs)
    first = graphs[0].nodes[0]
    assert (first.operation, first.name, first.backend, first.split) == (
        "GET_ROWS",
        "embd",
        "CPU",
        "CPU",
    )
    attention = next(n for n in graphs[0].nodes if n.operation == "FLASH_ATTN")
    assert (attention.backend, attention.split) == ("Vulka", "Vulkan0")


def test_a_model_wholly_on_its_device_passes_with_the_embedding_allowed():
    found = judge(graphs_of("vulkan0"), "Vulkan0", EMBEDDING, served=2)
    assert found.status == "PASS", found.reason
    assert found.data["allowed_on_cpu"]


def test_the_embedding_on_the_cpu_is_a_failure_where_it_is_not_allowed():
    found = judge(graphs_of("vulkan0"), "Vulkan0", (), served=2)
    assert found.status == "FAIL"
    assert "GET_ROWS embd on CPU" in found.reason


def test_one_layer_on_the_cpu_is_a_failure_that_names_its_first_operation():
    found = judge(graphs_of("vulkan0-one-layer-on-cpu"), "Vulkan0", EMBEDDING, served=2)
    assert found.status == "FAIL"
    assert "RMS_NORM norm-0 on CPU" in found.reason


def test_another_get_rows_on_the_cpu_is_not_excused_by_the_embedding():
    rule = (Allowed("GET_ROWS", "embd"),)
    text = (TRANSCRIPTS / "scheduler-b10068-vulkan0.log").read_text()
    moved = text.replace("node_55 (   0K) [Vulka         ]", "node_55 (   0K) [  CPU         ]")
    assert moved != text
    found = judge(parse(moved), "Vulkan0", rule, served=2)
    assert found.status == "FAIL"
    assert "GET_ROWS node_55" in found.reason


def test_a_cpu_model_is_on_the_cpu():
    assert judge(graphs_of("cpu"), "CPU", (), served=2).status == "PASS"


def test_the_published_hrx_names_are_read_the_same_way():
    text = (TRANSCRIPTS / "scheduler-b10068-vulkan0.log").read_text()
    # As ggml prints a name of four letters; not captured on HRX.
    hrx = text.replace("[Vulka         ]", "[ HRX0         ]").replace("Vulkan0", "HRX0")
    assert judge(parse(hrx), "HRX0", EMBEDDING, served=2).status == "PASS"
    assert judge(parse(hrx), "Vulkan0", EMBEDDING, served=2).status == "FAIL"


def test_two_devices_with_the_same_first_five_letters_are_told_apart():
    text = (TRANSCRIPTS / "scheduler-b10068-vulkan0.log").read_text()
    assert judge(parse(text), "Vulkan1", EMBEDDING, served=2).status == "FAIL"


def test_a_log_without_scheduler_output_is_not_run():
    found = judge(parse("load_tensors: offloaded 3/3 layers to GPU\n"), "HRX0", (), served=0)
    assert found.status == "NOT RUN"


@pytest.mark.parametrize("served", [0, 1])
def test_reserved_graphs_alone_do_not_show_a_placement(served):
    assert judge(graphs_of("cpu"), "CPU", (), served=served).status == "NOT RUN"


def test_node_lines_in_an_unknown_format_are_not_run_and_never_a_pass():
    text = (TRANSCRIPTS / "scheduler-b10068-cpu.log").read_text()
    found = judge(parse(text.replace("use=", "uses ")), "CPU", (), served=2)
    assert found.status == "NOT RUN"
    assert "could not be read" in found.reason
