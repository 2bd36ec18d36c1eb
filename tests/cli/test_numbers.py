from __future__ import annotations

import pytest
from click.testing import CliRunner

from onebit_serve.cli import bench, route


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "x"])
@pytest.mark.parametrize(
    "words",
    [
        ("--url", "http://127.0.0.1:1", "--request-limit"),
        ("ab", "--arm", "a=", "--start-limit"),
        ("compare", "a.csv", "b.csv", "--fail-under"),
    ],
)
def test_what_is_no_number_of_the_range_is_refused(words, number):
    result = CliRunner().invoke(bench.command, [*words, number])
    assert result.exit_code == 2
    assert words[-1] in result.output


def test_a_deadline_that_is_no_number_is_refused():
    result = CliRunner().invoke(route.command, ["--state", "x", "--deadline", "nan"])
    assert result.exit_code == 2
