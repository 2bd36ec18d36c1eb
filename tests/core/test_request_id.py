from __future__ import annotations

import pytest

from onebit_serve.core.request_id import RequestIds, sane


@pytest.mark.parametrize("value", [b"a", b"req_123", b"x" * 128, b"{weird}!"])
def test_a_sane_id_is_kept(value):
    assert RequestIds("run").take(value) == value.decode()


@pytest.mark.parametrize("value", [None, b"", b"x" * 129, b"a b", b"a\tb", b"\xc3\xa9", b"a\x7f"])
def test_one_that_would_spoil_a_log_line_is_replaced(value):
    assert sane(value) is None
    assert RequestIds("run").take(value) == "run-1"


def test_no_two_requests_share_an_id_of_ours():
    ids = RequestIds("run")
    assert len({ids.take(None) for _ in range(100)}) == 100
