"""Prints the table of make crash-test: what tests marked crash have recorded as "crash" (what,
how often, what came of it).
"""

from typing import Any

from tests.support.crash import wanted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [
        row
        for report in reports
        if report.when == "call"
        for name, row in report.user_properties
        if name == "crash"
    ]
    if not wanted() or not rows:
        return
    terminalreporter.section("crash test")
    widths = [max(len(str(row[column])) for row in rows) for column in range(2)]
    for what, count, outcome in rows:
        terminalreporter.write_line(
            f"{what.ljust(widths[0])}  {str(count).rjust(widths[1])}  {outcome}"
        )
