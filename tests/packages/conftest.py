"""Tests of other packages' models: with --packages only. `scripts/test --packages` installs the packages.

Each test notes a `runs.Record`; the run prints them as a table.
"""

TITLES = (
    "program",
    "used for",
    "target",
    "calls",
    "differences",
    "groups",
    "fallbacks",
    "seconds",
    "unfused",
    "error",
)
LAST = "kernels after each size"


_rows, _failed = [], set()


def pytest_runtest_logreport(report):
    """A record is complete when its fixture is torn down, and only reports of that phase have it."""
    if report.failed:
        _failed.add(report.nodeid)
    if report.when == "teardown":
        failed = report.nodeid in _failed
        _rows.extend(_row(value, failed) for key, value in report.user_properties if key == "packages")


def pytest_terminal_summary(terminalreporter):
    rows = _rows
    if not rows:
        return
    terminalreporter.section("models of other packages: fused against unfused")
    lines = [(*TITLES, LAST), *sorted(rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(TITLES))]
    for line in lines:
        cells = [
            cell.ljust(width) if k < 3 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths))
        ]
        terminalreporter.write_line("  ".join((*cells, line[-1])))
    reasons = {reason for row in rows for reason in row[6].split("; ") if reason != "0"}
    terminalreporter.write_line(
        f"{len(rows)} rows, {sum(int(row[3]) for row in rows)} calls, "
        f"{sum(int(row[4]) for row in rows)} differences; "
        f"reasons of fallbacks: {', '.join(sorted(reasons)) or 'none'}"
    )


def _row(record, failed):
    """The cells of a line: a record, and "failed" where its test did for another reason than a difference."""
    failed = failed and not record["differences"]
    return (
        record["program"],
        record["way"] + (" FAILED" if failed else ""),
        record["target"],
        str(record["calls"]),
        str(record["differences"]),
        str(record["groups"]),
        "; ".join(f"{count} x {reason}" for reason, count in record["fallbacks"].items()) or "0",
        f"{record['seconds']:.1f}",
        f"{record['unfused_seconds']:.1f}",
        f"{record['error']:.2f}",
        " ".join(map(str, record["kernels"])),
    )
